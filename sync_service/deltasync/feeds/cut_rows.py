"""The rows of a cut as they lie in memory, for replicas that have everything but them."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from deltasync.core.rows import RowBatch
from deltasync.core.tables import Shard
from deltasync.wire.row_messages import CHUNK_BYTES


def cut_rows(batches: Iterable[RowBatch], slots: Mapping[str, int]) -> list[tuple[int, RowBatch]] | None:
    """The rows of a cut, whole and each once, with the slots of their tables.

    Args:
        batches: the rows, by shard.
        slots: of the tables, by name.

    Returns:
        None where that takes a look at the tables: of some rows there are only some columns, or a row comes twice.
    """
    live: dict[str, list[RowBatch]] = {}
    deleted: dict[str, list[RowBatch]] = {}
    for batch in filter(len, batches):
        if batch.shard.cols < batch.table.dim:
            return None
        (deleted if batch.deleted else live).setdefault(batch.table.name, []).append(batch)
    for some in (live, deleted):
        for of_table in some.values():
            of_table.sort(key=lambda batch: int(batch.ids[0]))
    if not all(map(_disjoint, (*live.values(), *deleted.values()))):
        return None
    if any(_meet(live[name], deleted[name]) for name in live.keys() & deleted.keys()):
        return None
    every = (*live.items(), *deleted.items())
    return [(slots[name], _joined(some)) for name, of_table in every for some in _gathered(of_table)]


def _disjoint(batches: Sequence[RowBatch]) -> bool:
    return all(before.ids[-1] < after.ids[0] for before, after in pairwise(batches))


def _meet(some: Sequence[RowBatch], others: Sequence[RowBatch]) -> bool:
    """Whether a row is in both."""
    ids = np.sort(np.concatenate([batch.ids for batch in (*some, *others)]), kind="stable")
    return bool((ids[1:] == ids[:-1]).any())


def _gathered(batches: Sequence[RowBatch]) -> Iterable[list[RowBatch]]:
    """The batches of a table, small ones together: each message costs something, and there may be many ranks."""
    together: list[RowBatch] = []
    for batch in batches:
        if together and sum(each.nbytes for each in together) + batch.nbytes > CHUNK_BYTES:
            yield together
            together = []
        together.append(batch)
    if together:
        yield together


def _joined(batches: Sequence[RowBatch]) -> RowBatch:
    table, first = batches[0].table, batches[0]
    if len(batches) == 1:
        return RowBatch(Shard.whole(table), first.ids, first.values, deleted=first.deleted)
    ids = np.concatenate([batch.ids for batch in batches])
    if first.deleted:
        return RowBatch.deletes(Shard.whole(table), ids)
    return RowBatch.of_table(table, ids, np.concatenate([batch.values for batch in batches]))
