"""Backups: a checkpoint of each model, the kept versions that consumers follow, and a marker that is written last.

checkpoints/...    files of checkpoints, see `checkpoints.manifest`
backup.json        the marker: the names of the manifests, and the other small records; written last
backup.json.new    exists while the backup is being made
"""

import asyncio
import contextlib
import json
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from deltasync.base.errors import Contradiction, InvalidInput, ServiceUnavailable, StorageFailed
from deltasync.base.events import EventKind, Events
from deltasync.base.threads import in_own_thread
from deltasync.base.words import counted
from deltasync.checkpoints.file_storage import DEADLINE_SECONDS, UNFINISHED, Place, StoredFile
from deltasync.checkpoints.kept_version import KeptVersion, kept_file, pack_kept
from deltasync.checkpoints.manifest import Manifest
from deltasync.checkpoints.store import CheckpointStore
from deltasync.consumers.follow import follow_of_record
from deltasync.log.data_directory import (
    BACKUP_MARKER,
    CHECKPOINTS,
    UNFINISHED_BACKUP,
    check_is_data_directory,
    for_owner_only,
    lock_data_directory,
)
from deltasync.log.records import reading, unpack_json
from deltasync.service.checkpoints import Checkpoints, records_of_others
from deltasync.service.models import Models
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service

FORMAT = 1
# How long to wait until an interrupted backup ends. Silent storage must not keep the process longer.
_LONGEST_END_SECONDS = 5.0
# The remedy for a damaged backup.
ANOTHER = "use another backup, or make a new one if the service still runs"

Check = Callable[[], None]


@dataclass(frozen=True)
class Backup:
    """The content of a backup.

    Attributes:
        manifests: file of each model's manifest.
        others: small records that belong to no model, by name.
        files: number of files, without the marker.
        bytes: size of these files.
        made_unix_ns: when it was completed, nanoseconds since 1970.
    """

    manifests: Mapping[str, str]
    others: Mapping[str, str]
    files: int
    bytes: int
    made_unix_ns: int


class BackupPlace:
    """The place of a backup. Blocks; any thread.

    Attributes:
        url: its URL.
        checkpoints: where the files of its checkpoints are.
    """

    def __init__(self, url: str, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        """Use a folder or URL. See `Place` for the deadline.

        Raises:
            InvalidInput: no file system supports the URL.
        """
        self.url, self._folder = url, _folder_of(url)
        self._place = Place(url, deadline_seconds=deadline_seconds)
        self.checkpoints = Place(f"{url.rstrip('/')}/{CHECKPOINTS}", deadline_seconds=deadline_seconds)
        self._id = uuid.uuid4().hex.encode()

    def begin(self) -> None:
        """Mark the place as unfinished, and remove the files of an earlier unfinished backup.

        Raises:
            InvalidInput: it contains other files.
            StorageFailed: it cannot be read or written.
        """
        self.check_empty()
        self._place.put(UNFINISHED_BACKUP, self._id)
        self._remove_files()

    def check_empty(self) -> None:
        """Check that the place is empty, or contains only an unfinished backup.

        Raises:
            InvalidInput: it contains other files.
            StorageFailed: it cannot be read.
        """
        names = self._names()
        if names and (UNFINISHED_BACKUP not in names or names - {UNFINISHED_BACKUP, CHECKPOINTS}):
            raise InvalidInput(f"{self.url} is not empty: choose a new or an empty place")

    def check_own(self) -> None:
        """Check that no other backup was begun in the same place.

        Raises:
            StorageFailed: another backup was begun there.
        """
        if UNFINISHED_BACKUP not in self._names() or self._place.get(UNFINISHED_BACKUP) != self._id:
            raise StorageFailed(f"{self.url}: another backup was begun there: use a separate place for each")

    def complete(
        self, manifests: Mapping[str, Manifest], expected: Set[str], others: Mapping[str, bytes]
    ) -> Backup:
        """Mark the backup as complete. `expected` are the names of its files.

        Raises:
            StorageFailed: it cannot be written, or another backup was begun there.
        """
        files = {each.name: each.bytes for each in self._files()}
        if strange := files.keys() ^ expected:
            raise StorageFailed(f"{self.url}: another program added or removed {min(strange)} during the backup")
        backup = Backup(
            {model: each.name for model, each in manifests.items()},
            {name: value.decode("latin-1") for name, value in others.items()},
            len(files),
            sum(files.values()),
            time.time_ns(),
        )
        content = asdict(backup)
        marker = {"format": FORMAT, "digest": _digest(content), "content": content}
        self.check_own()
        self._place.put(BACKUP_MARKER, json.dumps(marker, indent=1).encode())
        self._place.remove(UNFINISHED_BACKUP)
        return backup

    def abandon(self) -> None:
        """Remove all files of the backup, unless another backup was begun there.

        Raises:
            StorageFailed: something could not be removed.
        """
        self.check_own()
        self._remove_files()
        self._place.remove(UNFINISHED_BACKUP)

    def read(self) -> Backup | None:
        """Read the marker of a complete backup; None if the place has no backup.

        Raises:
            StorageFailed: the backup is not complete, is damaged, or was made by a later version.
        """
        names = self._names()
        if BACKUP_MARKER not in names:
            if UNFINISHED_BACKUP in names:
                raise StorageFailed(
                    f"{self.url}: the backup is incomplete: wait if it is still being made, or make it again"
                )
            return None
        where = f"{self.url.rstrip('/')}/{BACKUP_MARKER}"
        try:
            marker = json.loads(self._place.get(BACKUP_MARKER))
            if marker["format"] > FORMAT:
                text = f"{where} is of format {marker['format']}, this version reads {FORMAT}: update deltasync"
                raise StorageFailed(text)
            if marker["digest"] != _digest(marker["content"]):
                raise ValueError("its content does not match its digest")
            return Backup(**marker["content"])
        except (KeyError, TypeError, ValueError) as error:
            raise StorageFailed(f"{where} is damaged ({error!r}): {ANOTHER}") from error

    def _names(self) -> set[str]:
        """The names in the place. A marker that was only half written counts as an unfinished backup."""
        names = {each.name for each in self._place.names("")}
        cut_short = names & {BACKUP_MARKER + UNFINISHED, UNFINISHED_BACKUP + UNFINISHED}
        return names - cut_short | ({UNFINISHED_BACKUP} if cut_short else set())

    def _remove_files(self) -> None:
        if self._folder:
            shutil.rmtree(self._folder / CHECKPOINTS, ignore_errors=True)
        for each in self._files():
            self.checkpoints.remove(each.name)

    def _files(self) -> list[StoredFile]:
        models = self.checkpoints.names("")
        folders = [folder for each in models for folder in self.checkpoints.names(each.name)]
        return [file for folder in folders for file in self.checkpoints.names(folder.name)]


class Backups:
    """Makes backups of a service, one at a time. Used in the event loop."""

    def __init__(
        self, models: Models, checkpoints: Checkpoints, data_dir: Path, events: Events, draining: asyncio.Event
    ) -> None:
        self._models = models
        self._checkpoints = checkpoints
        self._data_dir = data_dir
        self._events, self._draining = events, draining
        self._making = asyncio.Lock()

    async def make(self, url: str, by: str) -> Backup:
        """Copy all data of the service to a new or empty place; `by` names the caller. Cuts and releases continue.

        Raises:
            InvalidInput: the path is relative or inside the data directory, or the place is not empty.
            Contradiction: another backup is being made, or the service shares its log with other processes.
            ServiceUnavailable: models are still recovering, or the service is shutting down.
            StorageFailed: something could not be read or written.
        """
        if self._models.storage.shared:
            raise Contradiction(
                "a cluster needs no backup: its checkpoints are at the URL of --checkpoints, from which "
                "deltasync restore makes a data directory"
            )
        self._check_recovered()
        if self._making.locked():
            raise Contradiction("another backup is being made: wait until it ends")
        async with self._making:
            _check_url(url, self._data_dir)
            try:
                backup = await self._make(BackupPlace(url, self._models.storage.deadline_seconds))
            except StorageFailed as error:
                self._events.emit(EventKind.FAILED, "a backup could not be made", error, directory=url, by=by)
                raise
        text = f"{counted(backup.files, 'file')}, {counted(backup.bytes, 'byte')}"
        self._events.emit(EventKind.BACKED_UP, text, directory=url, by=by)
        return backup

    async def _make(self, place: BackupPlace) -> Backup:
        await in_own_thread(place.begin)
        left = False

        def check() -> None:
            place.check_own()
            if left or self._draining.is_set():
                raise ServiceUnavailable("the caller disconnected, or the service is shutting down")

        making = asyncio.create_task(self._fill(place, check))
        try:
            return await asyncio.shield(making)
        except BaseException:
            left = True
            await asyncio.wait({making}, timeout=_LONGEST_END_SECONDS)
            making.add_done_callback(lambda each: each.cancelled() or each.exception())  # Nobody waits for it.
            with contextlib.suppress(StorageFailed):  # The next backup replaces what remains.
                if making.done():
                    await in_own_thread(place.abandon)
            raise

    async def _fill(self, place: BackupPlace, check: Check) -> Backup:
        manifests, files = dict[str, Manifest](), set[str]()
        self._check_recovered()  # A model may have failed since the first check; the backup must not leave it out.
        for name in sorted(self._models):
            store = self._models.model(name).checkpoints
            manifest = manifests[name] = await self._checkpoints.write(name)
            await in_own_thread(check)
            files |= await in_own_thread(_copy, store, manifest, place.checkpoints, check)
        others = await in_own_thread(self._others, manifests)
        await in_own_thread(check)
        return await in_own_thread(place.complete, manifests, files, others)

    def _check_recovered(self) -> None:
        for model in self._models.recovering:
            self._models.check_recovered(model)

    def _others(self, manifests: Mapping[str, Manifest]) -> dict[str, bytes]:
        logs = self._models.storage.logs.each()
        return {name: value for log in logs for name, value in records_of_others(log, manifests).items()}


def followed_versions(manifest: Manifest) -> dict[str, list[KeptVersion]]:
    """The kept versions that the consumers in a checkpoint follow, by the consumer's name.

    Raises:
        StorageFailed: the record of a consumer is damaged.
    """
    versions = dict[str, list[KeptVersion]]()
    for name, record in manifest.small.items():
        kind, _, consumer = name.partition("/")
        if kind == "consumer":
            with reading(f"record {name} of checkpoint {manifest.name}"):
                follows = follow_of_record(unpack_json(record))
            versions[consumer] = follows.versions if follows else []
    return versions


def _copy(store: CheckpointStore, manifest: Manifest, place: Place, check: Check) -> set[str]:
    """Copy a checkpoint, and the kept versions that its consumers follow. Return the names of the files."""
    kept = {each.id: each for versions in followed_versions(manifest).values() for each in versions}
    manifests = [*(store.manifest_of(each) for each in kept), manifest]
    # Begin before the first copy, because a consumer may go on and its version be released.
    with store.using(*manifests):
        for each in manifests:
            store.copy(each, place, check)
    for version in kept.values():
        place.put(kept_file(manifest.model, version.id), pack_kept(version))
    names = {each.name for each in manifests} | {kept_file(manifest.model, each) for each in kept}
    return names | {file.name for each in manifests for file in each.files}


@for_owner_only()
def back_up_offline(data_dir: Path, url: str | Path) -> Backup:
    """Back up a data directory that no service uses. It is locked during the backup.

    Raises:
        InvalidInput: the folder is not a data directory, or the place is not empty.
        StorageFailed: a service uses it, a file in it is damaged, or a file cannot be read or written.
    """
    check_is_data_directory(data_dir)
    url = str(url) if "://" in str(url) else str(Path(url).absolute())
    BackupPlace(url).check_empty()
    lock_data_directory(data_dir, "stop it, or back it up while it runs, without --data-dir").close()

    async def back_up() -> Backup:
        async with asyncio.TaskGroup() as tasks:
            service = Service(ServiceOptions(data_dir=data_dir), tasks)
            try:
                await service.recovery.all(patient=False)
                backups = Backups(service.models, service.checkpoints, data_dir, service.events, service.draining)
                return await backups.make(url, "deltasync backup --data-dir")
            finally:
                await service.drain()

    try:
        return asyncio.run(back_up())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group


def _check_url(url: str, data_dir: Path) -> None:
    if "\0" in url:
        raise InvalidInput(f"{url!r}: a URL must not contain a null character")
    if (folder := _folder_of(url)) is None:
        return
    if not folder.is_absolute():
        raise InvalidInput(f"{url}: expected an absolute path on the service's machine, or a URL")
    if folder.resolve().is_relative_to(data_dir.resolve()):
        raise InvalidInput(f"{url} is inside the data directory {data_dir}: choose a place outside of it")


def _folder_of(url: str) -> Path | None:
    """The folder that a URL names; None if it names object storage."""
    return Path(url.removeprefix("file://")) if "://" not in url or url.startswith("file://") else None


def _digest(content: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
