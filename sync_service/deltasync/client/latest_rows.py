"""Rows of a release, each once: rows that changed while a large release was read come several times."""

from collections import Counter
from dataclasses import replace

import numpy as np

from deltasync.core.rows import Mask, RowBatch


def latest_rows(batches: list[RowBatch]) -> list[RowBatch]:
    """Rows in the order in which they came, without those that come again later. Empties `batches`.

    Raises:
        IndexError: a table that comes several times has no such rows.
    """
    several = {name for name, count in Counter(each.table.name for each in batches).items() if count > 1}
    seen = dict[str, Mask]()
    latest = list[RowBatch]()
    while batches:  # From the end on. Each is let go as soon as some of its rows are copied.
        batch = batches.pop()
        if (name := batch.table.name) in several:
            if name not in seen:
                seen[name] = np.zeros(batch.table.rows, np.bool_)
            new = ~seen[name][batch.ids]
            seen[name][batch.ids] = True
            batch = batch if new.all() else _some(batch, new)
        if len(batch):
            latest.append(batch)
    return latest[::-1]


def _some(batch: RowBatch, which: Mask) -> RowBatch:
    if batch.deleted:
        return RowBatch.deletes(batch.shard, batch.ids[which])
    norms = None if batch.norms is None else batch.norms[which]
    return replace(batch, ids=batch.ids[which], values=batch.values[which], norms=norms, digests=None)
