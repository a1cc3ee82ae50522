"""A copy of a whole model that all ranks build from their deltas, whichever of them holds a row."""

from typing import Any

import torch
import torch.distributed as dist
from tests.integration.trainer.tracking.rows import Ids, Rows, differing, weights
from torchrec.distributed import DistributedModelParallel

from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode

NAME = "replica"


class Replica:
    """Follows a model by a tracker that verifies.

    Attributes:
        model: the one that is followed.
        tracker: the one.
    """

    def __init__(self, model: DistributedModelParallel, **options: Any) -> None:
        self.model = model
        self.tracker = Tracker(
            model,
            TrackerOptions(consumers=[NAME], mode=TrackingMode.EMBEDDING_LAST, **{"verify": True} | options),
        )
        self._rows = whole(model)

    def catch_up(self) -> Ids:
        """Take the deltas of all ranks; the ids that they had."""
        delta = self.tracker.get_delta(NAME)
        mine = [(batch.shard, batch.ids, batch.values) for batch in delta.rows]
        taken: Ids = {}
        for shard, ids, values in (part for parts in on_all_ranks(mine) for part in parts):
            rows = self._rows[shard.table.name]
            rows[ids, shard.col_offset : shard.col_offset + shard.cols] = torch.from_numpy(values)
            taken.setdefault(shard.table.name, set()).update(ids.tolist())
        self.tracker.acknowledge(delta)
        return taken

    @property
    def stale(self) -> Ids:
        """The rows of each table that differ from the model's."""
        now = whole(self.model)
        found = {name: differing(self._rows[name], rows) for name, rows in now.items() if name in self._rows}
        return {name: ids for name, ids in found.items() if ids}


def whole(model: DistributedModelParallel) -> Rows:
    """Every row of every table, from whichever rank has it."""
    tables: Rows = {}
    for held in on_all_ranks(weights(model)):
        for name, rows in held.items():
            known = tables.setdefault(name, rows.clone())
            tables[name] = torch.where(known.isnan(), rows, known)
    return {name: rows for name, rows in tables.items() if ".embedding" in name}


def on_all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
