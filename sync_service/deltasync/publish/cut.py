"""Parts of a cut, until all ranks have closed theirs."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from deltasync.core.errors import Contradiction, InvalidInput, ResyncRequired
from deltasync.core.event_time import newest_event_time
from deltasync.core.rows import RowBatch
from deltasync.core.tables import Shard, TableSpec
from deltasync.core.words import counted
from deltasync.publish.changed_rows import MissingRows
from deltasync.publish.coverage import gap
from deltasync.publish.norm_guard import RowNorms
from deltasync.publish.runs import Run

# A larger cut is read back from the log when it is applied, so that memory stays bounded.
KEPT_BYTES = 32 << 20


@dataclass
class RankPart:
    """One rank's share of a cut, as far as it has come.

    `published` rows of each table were in earlier cuts. A full part need not name every row: the others are
    deleted. `missing` are rows that were published after the version that the rank goes on from, and are to be in
    the part; None if it goes on from the newest one.
    """

    rank: int
    shards: list[Shard]
    must_be_full: bool
    published: Mapping[str, int] = field(default_factory=dict)
    missing: MissingRows | None = None
    layout: int = 0
    records: int = 0
    rows: int = 0
    bytes: int = 0
    step_end_unix_ns: int = 0
    gather_ns: int = 0
    event_time_unix_ns: int | None = None
    log_bytes: int = 0
    closed: bool = False
    full: bool = False
    deletes: frozenset[int] = frozenset()
    last_ids: dict[tuple[int, bool], int] = field(default_factory=dict)
    named_rows: Counter[int] = field(default_factory=Counter)
    new_rows: Counter[int] = field(default_factory=Counter)  # Of these, those that were never published.
    largest_norms: dict[str, float] = field(default_factory=dict)  # As far as they are looked at.
    excess: str = ""  # Why a row's norm is too much, if one's is.
    kept: list[RowBatch] = field(default_factory=list)
    unwritten: Sequence[Future[None]] = ()  # By the log, when the part was closed.

    def note_norms(self, table: str, norms: RowNorms) -> None:
        """Note the norms of rows that arrived."""
        self.largest_norms[table] = max(norms.largest, self.largest_norms.get(table, 0.0))
        self.excess = self.excess or norms.excess

    def add(self, slot: int, rows: RowBatch) -> None:
        """Count rows that arrived: live ones and deletes, each by ascending ids, so that none comes twice.

        Raises:
            InvalidInput: a row came before, or out of order.
        """
        name, ids, column = self.shards[slot].table.name, rows.ids, (slot, rows.deleted)
        last = self.last_ids.get(column, -1)
        if ids[0] <= last:
            raise InvalidInput(
                f"table {name!r}: row id {int(ids[0])} came after {last}; ids must be strictly ascending inside a "
                "part"
            )
        self.last_ids[column] = int(ids[-1])
        self.named_rows[slot] += len(ids)
        self.new_rows[slot] += len(ids) - int(np.searchsorted(ids, self.published.get(name, 0)))
        if self.missing:
            self.missing.name(slot, self.shards[slot], ids)
        self.rows += len(ids)
        self.bytes += rows.nbytes


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


def _check_full(part: RankPart) -> None:
    for slot, shard in enumerate(part.shards):
        rows, kind = part.named_rows[slot], shard.table.kind
        if rows > shard.rows or (kind.complete and rows < shard.rows):
            raise InvalidInput(
                f"rank {part.rank} closed a full part with {counted(rows, 'row')} of {kind.value} "
                f"{shard.table.name!r}, but its shard has {shard.rows}"
            )


def _check_new(part: RankPart) -> None:
    for slot, shard in enumerate(part.shards):
        first = max(shard.row_offset, part.published.get(shard.table.name, 0))
        new = max(0, shard.row_offset + shard.rows - first)
        if (sent := part.new_rows[slot]) < new:
            raise ResyncRequired(
                f"rank {part.rank} sent {sent} of its {new} rows of table {shard.table.name!r} that were never "
                "published: publish every row first"
            )


def _check_missing(part: RankPart) -> None:
    if part.missing is None:
        return
    for slot, count in part.missing.counts.items():
        raise ResyncRequired(
            f"rank {part.rank} left out rows of table {part.shards[slot].table.name!r} that were published after "
            f"version {part.missing.since}, {count} of them: publish every row first"
        )
