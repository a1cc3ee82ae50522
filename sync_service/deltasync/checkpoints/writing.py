"""Writing a checkpoint while cuts continue: rows in blocks, then a small rest at one version.

Blocks are copied on the model's thread and stored on the writing thread, in turns: a cut waits for one block.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from deltasync.base.logs import Progress
from deltasync.checkpoints.chunks import CHUNK_BYTES, ChunkFile, LogRecord, packed_records
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.manifest import File, Layer, Manifest, TableEntry, TableKey
from deltasync.core.changes import Stamps
from deltasync.core.position import Position
from deltasync.core.precopy import PreCopy
from deltasync.core.rows import Ids
from deltasync.core.stamped_table import StampedTable

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Which: TypeAlias = tuple[str, TableKey]  # With the owner's history.
_Copy: TypeAlias = tuple[PreCopy, list[tuple[StampedTable, int]]]  # Tables with their numbers in chunks.

# A new base is written once later releases would exceed this share of the base. This costs about 1.7 bytes
# written for each changed byte, bases included, and loading reads at most 2.5 times the size of a base.
_RELEASES_SHARE = 1.5
# A base is also written at this number of layers, since each has its own files.
_MOST_LAYERS = 256
# Bytes of each row in a chunk in addition to values: id, stamp and digest.
_ROW_BYTES = 24
# Id, and the version since which the row is dirty.
_DIRTY_ROW_BYTES = 16
_PAUSE_SECONDS = 0.01
# After storing full files, the writer sleeps for this multiple of the time that it took. It thus uses at most a
# third of a core and of the disk while cuts continue.
_REST = 2.0
_LONGEST_REST_SECONDS = 1.0
# Full files are stored in groups of this size.
_FULL_FILES = 4


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """Sizes of the parts in which a checkpoint is written.

    Attributes:
        file_bytes: largest size of a file, unless a single chunk is larger.
        chunk_bytes: approximate size of a chunk.
        turn_bytes: bytes copied in one turn on the model's thread, which takes less than a millisecond.
        last_turn_bytes: largest rest that the last turn copies, which delays a cut by a few milliseconds.
        patience_seconds: a view whose release has been pending for longer is left out. If the log is too full for
            that release, only a checkpoint makes room.
    """

    file_bytes: int = 32 << 20
    chunk_bytes: int = CHUNK_BYTES
    turn_bytes: int = 2 << 20
    last_turn_bytes: int = 8 << 20
    patience_seconds: float = 60.0


@dataclass(frozen=True, eq=False)
class SourceTable:
    """A table to write to a checkpoint.

    Attributes:
        key: the table.
        table: its rows.
        record: the data from which its owner recreates it.
        dirty: its dirty rows ([n], ascending), and the versions since which they are dirty ([n]). Both arrays are
            immutable.
    """

    key: TableKey
    table: StampedTable
    record: Mapping[str, Any]
    dirty: tuple[Ids, Stamps] | None = None


class Source(Protocol):
    """An owner of tables: a model, or a view of it. Used on the model's thread."""

    @property
    def owner(self) -> str:
        """The owner in the keys of its tables."""

    @property
    def history(self) -> str:
        """The id of the history to which its numbers belong. Tables of another history are different tables."""

    def checkpoint_tables(self) -> Sequence[SourceTable]:
        """The present tables."""

    def checkpoint_state(self) -> Mapping[str, Any] | None:
        """The JSON data it needs, besides its tables, to continue; None while that is unknown."""


class Subject(Protocol):
    """The model and views of a checkpoint. Used on the writing thread unless stated otherwise."""

    def run(self, function: Callable[[], T], /) -> T:
        """Run a function on the model's thread, wait for it, and return its result."""

    def position(self) -> Position:
        """The version of the tables. On the model's thread; an error stops the checkpoint."""

    def sources(self) -> Sequence[Source]:
        """The model and its present views. On the model's thread; an error stops the checkpoint."""

    def small_records(self) -> Mapping[str, bytes]:
        """Read the small log records that a service on another machine needs, before the version is fixed."""

    def log_records(self, before: Manifest | None) -> Iterable[LogRecord]:
        """Read the log records that checkpoint `before` lacks; all records if it is None."""

    def in_haste(self) -> bool:
        """Whether to write as fast as possible instead of leaving most of the processor and disk to cuts."""

    def check(self) -> None:
        """Raise an error to stop the checkpoint. Called often."""


@dataclass(frozen=True)
class _Moment:
    """All tables at one version."""

    position: Position
    histories: Mapping[str, str]
    tables: Sequence[TableEntry]
    states: Mapping[str, Mapping[str, Any]]
    dirty: Sequence[tuple[int, Ids, Stamps]]  # With the numbers of tables in chunks.


class LayerFiles:
    """The files of a layer. In turns, one thread fills them and another stores the full ones.

    Attributes:
        names: files that were stored, or whose storing began.
    """

    def __init__(self, place: Place, prefix: str, file_bytes: int) -> None:
        self.names = list[str]()
        self._place, self._prefix, self._file_bytes = place, prefix, file_bytes
        # None marks the beginning of a round.
        self._full, self._spare = list[ChunkFile | None](), list[ChunkFile]()
        self._filling = ChunkFile(file_bytes)
        self._filling.take_memory()
        self._rounds = [list[File]()]

    def add(self, chunk: Callable[[ChunkFile], bool]) -> None:
        """Add a chunk to the present file, or to the next one if it is full."""
        while not chunk(self._filling):
            self._next_file()

    def next_round(self) -> None:
        """Begin a new round, in which rows may occur again."""
        self._next_file()
        self._full.append(None)

    def _next_file(self) -> None:
        if self._filling.nbytes:
            self._full.append(self._filling)
            if len(self._full) >= _FULL_FILES:
                self.store()
            self._filling = self._spare.pop() if self._spare else ChunkFile(self._file_bytes)

    def store(self) -> bool:
        """Store the full files, and prepare an empty one. Return whether there were any."""
        full = bool(self._full)
        for file in self._full:
            if file is None:
                self._rounds.append([])
                continue
            self.names.append(f"{self._prefix}{len(self.names):06d}")
            self._place.put(self.names[-1], file.content(self.names[-1]))
            self._rounds[-1].append(File(self.names[-1], file.nbytes))
            file.clear()
            self._spare.append(file)
        self._full.clear()
        if not self._spare:  # The thread that fills files must not wait for memory.
            self._spare.append(ChunkFile(self._file_bytes))
            self._spare[-1].take_memory()
        return full

    def end(self) -> list[list[File]]:
        """Store the remaining files. Return all rounds since the last call."""
        self._next_file()
        self.store()
        rounds, self._rounds = self._rounds, [[]]
        return [files for files in rounds if files]


class CheckpointWriter:
    """Writes one checkpoint. Blocks."""

    def __init__(
        self, files: LayerFiles, subject: Subject, previous: Manifest | None, options: WriteOptions
    ) -> None:
        """See `CheckpointStore.write`."""
        self._files, self._subject, self._previous, self._options = files, subject, previous, options
        self._before = dict[_Which, TableEntry]()
        self._slots = 0
        # The tables being copied, by their numbers in chunks.
        self._slot_of = dict[_Which, int]()
        self._following = dict[int, StampedTable]()
        self._copies = list[_Copy]()
        self._unended = list[_Copy]()  # Copies that may need another round.
        self._newest = 0, -1  # Table and row at the end of the newest block; ascending within a round.
        self._waited = 0.0

    def write(self, model: str, id: str) -> Manifest:  # noqa: A002
        """Write the files of checkpoint `id` except its manifest, and return the manifest."""
        run = self._subject.run
        unhurried = run(self._begin)
        progress = Progress(f"model {model!r}: writing a checkpoint", unhurried, "bytes")
        kept: Mapping[str, bytes] | None = None
        while not isinstance(done := run(partial(self._turn, last=kept is not None)), _Moment):
            self._subject.check()
            began = time.monotonic()
            stored = self._files.store()
            if done:
                progress.add(done)
                unhurried -= done
                # Rows changed meanwhile are copied without a pause, because they might change faster otherwise.
                if stored and unhurried > 0 and not self._subject.in_haste():
                    time.sleep(min(_REST * (time.monotonic() - began), _LONGEST_REST_SECONDS))
            elif kept is None:
                # Read before the last turn, so that no record is newer than the checkpoint.
                kept = self._subject.small_records()
            else:
                time.sleep(_PAUSE_SECONDS)
                self._waited += _PAUSE_SECONDS
        rounds = self._files.end()
        for packed in packed_records(self._subject.log_records(self._previous)):
            self._files.add(partial(ChunkFile.add_records, packed=packed))
            self._files.store()
        others = [file for files in self._files.end() for file in files]
        for slot, ids, since in done.dirty:
            for start in range(0, len(ids), rows := self._options.chunk_bytes // _DIRTY_ROW_BYTES):
                some = slice(start, start + rows)
                self._files.add(partial(ChunkFile.add_dirty, slot=slot, ids=ids[some], since=since[some]))
                self._files.store()
        dirty = [file for files in self._files.end() for file in files]
        layers = self._previous.layers if self._previous else ()
        return Manifest(
            model=model,
            histories=done.histories,
            version=done.position.number,
            seal=done.position.seal,
            id=id,
            made_unix_ns=time.time_ns(),
            tables=done.tables,
            states=done.states,
            layers=[*layers, Layer(done.position.number, rounds, others)],
            dirty=dirty,
            slots=self._slots,
            small=kept or {},
        )

    # The methods below run on the model's thread.

    def _begin(self) -> int:
        """Choose between a base and a release. Return the approximate bytes to copy."""
        position, tables = self._subject.position(), self._tables()
        if self._previous and not self._goes_on_from(self._previous, position, tables):
            self._previous = None
        if self._previous:
            histories = self._previous.histories
            self._before = {(histories[entry.key.owner], entry.key): entry for entry in self._previous.tables}
            self._slots = self._previous.slots
        self._follow(tables)
        return sum(copy.left_bytes for copy, _ in self._copies)

    def _goes_on_from(self, previous: Manifest, position: Position, tables: Mapping[_Which, SourceTable]) -> bool:
        if previous.history != position.history or previous.version > position.number:
            return False
        numbers = {entry.key: entry.number for entry in previous.tables}
        base, *releases = (layer.bytes for layer in previous.layers)
        changed = (
            (each.table.counts.after(numbers.get(each.key, 0)), each.table.spec) for each in tables.values()
        )
        new = sum(rows * (_ROW_BYTES + spec.dim * spec.dtype.itemsize) for rows, spec in changed)
        return len(previous.layers) < _MOST_LAYERS and sum(releases) + new <= base * _RELEASES_SHARE

    def _tables(self) -> dict[_Which, SourceTable]:
        sources = self._subject.sources()
        return {(source.history, each.key): each for source in sources for each in source.checkpoint_tables()}

    def _follow(self, tables: Mapping[_Which, SourceTable]) -> None:
        """Start copying new tables, and stop copying removed ones."""
        following, new = dict[int, StampedTable](), dict[int, int]()
        for which, each in tables.items():
            before = self._before.get(which)
            if which not in self._slot_of:
                self._slot_of[which] = before.slot if before else self._slots
                self._slots += not before
            slot = self._slot_of[which]
            if self._following.get(slot) is not each.table:
                new[slot] = before.number if before else 0
            following[slot] = each.table
        self._following = following
        if new:
            copy = PreCopy([following[slot] for slot in new], list(new.values()), self._options.last_turn_bytes)
            self._copies.append((copy, [(following[slot], slot) for slot in new]))
            # New tables go first. The rest of the others may grow meanwhile, so they continue afterwards.
            self._unended = list(self._copies)

    def _turn(self, *, last: bool) -> int | _Moment:
        """Copy some rows. In the last turn, once only a small rest is left, copy that too.

        Return the number of bytes copied, 0 if only the rest is left; or the tables, after the last turn.
        """
        position = self._subject.position()
        if copied := self._copy_blocks(self._unended):
            return copied
        sources, tables = self._subject.sources(), self._tables()
        self._follow(tables)
        if (copied := self._copy_blocks(self._unended)) or not last:
            return copied
        states = {each.owner: state for each in sources if (state := each.checkpoint_state()) is not None}
        if waiting := [each.owner for each in sources if each.owner not in states]:
            if self._waited < self._options.patience_seconds or "" in waiting:
                self._copy_blocks(list(self._copies))  # Otherwise the rest would grow meanwhile.
                return 0
            text = "writing a checkpoint without the views of consumers %s: the log does not accept their releases"
            logger.warning(text, ", ".join(waiting))
        self._files.next_round()
        for copy, copied_tables in self._copies:
            for slot, ids in copy.rest():
                self._copy(*copied_tables[slot], ids)
        histories = {each.owner: each.history for each in sources if each.owner in states}
        there = [(self._slot_of[which], each) for which, each in tables.items() if each.key.owner in states]
        dirty = [(slot, *each.dirty) for slot, each in there if each.dirty]
        return _Moment(position, histories, [_entry(slot, each) for slot, each in there], states, dirty)

    def _copy_blocks(self, unended: list[_Copy]) -> int:
        """Copy the rows of one turn, beginning with the last copy. Remove finished copies from the list, because
        with another round each they would never end. Return the bytes of the rows.
        """
        copied, turn_bytes = 0, self._options.turn_bytes
        while copied < turn_bytes and unended:
            copy, tables = unended[-1]
            others = sum(other.left_bytes for other, _ in self._copies if other is not copy)
            copy.limit = max(0, self._options.last_turn_bytes - others)
            while copied < turn_bytes and (block := copy.next_block(self._options.chunk_bytes)):
                (table, slot), ids = tables[block[0]], block[1]
                if (slot, int(ids[0])) <= self._newest:
                    self._files.next_round()
                self._newest = slot, int(ids[-1])
                copied += self._copy(table, slot, ids)
            if copied < turn_bytes:
                unended.pop()
        return copied

    def _copy(self, table: StampedTable, slot: int, ids: Ids) -> int:
        """Copy the present rows, and return their size in bytes."""
        if self._following.get(slot) is table:  # Otherwise it was removed.
            rows = max(1, self._options.chunk_bytes // table.spec.row_bytes)
            deleted = table.deleted(ids)
            for gone, some in ((False, ids[~deleted]), (True, ids[deleted])):
                for start in range(0, len(some), rows):
                    part = some[start : start + rows]
                    self._files.add(partial(ChunkFile.add_rows, slot=slot, table=table, ids=part, deleted=gone))
        return len(ids) * table.spec.row_bytes


def _entry(slot: int, each: SourceTable) -> TableEntry:
    table = each.table
    return TableEntry(each.key, slot, each.record, table.counts.newest, table.checksum)
