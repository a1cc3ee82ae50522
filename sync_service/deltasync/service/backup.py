"""Backups: a checkpoint of each model, the kept versions that consumers follow, and a marker.

checkpoints/...    files of checkpoints, see `checkpoints.manifest`
backup.json        the marker, written first without manifests, and at the end with the names of all manifests
"""

import asyncio
import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput, StorageFailed
from deltasync.base.events import EventKind, Events
from deltasync.base.threads import in_own_thread
from deltasync.base.words import counted
from deltasync.checkpoints.file_storage import DEADLINE_SECONDS, UNFINISHED, Place
from deltasync.checkpoints.kept_version import kept_file, pack_kept
from deltasync.checkpoints.manifest import Manifest, pack_checked, unpack_checked
from deltasync.checkpoints.store import CheckpointStore
from deltasync.consumers.follow import follow_of_record
from deltasync.log.data_directory import BACKUP_MARKER, CHECKPOINTS
from deltasync.log.records import reading, unpack_json
from deltasync.service.checkpoints import Check, Checkpoints, records_of_others, unless_left
from deltasync.service.models import Models

# Silent storage must not keep the process longer.
_LONGEST_END_SECONDS = 5.0


@dataclass(frozen=True)
class Backup:
    """The models of a complete backup with their versions, and the size of their checkpoints."""

    models: Mapping[str, int]
    bytes: int


class BackupPlace:
    """The place of a backup. Blocks; any thread."""

    def __init__(self, url: str, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        """Use a folder or URL. See `Place` for the deadline."""
        self.url, self._id = url, uuid.uuid4().hex
        self._place = Place(url, deadline_seconds=deadline_seconds)
        self.checkpoints = Place(f"{url.rstrip('/')}/{CHECKPOINTS}", deadline_seconds=deadline_seconds)

    def begin(self) -> None:
        """Mark the place as incomplete, and remove the files of an earlier incomplete backup."""
        # A marker of which only a part was written counts as none.
        names = {each.name for each in self._place.names("")} - {BACKUP_MARKER + UNFINISHED}
        incomplete = {BACKUP_MARKER} <= names <= {BACKUP_MARKER, CHECKPOINTS} and not self._is_complete()
        if names and not incomplete:
            raise InvalidInput(f"{self.url} is not empty: choose a new or an empty place")
        self._write(None)
        self._remove_files()

    def complete(self, manifests: Sequence[Manifest], others: Mapping[str, bytes]) -> None:
        """Mark the backup as complete. `others` are small records that belong to none of its models."""
        if self._marker()["id"] != self._id:
            raise StorageFailed(f"{self.url}: another backup was begun there: use a separate place for each")
        self._write([each.name for each in manifests], others)

    def abandon(self) -> None:
        """Remove all files of the backup, unless another one was begun there."""
        if self._marker()["id"] == self._id:
            self._remove_files()
            self._place.remove(BACKUP_MARKER)

    def read(self) -> tuple[list[str], dict[str, bytes]] | None:
        """The names of a backup's manifests, and its small records; None if the place has no backup."""
        if BACKUP_MARKER not in {each.name for each in self._place.names("")}:
            return None
        if not self._is_complete():
            raise StorageFailed(
                f"{self.url}: the backup is incomplete: wait if it is still being made, or make it again"
            )
        marker = self._marker()
        return marker["manifests"], {name: value.encode("latin-1") for name, value in marker["others"].items()}

    def _write(self, manifests: Sequence[str] | None, others: Mapping[str, bytes] | None = None) -> None:
        small = {name: value.decode("latin-1") for name, value in (others or {}).items()}
        marker = {"id": self._id, "manifests": manifests, "others": small}
        self._place.put(BACKUP_MARKER, pack_checked(marker))

    def _is_complete(self) -> bool:
        return self._marker()["manifests"] is not None

    def _marker(self) -> dict[str, Any]:
        return unpack_checked(f"{self.url.rstrip('/')}/{BACKUP_MARKER}", self._place.get(BACKUP_MARKER))

    def _remove_files(self) -> None:
        for each in self.checkpoints.names(""):
            CheckpointStore(each.name, self.checkpoints).remove_all()
        self._place.remove_folder(CHECKPOINTS)


class Backups:
    """Makes backups of a service, one at a time. Used in the event loop."""

    def __init__(
        self, models: Models, checkpoints: Checkpoints, data_dir: Path, events: Events, draining: asyncio.Event
    ) -> None:
        self._models, self._checkpoints = models, checkpoints
        self._data_dir, self._events, self._draining = data_dir, events, draining
        self._making = asyncio.Lock()

    async def make(self, url: str, by: str) -> Backup:
        """Copy all data of the service to a new or empty place, while cuts go on; `by` names the caller."""
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
            place = BackupPlace(url, self._models.storage.deadline_seconds)
            try:
                backup = await unless_left(
                    lambda check: self._fill(place, check), self._draining, end_seconds=_LONGEST_END_SECONDS
                )
            except StorageFailed as error:
                self._events.emit(EventKind.FAILED, "a backup could not be made", error, directory=url, by=by)
                raise
        models = ", ".join(f"{name} at version {version}" for name, version in backup.models.items())
        self._events.emit(
            EventKind.BACKED_UP, f"{models or 'no model'}, {counted(backup.bytes, 'byte')}", directory=url, by=by
        )
        return backup

    async def _fill(self, place: BackupPlace, check: Check) -> Backup:
        await in_own_thread(place.begin)
        try:
            manifests = list[Manifest]()
            self._check_recovered()  # A model may have failed meanwhile; the backup must not leave it out.
            for name in sorted(self._models):
                store = self._models.model(name).checkpoints
                manifests.append(await self._checkpoints.write(name))
                check()
                await in_own_thread(_copy, store, manifests[-1], place.checkpoints, check)
            models = {each.model: each.version for each in manifests}
            others = await in_own_thread(self._others, models)
            check()
            await in_own_thread(place.complete, manifests, others)
            return Backup(models, sum(each.bytes for each in manifests))
        except DeltasyncError:
            with contextlib.suppress(StorageFailed):  # The next backup replaces what remains.
                await in_own_thread(place.abandon)
            raise

    def _check_recovered(self) -> None:
        for model in self._models.recovering:
            self._models.check_recovered(model)

    def _others(self, models: Mapping[str, int]) -> dict[str, bytes]:
        logs = self._models.storage.logs.each()
        return {name: value for log in logs for name, value in records_of_others(log, models).items()}


def _copy(store: CheckpointStore, manifest: Manifest, place: Place, check: Check) -> None:
    if lacking := copy_followed(store, manifest, place, check):
        raise StorageFailed(
            f"{lacking[0][1]} of model {manifest.model!r} was released meanwhile: make the backup again"
        )
    store.copy(manifest, place, check)


def copy_followed(
    store: CheckpointStore, manifest: Manifest, place: Place, check: Check = lambda: None
) -> list[tuple[str, str]]:
    """Copy the kept versions that the consumers in a checkpoint follow.

    Return each consumer whose version is gone, with that version in words.
    """
    kept_ids, lacking = {each.id for each in store.kept()}, list[tuple[str, str]]()
    for name, record in manifest.small.items():
        kind, _, consumer = name.partition("/")
        if kind == "consumer":
            with reading(f"record {name} of checkpoint {manifest.name}"):
                follows = follow_of_record(unpack_json(record).get("follows"))
            for each in follows.versions if follows else ():
                if each.id not in kept_ids:
                    lacking.append((consumer, each.description))
                    continue
                store.copy(store.manifest_of(each.id), place, check)
                place.put(kept_file(manifest.model, each.id), pack_kept(each))
    return lacking


def _check_url(url: str, data_dir: Path) -> None:
    if "\0" in url:
        raise InvalidInput(f"{url!r}: a URL must not contain a null character")
    if "://" in url and not url.startswith("file://"):
        return
    folder = Path(url.removeprefix("file://"))
    if not folder.is_absolute():
        raise InvalidInput(f"{url}: expected an absolute path on the service's machine, or a URL")
    if folder.resolve().is_relative_to(data_dir.resolve()):
        raise InvalidInput(f"{url} is inside the data directory {data_dir}: choose a place outside of it")
