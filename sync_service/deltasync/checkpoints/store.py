"""The checkpoints of one model: in a local place, and perhaps the same files in another one, the remote place."""

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
from typing import BinaryIO, Protocol, TypeVar

import numpy as np

from deltasync.base.errors import InvalidInput, StorageFailed
from deltasync.base.progress import Progress
from deltasync.checkpoints.chunks import Bytes, CheckpointChunk, CheckpointDamaged, LogRecord, read_chunks
from deltasync.checkpoints.manifest import (
    DATA,
    MANIFESTS,
    File,
    Manifest,
    TableEntry,
    TableKey,
    id_of,
    manifest_name,
    pack_manifest,
    unpack_manifest,
)
from deltasync.checkpoints.place import UNFINISHED, Place, PlaceFailed, Stored
from deltasync.checkpoints.writing import CheckpointWriter, LayerFiles, Subject
from deltasync.core.changes import Stamps
from deltasync.core.rows import Ids
from deltasync.core.stamped_table import StampedTable

S = TypeVar("S")
T = TypeVar("T")
_THREADS = 4


class Read(Protocol):
    """Reads a file."""

    def __call__(self, file: File, parse: Callable[[str, BinaryIO, int], T]) -> T:
        """What `parse` makes of its path, of the open file and of the size that it must have."""


def in_order(work: Callable[[S], T], items: Iterable[S]) -> Iterator[tuple[S, T]]:
    """Do some work in several threads, a few items ahead: each item and what came of it, in their order."""
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


def load_rows(manifest: Manifest, tables: Sequence[StampedTable | None], read: Read) -> None:
    """Set tables to what a checkpoint has, see `CheckpointStore.load`."""
    pairs = zip(manifest.tables, tables, strict=True)
    wanted = {entry.slot: (entry, table) for entry, table in pairs if table is not None}

    def load(path: str, opened: BinaryIO, size: int) -> None:
        for chunk in read_chunks(path, opened, size):
            if chunk.slot in wanted:
                _load_chunk(path, chunk, wanted[chunk.slot][1])

    total = sum(file.bytes for files in manifest.rounds for file in files)
    what = f"model {manifest.model!r}: loading the checkpoint of version {manifest.version}"
    progress = Progress(what, total, "bytes")
    for files in manifest.rounds:  # Files of one round have different rows: their order does not matter.
        for file, _ in in_order(partial(read, parse=load), files):
            progress.add(file.bytes)
    for (entry, table), _ in in_order(lambda each: each[1].recount(), wanted.values()):
        if (table.checksum, table.counts.newest) != (entry.checksum, entry.number):
            found = f"checksum {table.checksum:016x} and number {table.counts.newest}"
            raise CheckpointDamaged(
                f"{manifest.name}: table {entry.key.name!r} has {found} once it is loaded, "
                f"expected {entry.checksum:016x} and {entry.number}"
            )


def _load_chunk(path: str, chunk: CheckpointChunk, table: StampedTable) -> None:
    name, spec, values = table.spec.name, table.spec, chunk.values
    if values is not None:
        if values.shape[1] != spec.dim * spec.dtype.itemsize:
            raise CheckpointDamaged(f"{path} has rows of another width than table {name!r}")
        values = values.view(spec.dtype)
        wrong = np.flatnonzero(table.held_digests(values) != chunk.digests)
        if len(wrong):
            raise CheckpointDamaged(f"{path}: row {chunk.ids[wrong[0]]} of table {name!r} does not fit its digest")
    try:
        table.load(chunk.ids, chunk.stamps, chunk.digests, values)
    except InvalidInput as error:
        raise CheckpointDamaged(f"{path}: {error}") from error


logger = logging.getLogger(__name__)


# Files of the remote place that are younger may be of a checkpoint that another process is still copying.
_YOUNG_SECONDS = 3600.0


class NotCopied(StorageFailed):
    """A checkpoint is complete in the local place, but a copy of it elsewhere is not.

    Attributes:
        manifest: the checkpoint.
    """

    def __init__(self, manifest: Manifest, place: Place, reason: StorageFailed) -> None:
        text = (
            f"the checkpoint of version {manifest.version} of model {manifest.model!r} is complete in the service"
        )
        super().__init__(f"{text}, but {place.url} has no copy of it: {reason}")
        self.manifest = manifest


@dataclass(frozen=True)
class Found:
    """The checkpoints of a model.

    Attributes:
        manifests: those that can be read, newest first.
        problems: what is wrong with others, in words.
        unreachable: places, or files of them, that cannot be read now: they may have more. In words.
    """

    manifests: list[Manifest]
    problems: list[str]
    unreachable: list[str]


def models_of(place: Place) -> list[str]:
    """The models that a place has checkpoints of.

    Raises:
        PlaceFailed: it cannot be read.
    """
    models = [each.name for each in place.names("")]
    return [model for model in models if any(id_of(each.name) for each in place.names(f"{model}/{MANIFESTS}"))]


class CheckpointStore:
    """The checkpoints of one model. Every method blocks; any thread.

    Attributes:
        copied_version: version of the newest checkpoint in the remote place that this process knows of; 0 = none.
    """

    def __init__(self, model: str, local: Place, remote: Place | None = None) -> None:
        """Use a local place, which is this process's alone, and perhaps a remote one for the same files."""
        self.copied_version = 0
        self._model, self._local, self._remote = model, local, remote
        self._newest_id = ""  # Of all that this process has seen.
        # The last two manifests that this process has loaded or written: the log may begin after the older one.
        self._used = {place: deque[str]([], 2) for place in self._places}
        self._writing, self._copying = threading.Lock(), threading.Lock()

    @property
    def _places(self) -> list[Place]:
        return [self._local, self._remote] if self._remote else [self._local]

    # Reading.

    def manifests(self) -> Found:
        """The checkpoints in both places, each once."""
        both = [self._found(place) for place in self._places]
        if self._remote and both[1].manifests:
            self.copied_version = both[1].manifests[0].version
        manifests = {each.id: each for found in both for each in found.manifests}
        return Found(
            [manifests[id] for id in sorted(manifests, reverse=True)],  # noqa: A001
            [each for found in both for each in found.problems],
            [each for found in both for each in found.unreachable],
        )

    def _found(self, place: Place) -> Found:
        found = Found([], [], [])
        try:
            for each in reversed(self._stored_manifests(place)):
                try:
                    found.manifests.append(unpack_manifest(each.name, place.get(each.name)))
                except PlaceFailed as error:
                    found.unreachable.append(str(error))
                except StorageFailed as error:
                    found.problems.append(f"{place.url}: {error}")
        except PlaceFailed as error:
            found.unreachable.append(str(error))
        return found

    def _stored_manifests(self, place: Place) -> list[Stored]:
        """Oldest first."""
        listed = place.names(f"{self._model}/{MANIFESTS}")
        found = [each for each in listed if each.name == manifest_name(self._model, id_of(each.name))]
        self._newest_id = max([self._newest_id, *(id_of(each.name) for each in found)])
        return found

    def load(self, manifest: Manifest, tables: Sequence[StampedTable | None]) -> None:
        """Set tables, which have never changed, to what a checkpoint has. Files that the local place lacks, or has
        damaged, are fetched from the remote one.

        Args:
            manifest: the checkpoint.
            tables: in the order of `manifest.tables`; None = the table is not needed. They may have more rows.

        Raises:
            CheckpointDamaged: a file is missing or damaged, which the message names, or the tables are not as they
                were. The tables have some of the rows then.
            PlaceFailed: a file cannot be read now. The tables have some of the rows then.
            StorageFailed: it is of a later version of deltasync.
        """
        with self._using(manifest):
            if self._remote:
                lacking = set(manifest.files) - self._whole(self._local)
                for _ in in_order(partial(self._read, parse=_checked), lacking):  # Several at a time.
                    pass
            load_rows(manifest, tables, self._read)
        for place in self._places:
            self._note_use(place, manifest)

    def _note_use(self, place: Place, manifest: Manifest) -> None:
        if manifest.name in self._used[place]:
            self._used[place].remove(manifest.name)
        self._used[place].append(manifest.name)

    def rows_of(
        self, manifest: Manifest, owner: str | None = None
    ) -> Iterator[tuple[TableEntry, Ids, Stamps, Bytes | None]]:
        """The rows of a checkpoint, of all tables or of one owner's: table, ids, stamps, and values ([n, bytes of
        a row]; None if the rows are deleted). A row may come several times: the last time counts.

        Raises:
            StorageFailed: a file is missing or damaged, or cannot be read now.
        """
        entries = {entry.slot: entry for entry in manifest.tables if owner in (None, entry.key.owner)}
        for chunk in self._chunks(manifest, [file for files in manifest.rounds for file in files]):
            if entry := entries.get(chunk.slot):
                yield entry, chunk.ids, chunk.stamps, chunk.values

    def dirty(self, manifest: Manifest) -> dict[TableKey, tuple[Ids, Stamps]]:
        """The dirty rows ([n], ascending) of views' tables, and the versions since which they are dirty [n].

        Raises:
            CheckpointDamaged: a file is missing or damaged.
            PlaceFailed: a file cannot be read now.
        """
        keys = {entry.slot: entry.key for entry in manifest.tables}
        found = dict[TableKey, list[CheckpointChunk]]()
        for chunk in self._chunks(manifest, manifest.dirty):
            found.setdefault(keys[chunk.slot], []).append(chunk)
        return {
            key: (np.concatenate([each.ids for each in some]), np.concatenate([each.stamps for each in some]))
            for key, some in found.items()
        }

    def records(self, manifest: Manifest) -> Iterator[LogRecord]:
        """The log's records that a checkpoint has, oldest layer first; some may be newer than its version.

        Raises:
            StorageFailed: a file is missing or damaged, or cannot be read now.
        """
        for chunk in self._chunks(manifest, [file for layer in manifest.layers for file in layer.records]):
            yield from chunk.records()

    def _chunks(self, manifest: Manifest, files: Sequence[File]) -> Iterator[CheckpointChunk]:
        with self._using(manifest):
            for _, chunks in in_order(
                partial(self._read, parse=lambda *opened: list(read_chunks(*opened))), files
            ):
                yield from chunks

    def _read(self, file: File, parse: Callable[[str, BinaryIO, int], T]) -> T:
        """What `parse` makes of a file, from its path, the open file and the size that it must have."""
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
            # Lost only if it is in neither: what cannot be read now may be whole.
            kind = PlaceFailed if PlaceFailed in (type(here), type(error)) else CheckpointDamaged
            raise kind(f"{here}; {error}") from error
        try:
            self._local.put(file.name, content)
            logger.info("fetched from %s: %s", self._remote.url, here)
        except PlaceFailed as error:  # The next checkpoint is a base, which needs none of it.
            logger.warning("%s", error)
        return parsed

    def is_sound(self, manifest: Manifest) -> bool:
        """Whether all files of a checkpoint are in one place or the other, and not known to be damaged there."""
        whole = [self._whole(place) for place in self._places]
        return all(any(file in files for files in whole) for file in manifest.files)

    def _whole(self, place: Place) -> set[File]:
        return _whole_of(place, place.names(f"{self._model}/{DATA}"))

    def verify(self) -> list[str]:
        """Read every file of every checkpoint in both places: what is wrong, in words that name the files.

        After that, no checkpoint is built upon a file that was found damaged.
        """
        problems = list[str]()
        for place in self._places:
            found = self._found(place)
            problems += found.problems + found.unreachable
            files = list({file.name: file for each in found.manifests for file in each.files}.values())
            what = f"model {self._model!r}: reading the checkpoints in {place.url}"
            progress = Progress(what, sum(file.bytes for file in files), "bytes")
            with self._using(*found.manifests):
                for file, problem in in_order(partial(_problem_of, place), files):
                    problems += [problem] if problem else []
                    progress.add(file.bytes)
        return problems

    # Writing.

    def write(
        self,
        subject: Subject,
        previous: Manifest | None,
        limit: int,
    ) -> Manifest:
        """Write a checkpoint to the local place while cuts go on: what has changed since the previous one, or a
        new base.

        Args:
            subject: the model and its views.
            previous: the checkpoint that the tables were loaded from or that was written last; None = a new base.
            limit: bytes that are copied in one turn at the end.

        Raises:
            DamagedRows: rows do not fit their digests.
            StorageFailed: it could not be written.
        """
        with self._writing:
            new = self._next_id()
            with self._local.using([new]), self._using(*([previous] if previous else [])):
                base = previous if previous and self._whole(self._local).issuperset(previous.files) else None
                files = LayerFiles(self._local, f"{self._model}/{DATA}/{new}-")
                writer = CheckpointWriter(files, subject, base, limit)
                try:
                    manifest = writer.write(self._model, new)
                    self._local.put(manifest.name, pack_manifest(manifest))
                except BaseException:
                    # The manifest first: the files that it names must not be missing.
                    with contextlib.suppress(StorageFailed):
                        for name in (manifest_name(self._model, new), *files.names):
                            self._local.remove(name)
                    raise
        self._note_use(self._local, manifest)
        return manifest

    def _next_id(self) -> str:
        """An id after all that are known, whatever the clock says."""
        self._stored_manifests(self._local)
        number = max(time.time_ns(), int(self._newest_id.partition("-")[0] or 0) + 1)
        self._newest_id = f"{number:020d}-{os.urandom(4).hex()}"
        return self._newest_id

    def copy_to_remote(self, manifest: Manifest, check: Callable[[], None] = lambda: None) -> None:
        """Copy a checkpoint to the remote place, if there is one; see `copy`."""
        if self._remote:
            self.copy(manifest, self._remote, check)
            self._note_use(self._remote, manifest)
            self.copied_version = manifest.version

    def copy(self, manifest: Manifest, place: Place, check: Callable[[], None] = lambda: None) -> None:
        """Copy a checkpoint to another place: the files that it lacks, then the manifest.

        Raises:
            NotCopied: that failed; the next copy needs only what is missing.
        """
        what = f"model {self._model!r}: copying a checkpoint to {place.url}"
        # `remove_all` must not be overtaken by what is copied to a place that it removes from.
        turn = self._copying if place is self._remote else contextlib.nullcontext()
        try:
            with turn, self._using(manifest):
                there = self._whole(place).intersection(manifest.files)
                lacking = [file for file in manifest.files if file not in there]
                progress = Progress(what, sum(file.bytes for file in lacking), "bytes")
                for file, _ in in_order(partial(self._copy_file, place), lacking):
                    check()
                    progress.add(file.bytes)
                # For another process, files may be old that no checkpoint had named so far.
                for file in there - self._whole(place):
                    raise PlaceFailed(f"checkpoints: {place.url}/{file.name} was removed while others were copied")
                place.put(manifest.name, pack_manifest(manifest))
        except StorageFailed as error:
            raise NotCopied(manifest, place, error) from error

    def _copy_file(self, place: Place, file: File) -> None:
        place.put(file.name, self._read(file, _checked))

    # Removing.

    def remove_old(self, keep: int, keep_seconds: float = 0.0, *, remote: bool = False) -> None:
        """Remove all checkpoints of the local or the remote place but the newest `keep` that have all their files
        there, and those written at most `keep_seconds` before the newest; then the files that none of them names.
        Files in use stay, and the last two checkpoints that this process has loaded or written: the log may begin
        after the older one.

        Only the clock that has dated files says how old they are: that of their place.

        Raises:
            StorageFailed: the place could not be read or written; the rest is removed next time.
        """
        place = self._remote if remote else self._local
        if place is None:
            return
        # Both before the manifests are listed: of a checkpoint that is being written, either its manifest is among
        # them, or its files are not in these lists.
        listed = place.names(f"{self._model}/{DATA}")
        data = [each for each in listed if not self._in_use(each)]
        unfinished = [each for each in place.names(f"{self._model}/{MANIFESTS}") if UNFINISHED in each.name]
        manifests = self._stored_manifests(place)
        newest = max((each.modified for each in manifests if each.modified is not None), default=0.0)
        whole, sound = _whole_of(place, listed), 0
        kept, old, unreadable = list[Manifest](), list[Stored](), False
        for each in reversed(manifests):
            age = newest - (newest if each.modified is None else each.modified)
            enough = sound >= max(1, keep) and (not keep_seconds or age > keep_seconds)
            if enough and each.name not in self._used[place]:
                old.append(each)
                continue
            try:
                kept.append(unpack_manifest(each.name, place.get(each.name)))
            except CheckpointDamaged:
                unreadable = True  # Nobody knows what it names; it goes once enough others are newer.
                continue
            sound += whole.issuperset(kept[-1].files)
        named = {file.name for each in kept for file in each.files}
        unnamed = [each for each in (*data, *unfinished) if each.name not in named and id_of(each.name)]
        if remote:
            unnamed = [each for each in unnamed if each.modified and newest - each.modified > _YOUNG_SECONDS]
        for each in (*old, *(() if unreadable else unnamed)):
            if not self._in_use(each):
                place.remove(each.name)

    def _in_use(self, file: Stored) -> bool:
        name = file.name.removesuffix(UNFINISHED)
        return self._local.uses(name) or self._local.uses(id_of(name))

    def remove_all(self) -> None:
        """Remove all checkpoints from both places, without a trace.

        Raises:
            StorageFailed: a place could not be read or written; the rest is removed next time.
        """
        with self._writing, self._copying:
            for place in self._places:
                for folder in (MANIFESTS, DATA):  # In this order: a checkpoint is there whole, or not at all.
                    for each in place.names(f"{self._model}/{folder}"):
                        if id_of(each.name):
                            place.remove(each.name)
                    place.remove_folder(f"{self._model}/{folder}")
                place.remove_folder(self._model)
            self.copied_version = 0

    def _using(self, *manifests: Manifest) -> contextlib.AbstractContextManager[None]:
        """Keep the files of checkpoints from being removed as old by this process meanwhile."""
        names = (name for each in manifests for name in (each.name, *(file.name for file in each.files)))
        return self._local.using(names)


def _whole_of(place: Place, listed: Sequence[Stored]) -> set[File]:
    """The files that are not known to be damaged."""
    return {File(each.name, each.bytes) for each in listed if each.name not in place.damaged}


def _note_damage(place: Place, file: File, error: StorageFailed) -> None:
    if isinstance(error, CheckpointDamaged):
        place.damaged.add(file.name)


def _checked(path: str, opened: BinaryIO, size: int) -> bytes:
    """The content of a file, which is what was written."""
    content = opened.read()
    for _ in read_chunks(path, io.BytesIO(content), size):
        pass
    return content


def _problem_of(place: Place, file: File) -> str:
    """What is wrong with a file; empty if nothing is."""
    try:
        with place.open(file.name) as opened:
            for _ in read_chunks(f"{place.url}/{file.name}", opened, file.bytes):
                pass
    except StorageFailed as error:
        _note_damage(place, file, error)
        return f"cannot be read now: {error}" if isinstance(error, PlaceFailed) else str(error)
    return ""
