"""What a release brings, by table."""

import numpy as np

from deltasync.core.rows import RowBatch
from deltasync.feeds.frozen_release import FrozenRelease


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
