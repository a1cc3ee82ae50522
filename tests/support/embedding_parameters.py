"""Parameters of a plain module, tracked as if they were embedding tables: rows can be deleted without ranks."""

from dataclasses import replace
from typing import Any
from unittest import mock

from torch import nn

from deltasync.core.tables import Shard, TableKind
from deltasync.trainer.tracking import tracked_model
from deltasync.trainer.tracking.shards import TrackedTable, dense_tables


def embedding_parameters() -> Any:
    """While this context is entered, trackers that are made take parameters for embedding tables."""
    return mock.patch.object(tracked_model, "dense_tables", _embeddings)


def _embeddings(model: nn.Module) -> list[TrackedTable]:
    return [_embedding(table) for table in dense_tables(model)]


def _embedding(tracked: TrackedTable) -> TrackedTable:
    table = replace(tracked.table, kind=TableKind.EMBEDDING)
    return replace(
        tracked,
        table=table,
        shards=[replace(shard, shard=Shard.whole(table)) for shard in tracked.shards],
    )
