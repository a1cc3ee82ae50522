"""The tables of a model at one version: how ranks may change them, and which rows are published."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from deltasync.base.errors import RunRefused, ServiceUnavailable, StorageFailed
from deltasync.base.threads import EVENT_LOOP, MODEL_THREAD, SET_BY_EVENT_LOOP, confined, in_own_thread
from deltasync.base.words import counted
from deltasync.checkpoints.manifest import TableKey
from deltasync.checkpoints.writing import SourceTable
from deltasync.core.policy import Policy
from deltasync.core.rows import DamagedRows, Ids, Mask, RowBatch, disjoint, first_id, members
from deltasync.core.seal import Seal, SealHistory
from deltasync.core.stamped_table import StampedTable, table_bytes
from deltasync.core.table_form import spec_record
from deltasync.core.table_memory import TableMemory
from deltasync.core.tables import Shard, TableSpec
from deltasync.model.model_store import ModelStore
from deltasync.model.releases import Head
from deltasync.wire.row_messages import CHUNK_BYTES

# Ids ([n], ascending) by table name, without tables that lack nothing.
MissingIds: TypeAlias = Mapping[str, Ids]
NOTHING_MISSING: MissingIds = MappingProxyType({})
# Number of ids, or of ranges of ids, to name in messages.
_NAMED = 10

MODEL_OWNER = ""  # The owner of the model's own tables in a checkpoint.

# Number of table patterns whose tables are cached; operators may change patterns without limit.
_REMEMBERED_PATTERNS = 4096


@confined(_seal=MODEL_THREAD, _partly=MODEL_THREAD, published=EVENT_LOOP, failed=SET_BY_EVENT_LOOP)
class AppliedTables:
    """The tables of a model, and the cut they are at; for checkpoints, a `checkpoints.writing.Source`.

    Iteration follows the order in which tables were added; a table's index is its slot. Any thread may iterate,
    because the list is replaced when a table is added or removed. That happens in the event loop, one call at a
    time. All other methods run on the model's thread, unless stated otherwise.

    Attributes:
        changes: number of times that tables were made, changed or removed.
        published: the number of rows of each table when it was last published, by table name.
        owner: the owner of the tables in checkpoints.
        failed: the rows that do not match their digests; empty if there are none. The model must be reloaded.
        missing: ids ([n], ascending) of rows that no checkpoint has any more and the trainer must send, by table
            name. Replaced and never changed, on the model's thread; any thread may read it.
        lacks: these rows in words; empty if there are none.
    """

    owner = MODEL_OWNER

    def __init__(
        self,
        model: str,
        store: ModelStore,
        memory: TableMemory,
        seals: SealHistory,
        run: Callable[..., Coroutine[Any, Any, Any]],
        changed: Callable[[], None],
    ) -> None:
        """Start without tables. `run` runs a function on the model's thread; `changed` is called in the event loop
        after a change of tables, or when rows turn out to be damaged.
        """
        self.changes = 0
        self.published: dict[str, int] = {}
        self.failed = ""
        self.missing, self.lacks = NOTHING_MISSING, ""
        self._tables: list[StampedTable] = []
        self._followed: dict[tuple[str, ...], tuple[StampedTable, ...]] = {}
        self._model = model
        self._store = store
        self._memory = memory
        self._seals = seals
        self._run = run
        self._changed = changed
        self._seal: Seal | None = None
        self._partly = False
        self._changing = asyncio.Lock()
        self._closed = False

    def __iter__(self) -> Iterator[StampedTable]:
        return iter(self._tables)

    def __getitem__(self, slot: int) -> StampedTable:
        return self._tables[slot]

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def nbytes(self) -> int:
        """Size of all tables in bytes. Safe to call from any thread."""
        return sum(table.nbytes for table in self)

    @property
    def published_specs(self) -> dict[str, TableSpec]:
        """The published tables, by name; others may still change in any way."""
        return {each.spec.name: each.spec for each in self if self.published.get(each.spec.name)}

    def followed(self, policy: Policy) -> Sequence[StampedTable]:
        """The tables that a policy follows. Safe to call from any thread."""
        if len(followed := self._followed) >= _REMEMBERED_PATTERNS:
            followed = self._followed = {}
        if (tables := followed.get(policy.tables)) is None:
            tables = followed[policy.tables] = tuple(each for each in self if policy.follows(each.spec))
        return tables

    # Damaged rows.

    def note_damage(self, error: DamagedRows | StorageFailed) -> None:
        """Note that rows, in memory or in the log, are damaged. Nothing is sent until the model is loaded again.
        Call it in the event loop.
        """
        self.failed = self.failed or str(error)
        self._changed()

    def check_sound(self) -> None:
        """Check that no damaged row was detected. Safe to call from any thread."""
        if self.failed:
            text = f"model {self._model!r} is being reloaded from its checkpoint and its log"
            raise ServiceUnavailable(text, detail=f": {self.failed}")

    # Cuts.

    @property
    def seal(self) -> Seal | None:
        """The seal of the cut that the tables are at; None before the first."""
        self.check_sound()
        if self._partly:
            raise ServiceUnavailable(f"model {self._model!r} is applying a version again; try again")
        return self._seal

    def shown(self) -> tuple[Sequence[StampedTable], Head | None]:
        """The tables and the head for replicas. Raises the errors of `seal`."""
        return self._tables, Head.of(self.seal) if self.seal else None

    def begin(self) -> None:
        """Make the tables in the log's record, all empty."""
        removed = self._store.removed
        self._replace(
            [StampedTable(spec, self._memory, removed.get(name, 0)) for name, spec in self._store.specs.items()]
        )
        self.begin_at(None)

    def begin_at(self, seal: Seal | None, missing: MissingIds = NOTHING_MISSING) -> None:
        """Note that the tables hold the rows of this cut, except the `missing` ones, or none."""
        self.missing, self.lacks = missing, in_words(missing)
        self._seal = seal
        self._partly = False

    def apply(self, seal: Seal, rows: Iterable[RowBatch] | None) -> int:
        """Apply a cut from `rows`, or from the log if they are None. Applying it again changes nothing. Return the
        number of rows that do not match their digests.
        """
        wrong = 0
        # The log may have rows of a table that was removed later, and whose name a new table now has.
        by_name = {table.spec.name: table for table in self if table.removed_before < seal.version}
        arriving = Arriving(self.missing)
        for batch in self._store.rows(seal) if rows is None else rows:
            if table := by_name.get(batch.table.name):
                self._partly = True
                wrong += table.apply(batch, seal.version)
                arriving.note(batch)
        for name in seal.whole:  # A full cut deletes the rows that it does not contain.
            if table := by_name.get(name):
                self._partly = True
                unnamed = table.not_stamped(seal.version)
                table.apply(RowBatch.deletes(Shard.whole(table.spec), unnamed), seal.version)
        self.begin_at(seal, arriving.left(by_name.keys() & set(seal.whole)))
        return wrong

    # Adding and removing tables.

    def added_bytes(self, specs: Sequence[TableSpec]) -> int:
        """Bytes needed to make or enlarge tables to these specs."""
        stale = self._stale(specs)
        there = {table.spec.name: table for table in self if table.spec.name not in stale}
        return sum(
            table_bytes(each) - (there[each.name].nbytes if each.name in there else 0)
            for each in specs
            if each.name not in there or there[each.name].spec.rows < each.rows
        )

    async def add(self, tables: list[TableSpec], *, later_run: bool = False) -> None:
        """Ensure that the model has these tables. Missing ones are made, with zeros.

        In a later run, existing tables may get more rows, zeros at first.
        """
        if self._to_change(tables, later_run):
            # It runs in a task of its own, because a disconnecting rank must not interrupt it half way.
            await asyncio.shield(asyncio.create_task(self._add(tables, later_run)))

    async def _add(self, tables: list[TableSpec], later_run: bool) -> None:
        async with self._open():
            changed = self._to_change(tables, later_run)
            stale, published = self._stale(changed), dict(self.published)
            kept = [table for table in self if table.spec.name not in stale]
            by_name = {table.spec.name: table for table in kept}
            new = [each for each in changed if each.name not in by_name]
            newest = self._seals.newest_version
            again = {each.name: newest for each in new if each.name in self._store.removed}
            removed_before = {**self._store.removed, **again}
            grown = {each.name: published.get(each.name, 0) for each in changed if each.name in by_name}
            specs = {table.spec.name: table.spec for table in kept} | {each.name: each for each in changed}

            def make() -> tuple[list[StampedTable], list[Callable[[], None]]]:
                made = [StampedTable(each, self._memory, removed_before.get(each.name, 0)) for each in new]
                larger = [by_name[name].grown(specs[name]) for name in grown]
                self._store.describe(specs, grown, again)  # Last: until then, a crash changes nothing.
                return made, larger

            def grow(steps: list[Callable[[], None]]) -> None:
                for step in steps:
                    step()

            made, larger = await asyncio.to_thread(make)
            for table in self:
                table.removed = table.removed or table.spec.name in stale
            self._replace([*kept, *made])
            await self._run(grow, larger)
            self.changes += 1
            self._changed()

    async def remove(self, name: str) -> None:
        """Remove a table, between cuts and while no rank publishes it."""
        async with self._open():
            specs = {table.spec.name: table.spec for table in self if table.spec.name != name}
            await in_own_thread(self._store.describe, specs, {}, {name: self._seals.newest_version})
            (gone,) = (table for table in self if table.spec.name == name)
            gone.removed = True
            self._replace([table for table in self if table is not gone])
            self.published.pop(name, None)
            self._changed()
            await self._run(len, self)  # Wait for earlier work on the model's thread, which may use the table.

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        async with self._changing:
            if self._closed:  # The log closes too, and a write would wait for ever.
                raise ServiceUnavailable("the service is shutting down; reconnect")
            yield

    async def close(self) -> None:
        """Add and remove no more tables."""
        async with self._changing:
            self._closed = True

    def drop(self) -> None:
        """Free the memory of the tables. Any thread may call it once nothing else uses them."""
        self._replace([])

    def _replace(self, tables: list[StampedTable]) -> None:
        self._tables = tables
        self._followed = {}
        self.changes += 1

    def _stale(self, specs: Sequence[TableSpec]) -> set[str]:
        """Names of tables that differ from `specs` and were never published, because the cut that made them was
        abandoned.
        """
        by_name = {each.name: each for each in specs}
        there = (table.spec for table in self if not self.published.get(table.spec.name))
        return {each.name for each in there if by_name.get(each.name, each) != each}

    def _to_change(self, announced: list[TableSpec], later_run: bool) -> list[TableSpec]:
        changed = changes(self._model, self.published_specs, announced, later_run=later_run)
        there = {each.spec.name: each.spec for each in self}
        return [each for each in changed if there.get(each.name) != each]

    # For checkpoints.

    @property
    def history(self) -> str:
        """The id made when the model's log was created."""
        return self._store.history

    def checkpoint_tables(self) -> list[SourceTable]:
        """The tables for a checkpoint."""
        return [SourceTable(key_of(each), each, spec_record(each.spec)) for each in self]

    def checkpoint_state(self) -> dict[str, Any]:
        """The head, which replicas that start from a checkpoint need."""
        _, head = self.shown()
        return {"head": asdict(head) if head else None}


def key_of(table: StampedTable) -> TableKey:
    """The key of a model's table in checkpoints."""
    return TableKey(MODEL_OWNER, table.spec.name, table.removed_before)


def changes(
    model: str, before: Mapping[str, TableSpec], announced: Collection[TableSpec], *, later_run: bool
) -> list[TableSpec]:
    """The announced tables of a run that are new or different. In a later run than the one that published last, a
    table may have more rows; no other difference is allowed.
    """
    for table in announced:
        if table.name not in before:
            _check_names(model, before, table)
    resulting = [_resulting(model, before.get(table.name), table, later_run=later_run) for table in announced]
    return [table for table in resulting if table != before.get(table.name)]


def _check_names(model: str, before: Mapping[str, TableSpec], announced: TableSpec) -> None:
    """Check that no other table has a name of the new one, which happens if weights were tied differently."""
    for table in before.values():
        if both := sorted({*table.names} & {*announced.names}):
            raise RunRefused(
                f"table {announced.name!r} of the run is tied to {', '.join(announced.aliases) or 'nothing'}, but "
                f"model {model!r} has {both[0]!r} in table {table.name!r}: delete that table first (deltasync "
                "tables delete)"
            )


def _resulting(model: str, before: TableSpec | None, announced: TableSpec, *, later_run: bool) -> TableSpec:
    """The table after an announcement."""
    if before is None or before == announced:
        return announced
    if later_run and before.rows < announced.rows and announced == replace(before, rows=announced.rows):
        return announced
    raise RunRefused(
        f"table {announced.name!r} of model {model!r} is {_words(before, announced)}, the run has "
        f"{_words(announced, before)}: a later run may only add rows to a table; publish it under another model "
        "(SyncOptions(model=...), --model NAME) or another table name"
    )


def _words(table: TableSpec, other: TableSpec) -> str:
    """A table's rows and type, and its other differences."""
    kind = f"{table.kind.value} " if table.kind is not other.kind else ""
    of = f" of {table.of!r}" if table.of != other.of else ""
    shape = f" of shape {list(table.shape or ())}" if table.sizes != other.sizes else ""
    aliases = f", tied to {', '.join(table.aliases) or 'nothing'}" if table.aliases != other.aliases else ""
    return f"{kind}{table.rows} x {table.dim} {table.dtype}{shape}{of}{aliases}"


def published_rows(table: StampedTable, grown_from: int, whole: Set[str]) -> int:
    """Number of published rows of a table: all, unless it has grown from `grown_from` rows and none of its new
    rows was published. A cut listed the tables `whole` completely, perhaps without any row.
    """
    published = table.stamps[grown_from:].any() or (not grown_from and table.spec.name in whole)
    return table.spec.rows if published else grown_from


def cut_rows(batches: Iterable[RowBatch], slots: Mapping[str, int]) -> list[tuple[int, RowBatch]] | None:
    """Combine the rows of a cut by table, with the slots of their tables. None if only the tables can combine
    them, because rows lack columns or repeat.
    """
    live: dict[str, list[RowBatch]] = {}
    deleted: dict[str, list[RowBatch]] = {}
    for batch in filter(len, batches):
        if batch.shard.cols < batch.table.dim:
            return None
        (deleted if batch.deleted else live).setdefault(batch.table.name, []).append(batch)
    for some in (live, deleted):
        for of_table in some.values():
            of_table.sort(key=first_id)
    if not all(map(disjoint, (*live.values(), *deleted.values()))):
        return None
    for name in live.keys() & deleted.keys():
        ids = np.sort(np.concatenate([batch.ids for batch in (*live[name], *deleted[name])]), kind="stable")
        if (ids[1:] == ids[:-1]).any():
            return None
    every = (*live.items(), *deleted.items())
    return [(slots[name], _joined(some)) for name, of_table in every for some in _gathered(of_table)]


def _gathered(batches: Sequence[RowBatch]) -> Iterable[list[RowBatch]]:
    """Batches of a table with small ones combined, because each message has a cost and there may be many ranks."""
    together, size = list[RowBatch](), 0
    for batch in batches:
        size += batch.message_bytes
        if together and size > CHUNK_BYTES:
            yield together
            together, size = [], batch.message_bytes
        together.append(batch)
    if together:
        yield together


def _joined(batches: Sequence[RowBatch]) -> RowBatch:
    first, whole = batches[0], Shard.whole(batches[0].table)
    if len(batches) == 1:
        return replace(first, shard=whole)  # It is sent in the bytes in which it arrived.
    ids = np.concatenate([batch.ids for batch in batches])
    if first.deleted:
        return RowBatch.deletes(whole, ids)
    values = np.concatenate([batch.values for batch in batches])
    digests = [batch.digests for batch in batches if batch.digests is not None]
    return RowBatch(whole, ids, values, digests=np.concatenate(digests) if len(digests) == len(batches) else None)


# Rows that no checkpoint has any more, until a cut brings them.


def in_words(missing: MissingIds) -> str:
    """Which rows of which tables are missing; empty if none are."""
    return " and ".join(
        f"{counted(len(ids), 'row')} of table {name!r} ({_some(ids)})" for name, ids in missing.items()
    )


def _some(ids: Ids) -> str:
    last = np.append(np.flatnonzero(np.diff(ids) > 1), len(ids) - 1)
    first = np.append(0, last[:-1] + 1)
    runs = [(ids[one], ids[other]) for one, other in zip(first[:_NAMED], last[:_NAMED], strict=True)]
    named = [f"{one}" if one == other else f"{one} to {other}" for one, other in runs]
    return ", ".join([*named, *(["..."] if len(last) > _NAMED else [])])


class Arriving:
    """Finds out which missing rows a cut has. Ranks may each send some columns of a row."""

    def __init__(self, missing: MissingIds) -> None:
        self._missing = missing
        # Which missing rows the cut has, by table and the first column and end of a shard.
        self._shards = defaultdict[str, dict[tuple[int, int], Mask]](dict)
        self._dims = dict[str, int]()

    def note(self, batch: RowBatch) -> None:
        """Note rows of the cut."""
        shard, name = batch.shard, batch.table.name
        if (ids := self._missing.get(name)) is not None:
            self._dims[name] = batch.table.dim
            masks, columns = self._shards[name], (shard.col_offset, shard.col_offset + shard.cols)
            masks[columns] = masks.get(columns, False) | members(ids, batch.ids)

    def left(self, whole: Collection[str]) -> MissingIds:
        """The rows that are missing after the cut, which has all rows of the tables `whole`."""
        left = {name: ids[~self._complete(name, ids)] for name, ids in self._missing.items() if name not in whole}
        return {name: ids for name, ids in left.items() if len(ids)}

    def _complete(self, name: str, ids: Ids) -> Mask:
        """Whether the cut has all columns of each missing row of a table: [n]."""
        reached = np.zeros(len(ids), np.int64)
        for first, end in sorted(self._shards[name]):
            goes_on = self._shards[name][first, end] & (reached >= first)
            reached[goes_on] = np.maximum(reached[goes_on], end)
        return reached >= self._dims.get(name, 1)
