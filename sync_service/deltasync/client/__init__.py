"""The public interface for trainers and predictors.

    from deltasync.client import NumpyTarget, Publisher, Subscriber

Public names are everything in `__all__`, and in `deltasync.client.targets`:

- with torch: `torch_target.TorchTarget` and `torch_compiled.CompiledModule`
- with redis: `redis_target.RedisTarget` and `redis_target.RedisRows`

Everything else in this package and in the service's other packages is internal.
"""

import os

# Set this before gRPC is imported. Under load, gRPC's fork handlers damage open streams of the parent within
# seconds (grpc/grpc#18075, #31885). Without the handlers a fork leaves the streams alone; see `connection`.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from deltasync.base.decision import Decision
from deltasync.base.errors import (
    Contradiction,
    Damaged,
    DeltasyncError,
    InvalidInput,
    NotFound,
    NotPermitted,
    ResyncRequired,
    RunRefused,
    ServiceFailed,
    ServiceUnavailable,
    StorageFailed,
    Superseded,
)
from deltasync.client.admin import Admin
from deltasync.client.connection import Connection
from deltasync.client.endpoint import Endpoint
from deltasync.client.publisher import Part, Publisher, PublisherOptions
from deltasync.client.shared.reader import SharedReader, SharedReading
from deltasync.client.shared.target import SharedTarget
from deltasync.client.subscriber import Subscriber, SubscriberOptions
from deltasync.client.targets.keyed_table import KeyedRows
from deltasync.client.targets.keyed_target import KeyedReading, KeyedTarget
from deltasync.client.targets.numpy_target import NumpyTarget, TableReading
from deltasync.client.targets.target import (
    CallbackTarget,
    PartialTarget,
    ReadableTarget,
    Reading,
    Release,
    Target,
    TornTarget,
    Written,
)
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.rows import RowBatch
from deltasync.core.table_form import Mode
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.core.value_types import ValueType

__all__ = [
    "Admin",
    "CallbackTarget",
    "Connection",
    "Contradiction",
    "Damaged",
    "Decision",
    "DeltasyncError",
    "Endpoint",
    "InvalidInput",
    "KeyedReading",
    "KeyedRows",
    "KeyedTarget",
    "Mode",
    "NotFound",
    "NotPermitted",
    "NumpyTarget",
    "Part",
    "PartialTarget",
    "Policy",
    "Position",
    "Publisher",
    "PublisherOptions",
    "ReadableTarget",
    "Reading",
    "Release",
    "ResyncRequired",
    "RowBatch",
    "RunRefused",
    "ServiceFailed",
    "ServiceUnavailable",
    "Shard",
    "SharedReader",
    "SharedReading",
    "SharedTarget",
    "StorageFailed",
    "Subscriber",
    "SubscriberOptions",
    "Superseded",
    "TableKind",
    "TableReading",
    "TableSpec",
    "Target",
    "TornTarget",
    "ValueType",
    "Written",
]
