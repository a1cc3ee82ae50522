"""What a release brings, by table."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deltasync.core.rows import RowBatch
from deltasync.core.stamps import StampedTable
from deltasync.feeds.frozen_release import FrozenRelease, Head, freeze
from deltasync.feeds.lack import Lack
from deltasync.feeds.repair import NO_REPAIR, Repair


def frozen_at(
    tables: Sequence[StampedTable],
    after: int,
    head: Head | None,
    scratch: Path,
    memory_bytes: int,
    repair: Repair = NO_REPAIR,
) -> FrozenRelease:
    """What a replica at `after` lacks: in a file if it takes more than `memory_bytes`."""
    lack = Lack.of(tables, after, repair)
    return freeze(lack, head, scratch if lack.nbytes > memory_bytes else None)


def live_rows(release: FrozenRelease) -> dict[int, RowBatch]:
    """The rows that are there, by slot."""
    return _by_slot(release, deleted=False)


def deleted_rows(release: FrozenRelease) -> dict[int, RowBatch]:
    """The rows that are no more, by slot."""
    return _by_slot(release, deleted=True)


def _by_slot(release: FrozenRelease, *, deleted: bool) -> dict[int, RowBatch]:
    found: dict[int, list[RowBatch]] = {}
    for chunk in release.chunks:
        if chunk.rows.deleted == deleted:
            found.setdefault(chunk.slot, []).append(chunk.rows)
    return {slot: _joined(batches) for slot, batches in found.items()}


def _joined(batches: list[RowBatch]) -> RowBatch:
    ids, values = (np.concatenate([getattr(each, name) for each in batches]) for name in ("ids", "values"))
    return RowBatch(batches[0].shard, ids, values, deleted=batches[0].deleted)
