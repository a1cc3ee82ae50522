"""The checkpoints of one model: in a local place, and copies in a remote place if there is one."""

import contextlib
import io
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, TypeVar

import numpy as np

from deltasync.base.errors import InvalidInput, StorageFailed
from deltasync.base.logs import Progress
from deltasync.checkpoints.chunks import (
    CheckpointChunk,
    CheckpointDamaged,
    DamagedPart,
    LogRecord,
    check_first_chunk,
    read_chunks,
)
from deltasync.checkpoints.file_storage import UNFINISHED, Place, PlaceFailed, StoredFile
from deltasync.checkpoints.kept_version import KEPT, KeptVersion, SharedFiles, kept_file, pack_kept, unpack_kept
from deltasync.checkpoints.manifest import (
    DATA,
    MANIFESTS,
    File,
    Manifest,
    TableEntry,
    TableKey,
    check_first_line,
    id_of,
    manifest_name,
    pack_manifest,
    unpack_manifest,
)
from deltasync.checkpoints.writing import CheckpointWriter, LayerFiles, Subject, WriteOptions
from deltasync.core.changes import Stamps
from deltasync.core.rows import Ids
from deltasync.core.stamped_table import StampedTable
from deltasync.wire.row_messages import NotAsWritten

S = TypeVar("S")
T = TypeVar("T")
_THREADS = 4


def in_order(work: Callable[[S], T], items: Iterable[S]) -> Iterator[tuple[S, T]]:
    """Process items in several threads, a few ahead. Yield each item with its result, in order."""
    threads = max(2, min(_THREADS, len(os.sched_getaffinity(0))))
    ahead = deque[tuple[S, Future[T]]]()
    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoints") as pool:
        try:
            for each in items:
                ahead.append((each, pool.submit(work, each)))
                if len(ahead) > threads:
                    item, done = ahead.popleft()
                    yield item, done.result()
            for item, done in ahead:
                yield item, done.result()
        finally:
            for _, left in ahead:
                left.cancel()


def load_chunk(path: str, chunk: CheckpointChunk, table: StampedTable) -> None:
    """Load the rows of a chunk."""
    try:
        rows = chunk.rows(table.spec)
        digests = np.zeros(len(rows), np.uint64) if rows.digests is None else rows.digests
        if not rows.deleted and len(wrong := np.flatnonzero(table.held_digests(rows.values) != digests)):
            row = f"row {rows.ids[wrong[0]]} of table {table.spec.name!r}"
            raise CheckpointDamaged(f"{path}: {row} does not match its digest")
        table.load(rows.ids, chunk.stamps, digests, None if rows.deleted else rows.values)
    except (InvalidInput, NotAsWritten) as error:
        raise CheckpointDamaged(f"{path}: {error}") from error


logger = logging.getLogger(__name__)


_WRITE_OPTIONS = WriteOptions()
# The newest checkpoint among the users of files.
_NEWEST = ""
# Younger files in the remote place may belong to a checkpoint that another process is still copying.
_YOUNG_SECONDS = 3600.0


class NotCopied(StorageFailed):
    """A checkpoint is complete in the local place, but could not be copied to another one."""


@dataclass(frozen=True)
class CheckpointListing:
    """The checkpoints of a model.

    Attributes:
        manifests: readable checkpoints, newest first.
        problems: problems with others, in words.
        unreachable: places or files that cannot be read at present and may have more checkpoints, in words.
    """

    manifests: list[Manifest]
    problems: list[str]
    unreachable: list[str]


def models_of(place: Place) -> list[str]:
    """The models with checkpoints in a place."""
    models = [each.name for each in place.names("")]
    return [model for model in models if any(id_of(each.name) for each in place.names(f"{model}/{MANIFESTS}"))]


_FORMATS = (MANIFESTS, check_first_line), (KEPT, check_first_line), (DATA, check_first_chunk)


def check_formats(place: Place) -> None:
    """Check that this version can read the checkpoints and kept versions in a place, whatever their model.

    Recovery reports files that are damaged or cannot be read.
    """
    with contextlib.suppress(PlaceFailed):
        for model in place.names(""):
            for folder, check in _FORMATS:
                for each in place.names(f"{model.name}/{folder}"):
                    if id_of(each.name):
                        with contextlib.suppress(CheckpointDamaged, PlaceFailed), place.open(each.name) as file:
                            check(each.name, file, each.bytes)


class CheckpointStore:
    """The checkpoints of one model. Any thread may use it; every method blocks.

    Methods raise `CheckpointDamaged` for a file that is missing or damaged, `PlaceFailed` for a place that cannot
    be read or written now, and `LaterFormat` for a file of a later version of deltasync.

    Attributes:
        copied_version: newest version that was seen whole in the remote place; 0 = none.
    """

    def __init__(
        self, model: str, local: Place, remote: Place | None = None, *, clock: Callable[[], int] = time.time_ns
    ) -> None:
        """Use a local place, which belongs to this process alone, and optionally a remote one."""
        self.copied_version, self._clock = 0, clock
        self._model, self._local, self._remote = model, local, remote
        self._newest_id = ""  # The largest id that this process has seen.
        # The last two manifests that this process loaded or wrote; the log may begin after the older one.
        self._used = {place: deque[str]([], 2) for place in self._places}
        self._writing, self._copying, self._keeping = threading.Lock(), threading.Lock(), threading.RLock()
        # By the ids of their checkpoints; None until they were read. And ids that are being released.
        self._kept: dict[str, KeptVersion] | None = None
        self._leaving = set[str]()
        # The files of the newest checkpoint and of kept versions, which `_sharing` guards.
        self._shared, self._sharing = SharedFiles(), threading.Lock()

    @property
    def _places(self) -> list[Place]:
        return [self._local, self._remote] if self._remote else [self._local]

    @property
    def newest_id(self) -> str:
        """The id of the newest checkpoint that this process has seen or begun; empty if there is none."""
        return self._newest_id

    # Reading.

    def manifests(self) -> CheckpointListing:
        """The checkpoints in both places, each once."""
        both = [self._found(place) for place in self._places]
        if self._remote and both[1].manifests:
            with contextlib.suppress(PlaceFailed):
                whole = self._whole(self._remote)
                copied = (each.version for each in both[1].manifests if whole.issuperset(each.files))
                self.copied_version = next(copied, 0)
        manifests = {each.id: each for found in both for each in found.manifests}
        return CheckpointListing(
            [manifests[id] for id in sorted(manifests, reverse=True)],  # noqa: A001
            [each for found in both for each in found.problems],
            [each for found in both for each in found.unreachable],
        )

    def _found(self, place: Place) -> CheckpointListing:
        result = CheckpointListing([], [], [])
        try:
            for each in reversed(self._stored_manifests(place)):
                try:
                    result.manifests.append(unpack_manifest(each.name, place.get(each.name)))
                except PlaceFailed as error:
                    result.unreachable.append(str(error))
                except CheckpointDamaged as error:
                    result.problems.append(f"{place.url}: {error}")
        except PlaceFailed as error:
            result.unreachable.append(str(error))
        return result

    def _stored_manifests(self, place: Place) -> list[StoredFile]:
        """The manifest files, oldest first."""
        listed = place.names(f"{self._model}/{MANIFESTS}")
        manifests = [each for each in listed if each.name == manifest_name(self._model, id_of(each.name))]
        self._newest_id = max([self._newest_id, *(id_of(each.name) for each in manifests)])
        return manifests

    def load(self, manifest: Manifest, tables: Sequence[StampedTable | None], *, note_use: bool = True) -> None:
        """Set new tables, in the order of `manifest.tables`, to the content of a checkpoint; None skips one.

        Files that are missing or damaged in the local place are fetched from the remote one. After an error, some
        rows are loaded. With `note_use` the checkpoint stays, because the log may begin after it.
        """
        with self.using(manifest):
            if self._remote:
                lacking = set(manifest.files) - self._whole(self._local)
                for _ in in_order(partial(self._read, parse=_checked), lacking):  # Fetches several at a time.
                    pass
            self._load_rows(manifest, tables)
        if note_use:
            self._note_use(manifest, *self._places)
            self._note_newest(manifest)

    def _load_rows(self, manifest: Manifest, tables: Sequence[StampedTable | None]) -> None:
        pairs = zip(manifest.tables, tables, strict=True)
        selection = {entry.slot: (entry, table) for entry, table in pairs if table is not None}

        def load(path: str, opened: BinaryIO, size: int) -> None:
            for chunk in read_chunks(path, opened, size):
                if chunk.slot in selection:
                    load_chunk(path, chunk, selection[chunk.slot][1])

        total = sum(file.bytes for files in manifest.rounds for file in files)
        what = f"model {manifest.model!r}: loading the checkpoint of version {manifest.version}"
        progress = Progress(what, total, "bytes")
        for files in manifest.rounds:  # Files of one round have different rows, so their order does not matter.
            for file, _ in in_order(partial(self._read, parse=load), files):
                progress.add(file.bytes)
        for (entry, table), _ in in_order(lambda each: each[1].recount(), selection.values()):
            if (table.checksum, table.counts.newest) != (entry.checksum, entry.number):
                state = f"checksum {table.checksum:016x} and number {table.counts.newest}"
                raise CheckpointDamaged(
                    f"{manifest.name}: table {entry.key.name!r} has {state} once it is loaded, "
                    f"expected {entry.checksum:016x} and {entry.number}"
                )

    def _note_use(self, manifest: Manifest, *places: Place) -> None:
        """Note that the log may begin after a checkpoint."""
        for place in places:
            if manifest.name in self._used[place]:
                self._used[place].remove(manifest.name)
            self._used[place].append(manifest.name)

    def _note_newest(self, manifest: Manifest) -> None:
        with self._sharing:
            self._shared.set(_NEWEST, manifest.files)

    def rows_of(
        self, manifest: Manifest, owner: str | None = None
    ) -> Iterator[tuple[TableEntry, CheckpointChunk]]:
        """Read the rows of a checkpoint with their tables, of all owners or one. If a row occurs several times,
        the last one counts.
        """
        entries = {entry.slot: entry for entry in manifest.tables if owner in (None, entry.key.owner)}
        for chunk in self._chunks(manifest, [file for files in manifest.rounds for file in files]):
            if entry := entries.get(chunk.slot):
                yield entry, chunk

    def dirty(self, manifest: Manifest) -> dict[TableKey, tuple[Ids, Stamps]]:
        """The dirty rows of views' tables ([n], ascending), and the versions since which they are dirty ([n])."""
        keys = {entry.slot: entry.key for entry in manifest.tables}
        chunks = dict[TableKey, list[CheckpointChunk]]()
        for chunk in self._chunks(manifest, manifest.dirty):
            chunks.setdefault(keys[chunk.slot], []).append(chunk)
        return {
            key: (np.concatenate([each.ids for each in some]), np.concatenate([each.stamps for each in some]))
            for key, some in chunks.items()
        }

    def records(self, manifest: Manifest) -> Iterator[LogRecord]:
        """Read the log records of a checkpoint, oldest layer first; some may be newer than its version."""
        for chunk in self._chunks(manifest, [file for layer in manifest.layers for file in layer.records]):
            yield from chunk.records()

    def _chunks(self, manifest: Manifest, files: Sequence[File]) -> Iterator[CheckpointChunk]:
        with self.using(manifest):
            read = partial(self._read, parse=lambda *opened: list(read_chunks(*opened)))
            for _, chunks in in_order(read, files):
                yield from chunks

    def chunks_and_damage(self, file: File, problems: list[str]) -> list[CheckpointChunk | DamagedPart]:
        """The chunks of a file in order, with its damaged parts in their places. Damage is added to `problems`."""
        try:
            return self._read(file, lambda *opened: list[CheckpointChunk | DamagedPart](read_chunks(*opened)))
        except CheckpointDamaged as error:
            problems.append(str(error))
        for place in self._places:
            with contextlib.suppress(CheckpointDamaged), place.open(file.name) as opened:
                every = list[CheckpointChunk | DamagedPart]()
                for chunk in read_chunks(f"{place.url}/{file.name}", opened, file.bytes, every.append):
                    every.append(chunk)
                return every
        return [DamagedPart(memoryview(b""))]

    def _read(self, file: File, parse: Callable[[str, BinaryIO, int], T]) -> T:
        """The result of `parse` for a file's path, the open file and its expected size."""
        try:
            with self._local.open(file.name) as opened:
                return parse(f"{self._local.url}/{file.name}", opened, file.bytes)
        except (CheckpointDamaged, PlaceFailed) as error:
            _note_damage(self._local, file, error)
            if self._remote is None:
                raise
            here = error
        try:
            content = self._remote.get(file.name)
            parsed = parse(f"{self._remote.url}/{file.name}", io.BytesIO(content), file.bytes)
        except (CheckpointDamaged, PlaceFailed) as error:
            _note_damage(self._remote, file, error)
            # The file is lost only if neither place has it; an unreachable one may.
            kind = PlaceFailed if PlaceFailed in (type(here), type(error)) else CheckpointDamaged
            raise kind(f"{here}; {error}") from error
        try:
            self._local.put(file.name, content)
            logger.info("a file was fetched from %s: %s", self._remote.url, here)
        except PlaceFailed as error:  # The next checkpoint then is a base, which does not need the file.
            logger.warning("%s", error)
        return parsed

    def _whole(self, place: Place) -> set[File]:
        return _whole_of(place, place.names(f"{self._model}/{DATA}"))

    def verify(self) -> list[str]:
        """Read all files of checkpoints and kept versions in both places. Return the problems, with the files.

        Later checkpoints do not build on files that turn out to be damaged.
        """
        problems = list[str]()
        for place in self._places:
            listing = self._found(place)
            problems += listing.problems + listing.unreachable
            files = list({file.name: file for each in listing.manifests for file in each.files}.values())
            what = f"model {self._model!r}: reading the checkpoints in {place.url}"
            progress = Progress(what, sum(file.bytes for file in files), "bytes")
            with self.using(*listing.manifests):
                for file, problem in in_order(partial(_problem_of, place), files):
                    problems += [problem] if problem else []
                    progress.add(file.bytes)
            problems += self._problems_of_kept(place)
        return problems

    def _problems_of_kept(self, place: Place) -> list[str]:
        problems = list[str]()
        try:
            for each in self._kept_files(place):
                try:
                    unpack_kept(each.name, place.get(each.name))
                except CheckpointDamaged as error:
                    if each in self._kept_files(place):  # Else it was released meanwhile.
                        text = "until you remove it, its checkpoint stays, and nobody can follow it"
                        problems.append(f"{error}; {text}")
        except PlaceFailed as error:
            problems.append(str(error))
        return problems

    # Writing.

    def write(
        self, subject: Subject, previous: Manifest | None, options: WriteOptions = _WRITE_OPTIONS
    ) -> Manifest:
        """Write a checkpoint to the local place while cuts go on: the changes after `previous`, or a new base."""
        with self._writing:
            new = self._next_id()
            with self._local.using([new]), self.using(*([previous] if previous else [])):
                base = previous if previous and self._whole(self._local).issuperset(previous.files) else None
                files = LayerFiles(self._local, f"{self._model}/{DATA}/{new}-", options.file_bytes)
                writer = CheckpointWriter(files, subject, base, options)
                try:
                    manifest = writer.write(self._model, new)
                    self._local.put(manifest.name, pack_manifest(manifest))
                except BaseException:
                    # Remove the manifest first, so that it never names missing files.
                    with contextlib.suppress(StorageFailed):
                        for name in (manifest_name(self._model, new), *files.names):
                            self._local.remove(name)
                    raise
        self._note_use(manifest, self._local)
        self._note_newest(manifest)
        return manifest

    def _next_id(self) -> str:
        """An id larger than all known ones, whatever the clock shows."""
        self._stored_manifests(self._local)
        number = max(self._clock(), int(self._newest_id.partition("-")[0] or 0) + 1)
        self._newest_id = f"{number:020d}-{os.urandom(4).hex()}"
        return self._newest_id

    def copy_to_remote(self, manifest: Manifest, check: Callable[[], None] = lambda: None) -> None:
        """Copy a checkpoint to the remote place, if there is one; see `copy`."""
        if self._remote:
            self.copy(manifest, self._remote, check)
            self._note_use(manifest, self._remote)
            self.copied_version = manifest.version

    def copy(self, manifest: Manifest, place: Place, check: Callable[[], None] = lambda: None) -> None:
        """Copy a checkpoint to another place: the files that it lacks, then the manifest."""
        what = f"model {self._model!r}: copying a checkpoint to {place.url}"
        # A copy to the remote place must not overlap with `remove_all`.
        turn = self._copying if place is self._remote else contextlib.nullcontext()
        try:
            with turn, self.using(manifest):
                there = self._whole(place).intersection(manifest.files)
                lacking = [file for file in manifest.files if file not in there]
                progress = Progress(what, sum(file.bytes for file in lacking), "bytes")
                for file, _ in in_order(lambda file: place.put(file.name, self._read(file, _checked)), lacking):
                    check()
                    progress.add(file.bytes)
                # Another process may have removed old files that no manifest named yet.
                for file in there - self._whole(place):
                    raise PlaceFailed(f"checkpoints: {place.url}/{file.name} was removed while others were copied")
                place.put(manifest.name, pack_manifest(manifest))
        except StorageFailed as error:
            raise NotCopied(
                f"the checkpoint of version {manifest.version} of model {manifest.model!r} is complete in the "
                f"service, but {place.url} has no copy of it: {error}"
            ) from error

    # Kept versions. Where there is a remote place, only that one counts: another process may own the model next.
    # They are in memory once they have been read. `remove_old` looks for changes by others.

    def keep(self, kept: KeptVersion, manifest: Manifest) -> None:
        """Keep a checkpoint, which is complete in the place that counts. This is durable once it returns."""
        name, place = kept_file(self._model, kept.id), self._places[-1]
        with self._keeping, self._local.using([kept.id]):
            place.put(name, pack_kept(kept))
            manifests = {each.name for each in self._stored_manifests(place)}
            if manifest.name not in manifests or not self._whole(place).issuperset(manifest.files):
                self.release(kept)
                raise StorageFailed(
                    f"{kept.description} of model {self._model!r} is too old to keep: its files were removed"
                )
            with self._sharing:
                self._shared.set(kept.id, manifest.files)
            if self._kept is not None:
                self._kept = self._kept | {kept.id: kept}
            # After the remote one, so that no crash leaves a local file that nobody releases.
            if place is not self._local:
                try:
                    self._local.put(name, pack_kept(kept))
                except PlaceFailed as error:  # Following the version then fetches its files.
                    logger.warning("%s", error)

    def release(self, kept: KeptVersion) -> None:
        """Stop keeping a checkpoint. `remove_old` removes its files."""
        self.hide(kept)
        try:
            with self._keeping:
                for place in self._places:  # The one that counts last; see `keep`.
                    place.remove(kept_file(self._model, kept.id))
                self._forget(kept.id)
        finally:
            self._leaving.discard(kept.id)

    def hide(self, kept: KeptVersion) -> None:
        """Leave a version out of the list before `release`, without waiting. It comes back if that fails."""
        self._leaving.add(kept.id)

    @property
    def known_kept(self) -> list[KeptVersion] | None:
        """The kept versions, oldest checkpoint first, without waiting; None until `kept` has read them."""
        if (kept := self._kept) is None:
            return None
        return [each for id, each in sorted(kept.items()) if id not in self._leaving]  # noqa: A001

    def kept(self) -> list[KeptVersion]:
        """The kept versions, oldest checkpoint first, without those whose record is damaged. See `verify`."""
        with self._keeping:
            if self._kept is None:
                self._look_for_kept(self._kept_files(self._places[-1]))
            return self.known_kept or []

    def own_bytes(self, kept: KeptVersion) -> int | None:
        """Bytes of the files that only this kept version uses; None if its checkpoint could not be read."""
        with self._sharing:
            return self._shared.own_bytes(kept.id)

    def _look_for_kept(self, files: Sequence[StoredFile]) -> None:
        """Read what is new among the files of kept versions, and forget what is gone. Holding `_keeping`."""
        place, known = self._places[-1], dict(self._kept or {})
        names = {id_of(each.name): each.name for each in files}
        for id, name in names.items():  # noqa: A001
            try:
                if id not in known:
                    known[id] = unpack_kept(name, place.get(name))
            except CheckpointDamaged as error:
                if name in {file.name for file in self._kept_files(place)}:  # Else it was released meanwhile.
                    logger.warning("skipped a kept version: %s", error)
            if id not in self._shared:
                try:
                    manifest = self.manifest_of(id)
                except PlaceFailed:
                    raise
                except StorageFailed:
                    continue
                with self._sharing:
                    self._shared.set(id, manifest.files)
        self._kept = known
        for id in known.keys() - names.keys():  # noqa: A001
            self._forget(id)

    def _forget(self, id: str) -> None:  # noqa: A002
        with self._sharing:
            self._shared.remove(id)
        if self._kept is not None:
            self._kept = {each: kept for each, kept in self._kept.items() if each != id}

    def manifest_of(self, id: str) -> Manifest:  # noqa: A002
        """The manifest of the checkpoint with an id."""
        name, error = manifest_name(self._model, id), StorageFailed("")
        for place in self._places:
            try:
                return unpack_manifest(name, place.get(name))
            except StorageFailed as failure:
                error = failure
        raise error

    def _kept_files(self, place: Place) -> list[StoredFile]:
        listed = place.names(f"{self._model}/{KEPT}")
        return [each for each in listed if each.name == kept_file(self._model, id_of(each.name))]

    # Removing.

    def remove_old(self, keep: int, *, remote: bool = False) -> None:
        """Remove old checkpoints, and then files that no remaining one names, in the local or the remote place.

        It keeps the newest `keep` checkpoints that are complete there, those of kept versions, and the last two
        that this process loaded or wrote, since the log may begin after the older one. Files in use stay.
        """
        place = self._remote if remote else self._local
        if place is None:
            return
        # List these before the manifests. A checkpoint that is written meanwhile then has its manifest among the
        # manifests, or none of its files in these lists.
        listed = place.names(f"{self._model}/{DATA}")
        data = [each for each in listed if not self._in_use(each)]
        small = [each for folder in (MANIFESTS, KEPT) for each in place.names(f"{self._model}/{folder}")]
        unfinished = [each for each in small if UNFINISHED in each.name]
        manifests = self._stored_manifests(place)
        with self._keeping:
            files_of_kept = self._kept_files(place)
            if place is self._places[-1]:
                self._look_for_kept(files_of_kept)
        ids_of_kept = {id_of(each.name) for each in files_of_kept}
        whole, sound = _whole_of(place, listed), 0
        kept, old, unreadable = list[Manifest](), list[StoredFile](), False
        for each in reversed(manifests):
            enough = sound >= max(1, keep)
            if enough and each.name not in self._used[place] and id_of(each.name) not in ids_of_kept:
                old.append(each)
                continue
            if enough and id_of(each.name) in self._shared:  # Reading each would cost more with each kept version.
                continue
            try:
                kept.append(unpack_manifest(each.name, place.get(each.name)))
            except CheckpointDamaged:
                unreadable = True  # Its file names are unknown. It is removed once enough newer ones exist.
                continue
            sound += whole.issuperset(kept[-1].files)
        named = {file.name for each in kept for file in each.files}
        unnamed = [each for each in (*data, *unfinished) if each.name not in named and id_of(each.name)]
        with self._sharing:
            unnamed = [each for each in unnamed if not self._shared.uses(each.name)]
        if remote:  # Ages come from the clock of the place.
            newest = max((each.modified for each in manifests if each.modified is not None), default=0.0)
            unnamed = [each for each in unnamed if each.modified and newest - each.modified > _YOUNG_SECONDS]
        for each in (*old, *(() if unreadable else unnamed)):
            if not self._in_use(each):
                place.remove(each.name)

    def _in_use(self, file: StoredFile) -> bool:
        name = file.name.removesuffix(UNFINISHED)
        return self._local.uses(name) or self._local.uses(id_of(name))

    def remove_all(self) -> None:
        """Remove all checkpoints and folders from both places."""
        with self._writing, self._copying:
            for place in self._places:
                for folder in (KEPT, MANIFESTS, DATA):  # In this order, so that nothing names missing files.
                    for each in place.names(f"{self._model}/{folder}"):
                        if id_of(each.name):
                            place.remove(each.name)
                    place.remove_folder(f"{self._model}/{folder}")
                place.remove_folder(self._model)
            self.copied_version, self._kept = 0, None

    def using(self, *manifests: Manifest) -> contextlib.AbstractContextManager[None]:
        """Prevent this process from removing the files of checkpoints inside the block."""
        names = (name for each in manifests for name in (each.name, *(file.name for file in each.files)))
        return self._local.using(names)


def _whole_of(place: Place, listed: Sequence[StoredFile]) -> set[File]:
    """The files that are not known to be damaged."""
    return {File(each.name, each.bytes) for each in listed if each.name not in place.damaged}


def _note_damage(place: Place, file: File, error: StorageFailed) -> None:
    if isinstance(error, CheckpointDamaged):
        place.damaged.add(file.name)


def _checked(path: str, opened: BinaryIO, size: int) -> bytes:
    """Read a file and check it against its checksums."""
    content = opened.read()
    for _ in read_chunks(path, io.BytesIO(content), size):
        pass
    return content


def _problem_of(place: Place, file: File) -> str:
    """The problem with a file; empty if there is none."""
    try:
        with place.open(file.name) as opened:
            for _ in read_chunks(f"{place.url}/{file.name}", opened, file.bytes):
                pass
    except StorageFailed as error:
        _note_damage(place, file, error)
        return f"cannot be read now: {error}" if isinstance(error, PlaceFailed) else str(error)
    return ""
