"""Parameters of a plain module, tracked as if they were embedding tables: rows can be deleted without ranks."""

from dataclasses import replace
from typing import Any
from unittest import mock

from deltasync.core.tables import Shard, TableKind
from deltasync.trainer.tracking import tracked_model
from deltasync.trainer.tracking.module_tensors import ModuleTensor
from deltasync.trainer.tracking.shards import TrackedTable, dense_table


def embedding_parameters() -> Any:
    """While this context is entered, trackers that are made take parameters for embedding tables."""
    return mock.patch.object(tracked_model, "dense_table", _embedding)


def _embedding(tensor: ModuleTensor) -> TrackedTable:
    tracked = dense_table(tensor)
    table = replace(tracked.table, kind=TableKind.EMBEDDING, sizes=None)
    return replace(
        tracked, table=table, shards=[replace(shard, shard=Shard.whole(table)) for shard in tracked.shards]
    )
