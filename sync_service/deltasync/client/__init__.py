"""What trainers and predictors import.

    from deltasync.client import NumpyTarget, Publisher, Subscriber

The torch target is in `deltasync.client.torch_target`, so that nothing else needs torch.
"""

from deltasync.client.admin import Admin
from deltasync.client.options import PublisherOptions, SubscriberOptions
from deltasync.client.publisher import Part, Publisher
from deltasync.client.subscriber import Subscriber
from deltasync.client.targets import (
    CallbackTarget,
    NumpyTarget,
    ReadableTarget,
    Release,
    ReleasedRows,
    Target,
)
from deltasync.core.mode import Mode
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.rows import RowBatch
from deltasync.core.tables import Shard, TableSpec
from deltasync.core.value_types import ValueType

__all__ = [
    "Admin",
    "CallbackTarget",
    "Mode",
    "NumpyTarget",
    "Part",
    "Policy",
    "Position",
    "Publisher",
    "PublisherOptions",
    "ReadableTarget",
    "Release",
    "ReleasedRows",
    "RowBatch",
    "Shard",
    "Subscriber",
    "SubscriberOptions",
    "TableSpec",
    "Target",
    "ValueType",
]
