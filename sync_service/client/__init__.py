"""What trainers and predictors import.

    from sync_service.client import NumpyTarget, Publisher, Subscriber

The torch target is in `sync_service.client.torch_target`, so that nothing else needs torch.
"""

from sync_service.client.admin import Admin
from sync_service.client.options import PublisherOptions, SubscriberOptions
from sync_service.client.publisher import Part, Publisher, ShardRows
from sync_service.client.subscriber import Subscriber
from sync_service.client.targets import (
    CallbackTarget,
    NumpyTarget,
    ReadableTarget,
    Release,
    ReleasedRows,
    Target,
)
from sync_service.consumers.policy import Policy
from sync_service.given import Mode
from sync_service.tables import Position, Shard, Table
from sync_service.value_types import ValueType

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
    "Shard",
    "ShardRows",
    "Subscriber",
    "SubscriberOptions",
    "Table",
    "Target",
    "ValueType",
]
