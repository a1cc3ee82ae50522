"""Copies of a model's tables that are built from the deltas of one consumer."""

import torch
from tests.integration.trainer.tracking.rows import Rows, weights
from tests.integration.trainer.tracking.rows import changed as changed_rows
from torchrec.distributed import DistributedModelParallel

from deltasync.trainer.tracking import Delta, Tracker, TrackerOptions, TrackingMode


def changed(model: DistributedModelParallel, before: Rows) -> dict[str, list[int]]:
    """Global ids of the rows that differ from what they were, by table."""
    return {fqn: sorted(ids) for fqn, ids in changed_rows(before, weights(model)).items() if ids}


def ids_of(delta: Delta) -> dict[str, list[int]]:
    return {fqn: ids.tolist() for fqn, ids in delta.ids.items()}


class Copy:
    """The tables of a receiver that begins without rows and gets the deltas of one consumer."""

    def __init__(self, model: DistributedModelParallel, tracker: Tracker, consumer: str | None = None) -> None:
        self._tracker, self._consumer = tracker, consumer
        self._tables = {fqn: torch.full_like(rows, float("nan")) for fqn, rows in weights(model).items()}
        tracker.resync(consumer)

    def update(self) -> dict[str, list[int]]:
        """Take what has changed, and say so; its ids."""
        delta = self._tracker.get_delta(self._consumer)
        self.take(delta)
        self._tracker.acknowledge(delta)
        return ids_of(delta)

    def take(self, delta: Delta) -> None:
        for batch in delta.rows:
            columns = slice(batch.shard.col_offset, batch.shard.col_offset + batch.shard.cols)
            self._tables[batch.table.name][batch.ids, columns] = torch.from_numpy(batch.values)

    def check(self, model: DistributedModelParallel) -> None:
        """Nothing of what this rank holds differs in a bit."""
        assert changed(model, self._tables) == {}


def followed(model: DistributedModelParallel) -> tuple[Tracker, Copy]:
    """A tracker, and a copy that has all there is now."""
    tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST))
    copy = Copy(model, tracker)
    copy.update()
    return tracker, copy
