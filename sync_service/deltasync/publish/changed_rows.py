"""What was published after the version that a rank goes on from, of the rows that it holds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from deltasync.core.rows import Ids, Mask
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import Shard


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
