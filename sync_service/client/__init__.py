"""What trainers and predictors import.

    from sync_service.client import NumpyTarget, Publisher, Subscriber

The torch target is in `sync_service.client.torch_target`, so that nothing else needs torch.
"""

from sync_service.client.options import PublisherOptions, SubscriberOptions
from sync_service.client.publisher import Part, Publisher, ShardRows
from sync_service.client.subscriber import Subscriber
from sync_service.client.targets import CallbackTarget, NumpyTarget, Release, ReleasedRows, Target
from sync_service.tables import Position, Shard, Table

__all__ = [
    "CallbackTarget",
    "NumpyTarget",
    "Part",
    "Position",
    "Publisher",
    "PublisherOptions",
    "Release",
    "ReleasedRows",
    "Shard",
    "ShardRows",
    "Subscriber",
    "SubscriberOptions",
    "Table",
    "Target",
]
