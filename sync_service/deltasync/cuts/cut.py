"""A cut: the parts of its ranks, and the checks that they are complete."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np

from deltasync.base.errors import InvalidInput, ResyncRequired, RunRefused
from deltasync.base.words import counted
from deltasync.core.cut_times import way_to_service
from deltasync.core.rows import Ids, Mask, RowBatch
from deltasync.core.seal import Seal, newest_event_time
from deltasync.core.stamped_table import StampedTable
from deltasync.core.tables import DIGEST_TYPE, Shard, TableSpec
from deltasync.cuts.admission import Run
from deltasync.cuts.norm_guard import RowNorms
from deltasync.model.applied_tables import NOTHING_MISSING, MissingIds


@dataclass(frozen=True, eq=False)
class ChangedRows:
    """The rows of a rank's shards that its next part must have: those published after a version, including deleted
    ones, and those that damage has cost the service.

    Attributes:
        since: the version after which they were published.
        upto: the version of the tables at that time.
        tables: global ids by name of the table, [n] int64, strictly ascending, of changed tables only.
        masks: bool [rows] of each changed shard, by its index.
        counts: number of these rows in each changed shard, by its index.
    """

    since: int
    upto: int
    tables: Mapping[str, Ids] = field(default_factory=dict)
    masks: Mapping[int, Mask] = field(default_factory=dict)
    counts: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def find(
        cls,
        since: int,
        upto: int,
        tables: Iterable[StampedTable],
        shards: Sequence[Shard],
        missing: MissingIds = NOTHING_MISSING,
    ) -> "ChangedRows":
        """Find them in tables at version `upto`, which lack the `missing` rows. On the thread of their model."""
        ids_of: dict[str, Ids] = {}
        masks: dict[int, Mask] = {}
        counts: dict[int, int] = {}
        names = {shard.table.name for shard in shards}
        changed = {each.spec.name: each.changed_since(since) for each in tables if each.spec.name in names}
        for name in missing.keys() & changed.keys():
            changed[name] = np.union1d(changed[name], missing[name])
        for slot, shard in enumerate(shards):
            name = shard.table.name
            ids = changed.get(name, np.empty(0, np.int64))
            first, end = np.searchsorted(ids, (shard.row_offset, shard.row_offset + shard.rows))
            if len(ids := ids[first:end]):
                ids_of[name] = np.union1d(ids_of[name], ids) if name in ids_of else ids
                counts[slot], masks[slot] = len(ids), np.zeros(shard.rows, bool)
                masks[slot][ids - shard.row_offset] = True
        return cls(since, upto, ids_of, masks, counts)


class MissingRows:
    """A rank's changed rows that are not in its part yet. Used in the event loop; creating one and counting take
    constant time.
    """

    def __init__(self, changed: ChangedRows) -> None:
        self._changed, self._counts = changed.masks, dict(changed.counts)
        # Unlike copies of the masks, zeros take no time until they are written to.
        self._named = {slot: np.zeros(len(mask), bool) for slot, mask in changed.masks.items()}

    def name(self, slot: int, shard: Shard, ids: Ids) -> None:
        """Record that the part contains these rows of a shard; `ids` are distinct."""
        if slot in self._named:
            rows, named = ids - shard.row_offset, self._named[slot]
            self._counts[slot] -= int(np.count_nonzero(self._changed[slot][rows] & ~named[rows]))
            named[rows] = True

    @property
    def counts(self) -> dict[int, int]:
        """Number of missing rows by index of the shard, without complete shards."""
        return {slot: count for slot, count in self._counts.items() if count}


@dataclass(frozen=True)
class PartEnd:
    """How a rank closes its part of a cut.

    Attributes:
        step: the step after which the cut is taken.
        rows: number of rows in the part.
        full: whether these are all rows that the rank holds.
        step_end_unix_ns: when the step ended, nanoseconds since 1970.
        event_time_unix_ns: time of the newest training event; None if the rank reports none.
        gather_ns: nanoseconds in which the rank read its rows.
        deletes: numbers of the requested deletes that it carried out.
        differing: names of tables whose rows differ between ranks.
    """

    step: int
    rows: int
    full: bool = False
    step_end_unix_ns: int = 0
    event_time_unix_ns: int | None = None
    gather_ns: int = 0
    deletes: frozenset[int] = frozenset()
    differing: frozenset[str] = frozenset()


@dataclass
class RankPart:
    """One rank's part of a cut, as far as it has arrived.

    `published` is the number of rows of each table in earlier cuts. A full part deletes rows that it leaves out.
    The part must contain the `missing` rows, which the service has named; None if it named none.
    """

    rank: int
    shards: list[Shard]
    must_be_full: bool
    published: Mapping[str, int] = field(default_factory=dict)
    missing: MissingRows | None = None
    layout: int = 0
    log_bytes: int = 0
    records: int = 0
    rows: int = 0
    bytes: int = 0
    end: PartEnd | None = None  # Once it is closed.
    last_ids: dict[tuple[int, bool], int] = field(default_factory=dict)
    named_rows: Counter[int] = field(default_factory=Counter)
    new_rows: Counter[int] = field(default_factory=Counter)  # Rows among them that were never published.
    largest_norms: dict[str, float] = field(default_factory=dict)  # By name, of tables that the norm guard reads.
    excess: str = ""  # Why a row's norm is too large; empty if none is.
    kept: list[RowBatch] = field(default_factory=list)
    unwritten: Sequence[Future[None]] = ()  # Writes to the log that were pending when the part was closed.


@dataclass
class Cut:
    """The rows that all ranks publish after a step. A model has at most one open cut.

    `published` is the number of rows of each table in earlier cuts; the cut must contain all others. `rows`,
    `bytes` and `log_bytes` count the rows of all parts, their ids and values, and their records in the log. To
    bound memory, a cut of more than `kept_bytes` bytes is read back from the log when it is applied.
    """

    version: int
    step: int
    run: Run
    published: Mapping[str, int] = field(default_factory=dict)
    tables: dict[str, TableSpec] = field(default_factory=dict)
    parts: dict[int, RankPart] = field(default_factory=dict)
    rows: int = 0
    bytes: int = 0
    log_bytes: int = 0
    kept_bytes: int = 32 << 20
    _only_in_log: bool = False

    def add(
        self, part: RankPart, slot: int, rows: RowBatch, log_bytes: int, norms: RowNorms | None = None
    ) -> None:
        """Add live or deleted rows to a part, each kind by ascending ids, in a record of `log_bytes` bytes.

        They stay in memory until the cut is applied, unless the cut is too large.
        """
        name, ids, column = rows.table.name, rows.ids, (slot, rows.deleted)
        if ids[0] <= (last := part.last_ids.get(column, -1)):
            text = f"table {name!r}: row id {int(ids[0])} came after {last}"
            raise InvalidInput(f"{text}; ids must be strictly ascending within a part")
        part.last_ids[column] = int(ids[-1])
        part.named_rows[slot] += len(ids)
        part.new_rows[slot] += len(ids) - int(np.searchsorted(ids, part.published.get(name, 0)))
        if part.missing:
            part.missing.name(slot, part.shards[slot], ids)
        if norms:
            part.largest_norms[name] = max(norms.largest, part.largest_norms.get(name, 0.0))
            part.excess = part.excess or norms.excess
        for each in (part, self):
            each.rows += len(ids)
            each.bytes += rows.nbytes
            each.log_bytes += log_bytes
        if self._only_in_log:
            return
        part.kept.append(rows)
        if self.bytes + self.rows * DIGEST_TYPE.itemsize > self.kept_bytes:
            self._only_in_log = True
            for other in self.parts.values():
                other.kept.clear()

    def rows_in_memory(self) -> list[RowBatch] | None:
        """All rows of the cut in the order of the log, so that the same one wins if shards overlap. None if there
        are too many: then only the log has them.
        """
        if self._only_in_log:
            return None
        return [rows for _, part in sorted(self.parts.items()) for rows in part.kept]

    def announce(self, tables: list[TableSpec]) -> None:
        """Add the tables of a rank's run; all ranks of a run have the same tables."""
        self.tables = self.tables | {table.name: table for table in tables if table.name not in self.tables}

    def begin(
        self,
        rank: int,
        shards: list[Shard],
        *,
        must_be_full: bool,
        missing: MissingRows | None = None,
        layout: int = 0,
        log_bytes: int = 0,
    ) -> RankPart:
        """Begin a rank's part, or begin it anew. Its `layout` added `log_bytes` bytes to the log."""
        if before := self.parts.get(rank):
            self.rows -= before.rows
            self.bytes -= before.bytes
            self.log_bytes -= before.log_bytes
        self.log_bytes += log_bytes
        part = RankPart(rank, shards, must_be_full, self.published, missing, layout, log_bytes)
        self.parts[rank] = part
        return part

    def close(self, part: RankPart, end: PartEnd, unwritten: Sequence[Future[None]] = ()) -> None:
        """Close a rank's part if it has all rows that it must have; `unwritten` are pending writes to the log."""
        rank = f"rank {part.rank}"
        if end.rows != part.rows:
            raise InvalidInput(f"{rank} closed a part of {counted(end.rows, 'row')}, but {part.rows} arrived")
        if part.must_be_full and not end.full:
            raise ResyncRequired(
                f"{rank} sent only changed rows, but its run does not continue the published history: publish "
                "every row first"
            )
        left_out = part.missing.counts if part.missing and not end.full else {}
        for slot, shard in enumerate(part.shards):
            rows, name, kind = part.named_rows[slot], shard.table.name, shard.table.kind
            if end.full and (rows > shard.rows or (kind.complete and rows < shard.rows)):
                raise InvalidInput(
                    f"{rank} closed a full part with {counted(rows, 'row')} of {kind.value} {name!r}, but its "
                    f"shard has {shard.rows}"
                )
            first = max(shard.row_offset, part.published.get(name, 0))
            new, sent = max(0, shard.row_offset + shard.rows - first), part.new_rows[slot]
            if not end.full and sent < new:
                raise ResyncRequired(
                    f"{rank} sent {sent} of its {new} rows of table {name!r} that were never published: publish "
                    "every row first"
                )
            if count := left_out.get(slot):
                raise ResyncRequired(
                    f"{rank} left out {counted(count, 'row')} of table {name!r} that the service had named: "
                    "publish every row first"
                )
        part.end, part.unwritten = end, unwritten

    def check_coverage(self) -> None:
        """Check that the shards of a complete cut cover each table with rows that were never published, and every
        table if a part has missing rows.
        """
        for name, lack in self._gaps(self.unpublished).items():
            if lack:
                raise RunRefused(
                    f"table {name!r}: {lack} are in no rank's shard: publish the whole table, or use another model"
                )

    @property
    def unpublished(self) -> list[str]:
        """Names of the tables that may have rows which were in no earlier cut."""
        everything = self.must_be_full or any(part.missing for part in self.parts.values())
        return [n for n, table in self.tables.items() if everything or self.published.get(n, 0) < table.rows]

    def _gaps(self, names: Iterable[str]) -> dict[str, str | None]:
        shards: dict[str, list[Shard]] = {name: [] for name in names}
        for part in self.parts.values() if shards else ():
            for shard in part.shards:
                if shard.table.name in shards:
                    shards[shard.table.name].append(shard)
        return {name: gap(self.tables[name], own) for name, own in shards.items()}

    @property
    def largest_norms(self) -> dict[str, float]:
        """The largest norms of rows of all parts, by table, for tables that the norm guard reads."""
        largest: dict[str, float] = {}
        for part in self.parts.values():
            for name, norm in part.largest_norms.items():
                largest[name] = max(norm, largest.get(name, 0.0))
        return largest

    @property
    def excess(self) -> str:
        """Why the norm of a row is too large; empty if none is."""
        return next((part.excess for part in self.parts.values() if part.excess), "")

    @property
    def must_be_full(self) -> bool:
        """Whether the run cannot show that it continues the published history."""
        return any(part.must_be_full for part in self.parts.values())

    @property
    def deletes(self) -> frozenset[int]:
        """Numbers of the deletes that all ranks have carried out."""
        return frozenset.intersection(*(end.deletes for end in self.ends))

    @property
    def full(self) -> bool:
        """Whether all parts are full."""
        return all(end.full for end in self.ends)

    def whole(self) -> tuple[str, ...]:
        """Names of the tables whose rows are all in full parts."""
        if not self.full:
            return ()
        return tuple(name for name, lack in self._gaps(self.tables).items() if not lack)

    @property
    def unwritten(self) -> list[Future[None]]:
        """Writes that were pending when the parts were closed, and have not succeeded yet."""
        writes = (write for part in self.parts.values() for write in part.unwritten)
        return [write for write in writes if not write.done() or write.exception()]

    @property
    def ends(self) -> list[PartEnd]:
        """The ends of the closed parts."""
        return [part.end for part in self.parts.values() if part.end]

    def way_to_service(self, now_unix_ns: int) -> dict[str, float]:
        """Seconds from the end of the step on the last rank until now, by stage."""
        arrived_ns = now_unix_ns - max(end.step_end_unix_ns for end in self.ends)
        return way_to_service(max(end.gather_ns for end in self.ends), arrived_ns)

    def seal(self, before: Seal | None, whole: Sequence[str], now_unix_ns: int) -> Seal:
        """The seal of a complete cut that follows the seal `before`. It has every row of the tables `whole`."""
        # The newest training event of a run never moves back.
        earlier = before.event_time_unix_ns if before and before.run == self.run.id else None
        return Seal(
            version=self.version,
            step=self.step,
            run=self.run.id,
            run_started_unix_ns=self.run.started_unix_ns,
            world_size=self.run.world_size,
            rows=self.rows,
            bytes=self.bytes,
            log_bytes=self.log_bytes,
            step_end_unix_ns=max(end.step_end_unix_ns for end in self.ends),
            sealed_unix_ns=now_unix_ns,
            resync=self.must_be_full,
            whole=tuple(whole),
            event_time_unix_ns=newest_event_time([earlier, *(end.event_time_unix_ns for end in self.ends)]),
            rollback_of=self.run.rollback_of,
            accepts_any=self.run.accepts_any,
        ).after(before)


# Whether shards cover a table.


def gap(table: TableSpec, shards: Iterable[Shard]) -> str | None:
    """A block of a table that no shard covers, in words, or None. Shards may overlap."""
    filled = [shard for shard in shards if shard.rows]
    cols = sorted({0, table.dim, *(edge for s in filled for edge in (s.col_offset, s.col_offset + s.cols))})
    sweep, columns = _Columns(len(cols) - 1), {col: number for number, col in enumerate(cols)}
    for first, end, changes in _bands(table.rows, filled):
        for shard, count in changes:
            sweep.add(columns[shard.col_offset], columns[shard.col_offset + shard.cols], count)
        if (free := sweep.first_free()) is not None:
            return f"rows {first} to {end - 1}, columns {cols[free]} to {cols[free + 1] - 1}"
    return None


def _bands(rows: int, shards: Sequence[Shard]) -> Iterable[tuple[int, int, list[tuple[Shard, int]]]]:
    """Bands of rows between edges of shards, ascending: the first row, the end, and the shards that begin (1) or
    end (-1) there.
    """
    begins = [(shard.row_offset, shard, 1) for shard in shards]
    ends = [(shard.row_offset + shard.rows, shard, -1) for shard in shards]
    by_row = sorted([*begins, *ends], key=itemgetter(0))
    changes = {row: [each[1:] for each in some] for row, some in groupby(by_row, itemgetter(0))}
    for first, end in pairwise(sorted({0, rows, *changes})):
        yield first, end, changes.get(first, [])


class _Columns:
    """A segment tree of the number of shards that cover each range of columns. A node counts the shards that cover
    its whole subtree.
    """

    def __init__(self, ranges: int) -> None:
        self._leaves = 1 << (ranges - 1).bit_length()
        self._counts = [0] * (2 * self._leaves)
        self._covered = [False] * (2 * self._leaves)
        self.add(ranges, self._leaves, 1)  # Surplus leaves count as covered.

    def add(self, first: int, end: int, count: int) -> None:
        """Add `count` (1 or -1) shards to a span of ranges."""
        low, high = first + self._leaves, end + self._leaves
        lowest, highest = low, high - 1
        while low < high:
            if low & 1:
                self._count(low, count)
                low += 1
            if high & 1:
                high -= 1
                self._count(high, count)
            low, high = low >> 1, high >> 1
        for leaf in (lowest, highest) if first < end else ():
            while leaf := leaf >> 1:
                self._count(leaf, 0)

    def _count(self, node: int, count: int) -> None:
        self._counts[node] += count
        below = node < self._leaves and self._covered[2 * node] and self._covered[2 * node + 1]
        self._covered[node] = self._counts[node] > 0 or below

    def first_free(self) -> int | None:
        """The first range that no shard covers; None if all are covered."""
        if self._covered[1]:
            return None
        node = 1
        while node < self._leaves:
            node = 2 * node + self._covered[2 * node]
        return node - self._leaves
