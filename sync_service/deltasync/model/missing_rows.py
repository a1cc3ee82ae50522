"""Rows that no checkpoint has any more, until a cut brings them."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from deltasync.base.words import counted
from deltasync.core.rows import Ids, Mask, RowBatch, members

# Ids ([n], ascending) by table name, without tables that lack nothing.
MissingIds: TypeAlias = Mapping[str, Ids]
NOTHING_MISSING: MissingIds = MappingProxyType({})
# Number of ids, or of ranges of ids, to name in messages.
_NAMED = 10


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
