"""The parts of a cut, until all ranks have closed theirs, and whether these make up whole tables."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter

from deltasync.base.errors import Contradiction, InvalidInput, ResyncRequired
from deltasync.base.words import counted
from deltasync.core.rows import RowBatch
from deltasync.core.seal import newest_event_time
from deltasync.core.tables import Shard, TableSpec
from deltasync.cuts.part import MissingRows, RankPart, _check_full, _check_missing, _check_new
from deltasync.cuts.runs import Run

# A larger cut is read back from the log when it is applied, so that memory stays bounded.
KEPT_BYTES = 32 << 20


@dataclass
class Cut:
    """What the ranks publish after one step: at most one is open in a model.

    `published` is how many rows of each table were published before: the others are to be in it.
    """

    version: int
    step: int
    run: Run
    published: Mapping[str, int] = field(default_factory=dict)
    tables: dict[str, TableSpec] = field(default_factory=dict)
    parts: dict[int, RankPart] = field(default_factory=dict)
    _only_in_log: bool = False

    def keep(self, part: RankPart, rows: RowBatch) -> None:
        """Keep some rows of a part in memory for when the cut is applied, as long as there are not many."""
        if self._only_in_log:
            return
        part.kept.append(rows)
        if self.bytes > KEPT_BYTES:
            self._only_in_log = True
            for each in self.parts.values():
                each.kept.clear()

    def rows_in_memory(self) -> list[RowBatch] | None:
        """All rows of the cut, in the order in which the log has them: where shards of two ranks meet, the same
        one of the two stays. None if there are so many that they are only in the log.
        """
        if self._only_in_log:
            return None
        return [rows for _, part in sorted(self.parts.items()) for rows in part.kept]

    def announce(self, tables: list[TableSpec]) -> None:
        """Note that a rank's run has these tables; all ranks of a run have the same."""
        self.tables = self.tables | {table.name: table for table in tables if table.name not in self.tables}

    def begin(
        self,
        rank: int,
        shards: list[Shard],
        *,
        must_be_full: bool,
        missing: MissingRows | None = None,
    ) -> RankPart:
        """Begin a rank's part; one that was begun before is begun anew."""
        part = self.parts[rank] = RankPart(rank, shards, must_be_full, self.published, missing)
        return part

    def close(
        self,
        part: RankPart,
        *,
        rows: int,
        full: bool,
        step_end_unix_ns: int,
        deletes: frozenset[int] = frozenset(),
        event_time_unix_ns: int | None = None,
        unwritten: Sequence[Future[None]] = (),
        gather_ns: int = 0,
    ) -> None:
        """Close a rank's part, of which the log may still have some writes before it.

        Raises:
            InvalidInput: the part's count of rows is not what arrived, or it claims to be full and lacks rows that
                are not embeddings, or any, of a rank that does not know of deletes: where a full part does not
                name them, only embeddings are deleted, and only by who knows it.
            ResyncRequired: the part must hold every row, and does not claim to; or it lacks some that were never
                published, or were after the version that the rank goes on from.
        """
        if rows != part.rows:
            raise InvalidInput(
                f"rank {part.rank} closed a part of {counted(rows, 'row')}, but {part.rows} arrived"
            )
        if full:
            _check_full(part)
        if part.must_be_full and not full:
            raise ResyncRequired(
                f"rank {part.rank} sent only changed rows, but its run does not continue the published history: "
                "publish every row first"
            )
        if not full:
            _check_new(part)
            _check_missing(part)
        part.step_end_unix_ns, part.event_time_unix_ns, part.deletes = (
            step_end_unix_ns,
            event_time_unix_ns,
            deletes,
        )
        part.closed, part.full, part.unwritten, part.gather_ns = True, full, unwritten, gather_ns

    def closed_by(self, rank: int) -> bool:
        """Whether a rank has closed its part."""
        return rank in self.parts and self.parts[rank].closed

    def check_coverage(self) -> None:
        """Check that the shards of a complete cut make up the tables of which it brings what was never published,
        or all that came after a version.

        Raises:
            Contradiction: some values of a table belong to no rank's shard.
        """
        for name, lack in self._gaps(self.unpublished).items():
            if lack:
                raise Contradiction(
                    f"table {name!r}: {lack} are in no rank's shard: publish all of it, or another model"
                )

    @property
    def unpublished(self) -> list[str]:
        """Names of the tables that may have rows which were in no cut before."""
        everything = self.must_be_full or any(part.missing for part in self.parts.values())
        return [n for n, table in self.tables.items() if everything or self.published.get(n, 0) < table.rows]

    def _gaps(self, names: Iterable[str]) -> dict[str, str | None]:
        shards: dict[str, list[Shard]] = {name: [] for name in names}
        for part in self.parts.values() if shards else ():
            for shard in part.shards:
                if shard.table.name in shards:
                    shards[shard.table.name].append(shard)
        return {name: gap(self.tables[name], held) for name, held in shards.items()}

    @property
    def largest_norms(self) -> dict[str, float]:
        """The largest norms of rows of all parts, by table, as far as they are looked at."""
        largest: dict[str, float] = {}
        for part in self.parts.values():
            for name, norm in part.largest_norms.items():
                largest[name] = max(norm, largest.get(name, 0.0))
        return largest

    @property
    def excess(self) -> str:
        """Why the norm of a row of it is too much; empty if none is."""
        return next((part.excess for part in self.parts.values() if part.excess), "")

    @property
    def must_be_full(self) -> bool:
        """Whether the run cannot show that it continues the published history."""
        return any(part.must_be_full for part in self.parts.values())

    @property
    def deletes(self) -> frozenset[int]:
        """Numbers of the requests that all ranks have met."""
        return frozenset.intersection(*(part.deletes for part in self.parts.values()))

    @property
    def full(self) -> bool:
        """Whether all of its parts are."""
        return all(part.full for part in self.parts.values())

    def whole(self) -> tuple[str, ...]:
        """Names of the tables of which full parts have named all rows that there are."""
        if not self.full:
            return ()
        return tuple(name for name, lack in self._gaps(self.tables).items() if not lack)

    @property
    def unwritten(self) -> list[Future[None]]:
        """Writes that were under way when the parts were closed, and have not succeeded yet."""
        writes = (write for part in self.parts.values() for write in part.unwritten)
        return [write for write in writes if not write.done() or write.exception()]

    @property
    def complete(self) -> bool:
        """Whether every rank has closed its part."""
        return len(self.parts) == self.run.world_size and all(part.closed for part in self.parts.values())

    @property
    def rows(self) -> int:
        """Rows of all parts together."""
        return sum(part.rows for part in self.parts.values())

    @property
    def bytes(self) -> int:
        """Bytes of ids and values of all parts together."""
        return sum(part.bytes for part in self.parts.values())

    @property
    def log_bytes(self) -> int:
        """Bytes of all parts' records in the log."""
        return sum(part.log_bytes for part in self.parts.values())

    @property
    def step_end_unix_ns(self) -> int:
        """When the step ended on the last of the ranks."""
        return max(part.step_end_unix_ns for part in self.parts.values())

    @property
    def gather_ns(self) -> int:
        """For how long after that the slowest rank was reading its rows."""
        return max(part.gather_ns for part in self.parts.values())

    @property
    def event_time_unix_ns(self) -> int | None:
        """The time of the newest event that a rank has been trained on; None if no rank has said one."""
        return newest_event_time(part.event_time_unix_ns for part in self.parts.values())


# Whether shards make up a table.


def gap(table: TableSpec, shards: Iterable[Shard]) -> str | None:
    """A block of a table that no shard covers, in words, or None. Shards may overlap."""
    held = [shard for shard in shards if shard.rows]
    cols = sorted({0, table.dim, *(edge for s in held for edge in (s.col_offset, s.col_offset + s.cols))})
    sweep, columns = _Columns(len(cols) - 1), {col: number for number, col in enumerate(cols)}
    for first, end, changes in _bands(table.rows, held):
        for shard, count in changes:
            sweep.add(columns[shard.col_offset], columns[shard.col_offset + shard.cols], count)
        if (free := sweep.first_free()) is not None:
            return f"rows {first} to {end - 1}, columns {cols[free]} to {cols[free + 1] - 1}"
    return None


def _bands(rows: int, shards: Sequence[Shard]) -> Iterable[tuple[int, int, list[tuple[Shard, int]]]]:
    """Rows between two edges of shards, ascending: the first, the end, and which shards begin (1) or end (-1)
    there.
    """
    begins = [(shard.row_offset, shard, 1) for shard in shards]
    ends = [(shard.row_offset + shard.rows, shard, -1) for shard in shards]
    by_row = sorted([*begins, *ends], key=itemgetter(0))
    changes = {row: [each[1:] for each in some] for row, some in groupby(by_row, itemgetter(0))}
    for first, end in pairwise(sorted({0, rows, *changes})):
        yield first, end, changes.get(first, [])


class _Columns:
    """How many shards hold each range of columns: a tree whose leaves are the ranges, and whose nodes count those
    that hold all that is below them.
    """

    def __init__(self, ranges: int) -> None:
        self._leaves = 1 << (ranges - 1).bit_length()
        self._counts = [0] * (2 * self._leaves)
        self._held = [False] * (2 * self._leaves)
        self.add(ranges, self._leaves, 1)  # So many that are none.

    def add(self, first: int, end: int, count: int) -> None:
        """Count a shard more, or less, of some ranges."""
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
        below = node < self._leaves and self._held[2 * node] and self._held[2 * node + 1]
        self._held[node] = self._counts[node] > 0 or below

    def first_free(self) -> int | None:
        """The first range that no shard holds; None if each is held."""
        if self._held[1]:
            return None
        node = 1
        while node < self._leaves:
            node = 2 * node + self._held[2 * node]
        return node - self._leaves
