"""One rank's part of a cut: its rows in their order, and what it must have."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from deltasync.base.errors import InvalidInput, ResyncRequired
from deltasync.base.words import counted
from deltasync.core.rows import Ids, Mask, RowBatch
from deltasync.core.stamped_table import StampedTable
from deltasync.core.tables import Shard
from deltasync.cuts.norm_guard import RowNorms


@dataclass(frozen=True, eq=False)
class ChangedRows:
    """The rows of a rank's shards that were published after a version, deleted ones among them.

    Attributes:
        since: that version.
        upto: the version the tables were at.
        tables: global ids by name of the table, [n] int64, ascending, each once; tables without any are left out.
        masks: by index of the shard, which of its rows these are: bool [rows]; likewise.
        counts: by index of the shard, how many of its rows these are; likewise.
    """

    since: int
    upto: int
    tables: Mapping[str, Ids] = field(default_factory=dict)
    masks: Mapping[int, Mask] = field(default_factory=dict)
    counts: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def find(cls, since: int, upto: int, tables: Iterable[StampedTable], shards: Sequence[Shard]) -> "ChangedRows":
        """Those of tables that are at the version `upto`. On the thread of their model."""
        found: dict[str, Ids] = {}
        masks: dict[int, Mask] = {}
        counts: dict[int, int] = {}
        held = {shard.table.name for shard in shards}
        changed = {each.spec.name: each.changed_since(since) for each in tables if each.spec.name in held}
        for slot, shard in enumerate(shards):
            ids = _inside(changed.get(shard.table.name, np.empty(0, np.int64)), shard)
            if len(ids):
                name = shard.table.name
                found[name] = np.union1d(found[name], ids) if name in found else ids
                counts[slot], masks[slot] = len(ids), np.zeros(shard.rows, bool)
                masks[slot][ids - shard.row_offset] = True
        return cls(since, upto, found, masks, counts)


class MissingRows:
    """Those of a rank's changed rows that its part does not name yet. Used in the event loop: to make one, and to
    count, takes no longer where there are more rows.
    """

    def __init__(self, changed: ChangedRows) -> None:
        self.since = changed.since
        self._changed, self._counts = changed.masks, dict(changed.counts)
        # Zeros take no time before they are written to, as copies of masks do.
        self._named = {slot: np.zeros(len(mask), bool) for slot, mask in changed.masks.items()}

    def name(self, slot: int, shard: Shard, ids: Ids) -> None:
        """Note that the part names rows of a shard, each once in `ids`."""
        if slot in self._named:
            rows, named = ids - shard.row_offset, self._named[slot]
            self._counts[slot] -= int(np.count_nonzero(self._changed[slot][rows] & ~named[rows]))
            named[rows] = True

    @property
    def counts(self) -> dict[int, int]:
        """How many are missing, by index of the shard; shards without any are left out."""
        return {slot: count for slot, count in self._counts.items() if count}


def _inside(ids: Ids, shard: Shard) -> Ids:
    first, end = np.searchsorted(ids, (shard.row_offset, shard.row_offset + shard.rows))
    return ids[first:end]


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
