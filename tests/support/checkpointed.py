"""A model and its views whose checkpoints tests write and load, and copies of their rows to compare."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from deltasync.checkpoints.chunks import LogRecord
from deltasync.checkpoints.manifest import Manifest, TableKey
from deltasync.checkpoints.store import CheckpointStore
from deltasync.checkpoints.writing import Source, SourceTable, WriteOptions
from deltasync.core.position import Position
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.stamped_table import StampedTable
from deltasync.core.table_form import spec_of_record, spec_record
from deltasync.core.tables import Shard, TableSpec

T = TypeVar("T")
Held = dict[TableKey, tuple[NDArray[Any], NDArray[np.int64], NDArray[np.uint64], int, float]]

MODEL = "clicks"
_DTYPES = ("<f4", "<f2")
_SMALL = WriteOptions(file_bytes=2048, chunk_bytes=512, turn_bytes=1024, last_turn_bytes=256)


class Owner:
    """An owner of tables with random rows."""

    def __init__(self, owner: str, rng: np.random.Generator) -> None:
        self.owner, self.history, self._rng = owner, f"history {rng.integers(1 << 60)}", rng
        self.tables = dict[str, tuple[TableKey, StampedTable]]()
        self.number = 0
        self.busy = 0  # How often it is asked for its state in vain.

    def checkpoint_tables(self) -> list[SourceTable]:
        return [
            SourceTable(key, table, spec_record(table.spec), dirty_of(table) if self.owner else None)
            for key, table in self.tables.values()
        ]

    def checkpoint_state(self) -> dict[str, Any] | None:
        if self.busy:
            self.busy -= 1
            return None
        return {"number": self.number}

    def add(self, name: str, rows: int, dim: int) -> None:
        spec = TableSpec(name, rows, dim, np.dtype(_DTYPES[dim % 2]))
        self.tables[name] = TableKey(self.owner, name, self.number), StampedTable(spec)

    def change(self, name: str, share: float, *, deleted: bool = False) -> None:
        """Change or delete about this share of the rows, as the next version."""
        _, table = self.tables[name]
        self.change_rows(name, np.flatnonzero(self._rng.random(table.spec.rows) < share), deleted=deleted)

    def change_rows(self, name: str, ids: Ids, *, deleted: bool = False) -> None:
        """Change or delete these rows, as the next version."""
        self.number += 1
        _, table = self.tables[name]
        if not len(ids):
            return
        values = self._rng.random((len(ids), table.spec.dim)).astype(table.spec.dtype)
        shard = Shard.whole(table.spec)
        rows = RowBatch.deletes(shard, ids) if deleted else RowBatch(shard, ids, values)
        table.apply(rows, self.number)

    def grow(self, name: str, rows: int) -> None:
        _, table = self.tables[name]
        spec = table.spec
        table.grown(TableSpec(spec.name, spec.rows + rows, spec.dim, spec.dtype))()

    def replace(self, name: str, kind: type[StampedTable] = StampedTable) -> None:
        """Continue with a copy of a table."""
        key, table = self.tables[name]
        rows, copy = table.changed_since(0), kind(table.spec)
        for deleted in (False, True):
            ids = rows[table.deleted(rows) == deleted]
            copy.load(ids, table.stamps[ids], table.digests[ids], None if deleted else table.rows_of(ids))
        copy.recount()
        self.tables[name] = key, copy

    def remove(self, name: str) -> None:
        self.number += 1
        del self.tables[name]


@dataclass
class Checkpointed:
    """A model, its views, and their checkpoints.

    Attributes:
        store: where the checkpoints are.
        meanwhile: called between the writer's steps.
        check: also called between them; may raise.
        options: by default, many chunks and files of a few rows.
        in_turn: whether the writer is using the model's thread.
        held: copies of the tables at each checkpoint, by its id.
        dirty: the dirty rows of the views' tables at each checkpoint, by its id.
    """

    store: CheckpointStore
    seed: int = 0
    meanwhile: Callable[[], None] = lambda: None
    check: Callable[[], None] = lambda: None
    held: dict[str, Held] = field(default_factory=dict)
    dirty: dict[str, dict[TableKey, list[list[int]]]] = field(default_factory=dict)
    newest: Manifest | None = None
    options: WriteOptions = _SMALL
    in_turn: bool = False
    small: dict[str, bytes] = field(
        default_factory=lambda: {"consumer/mobile": b'{"a": 1}', "offset/x": bytes(range(256))}
    )

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.model = Owner("", self.rng)
        self.views = dict[str, Owner]()

    def sources(self) -> list[Source]:
        return [self.model, *self.views.values()]

    def add_view(self, name: str) -> Owner:
        self.views[name] = Owner(name, self.rng)
        return self.views[name]

    def run(self, function: Callable[[], T]) -> T:
        self.meanwhile()
        self.in_turn = True
        try:
            return function()
        finally:
            self.in_turn = False

    def write(self, store: CheckpointStore | None = None, check: Callable[[], None] = lambda: None) -> Manifest:
        self.check = check
        made = (store or self.store).write(self, self.newest, self.options)
        self.note(made)
        return made

    def note(self, made: Manifest) -> None:
        self.newest = made
        tables = [table for owner in self.sources() for table in owner.checkpoint_tables()]
        self.held[made.id] = {each.key: held(each.table) for each in tables}
        found = {each.key: each.dirty for each in tables if each.dirty}
        self.dirty[made.id] = {key: as_lists(rows) for key, rows in found.items() if len(rows[0])}

    @staticmethod
    def seal(version: int) -> int:
        return version * 1001

    def position(self) -> Position:
        return Position(self.model.history, self.model.number, self.seal(self.model.number))

    def small_records(self) -> dict[str, bytes]:
        return self.small

    def in_haste(self) -> bool:
        return True

    def log_records(self, before: Manifest | None) -> Iterator[LogRecord]:
        for version in range(before.version + 1 if before else 1, self.model.number + 1):
            yield f"seals/{MODEL}", version, 0, 0, f"seal {version}".encode()


def held(table: StampedTable) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.uint64], int, float]:
    """Copies of a table's rows."""
    return table.rows.copy(), table.stamps.copy(), table.digests.copy(), table.checksum, table.norm


def dirty_of(table: StampedTable) -> tuple[Ids, NDArray[np.int64]]:
    """Some rows of a table, with versions since which they might be dirty."""
    ids = table.changed_since(table.counts.newest // 2)[1:]
    return ids, 7 * np.abs(table.stamps[ids]) + ids


def as_lists(rows: Iterable[NDArray[np.int64]]) -> list[list[int]]:
    return [column.tolist() for column in rows]


def loaded(store: CheckpointStore, manifest: Manifest) -> dict[TableKey, StampedTable]:
    """Load the tables of a checkpoint."""
    tables = [StampedTable(spec_of_record(entry.record)) for entry in manifest.tables]
    store.load(manifest, tables)
    return {entry.key: table for entry, table in zip(manifest.tables, tables, strict=True)}


def same(tables: Mapping[TableKey, StampedTable], expected: Held) -> bool:
    """Whether tables still have the same bits."""
    if tables.keys() != expected.keys():
        return False
    for key, table in tables.items():
        rows, stamps, digests, checksum, norm = expected[key]
        if table.rows.tobytes() != rows.tobytes() or not np.array_equal(table.stamps, stamps):
            return False
        if not np.array_equal(table.digests, digests) or table.checksum != checksum:
            return False
        if not np.isclose(table.norm, norm, rtol=1e-6) or table.counts.rows != len(rows):
            return False
    return True
