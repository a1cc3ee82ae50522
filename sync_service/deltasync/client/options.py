"""Options of the client library."""

import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from deltasync.base.arguments import check_name, check_type
from deltasync.base.decision import Decision
from deltasync.base.errors import InvalidInput
from deltasync.client.endpoint import Endpoint
from deltasync.core.position import Position


@dataclass(frozen=True, kw_only=True)
class PublisherOptions:
    """Which service a rank publishes to, and as what.

    Attributes:
        service: where the service answers gRPC; an address alone is HOST:PORT.
        model: name of the set of tables.
        run: id shared by all ranks of this training run, and by no other run.
        run_started_unix_ns: when the run began, nanoseconds since 1970, the same on all ranks.
        rank: this process's number, from 0.
        world_size: number of ranks.
        continues: the last position whose rows this run is known to hold, from its checkpoint.
        takes_deletes: whether this rank meets requests to delete rows (`Publisher.deletes`).
    """

    service: Endpoint | str
    model: str
    run: str
    run_started_unix_ns: int
    rank: int = 0
    world_size: int = 1
    continues: Position = field(default_factory=Position)
    takes_deletes: bool = False

    def __post_init__(self) -> None:
        check_type("PublisherOptions(...)", "continues", self.continues, Position)
        Endpoint.of_grpc(self.service)
        check_name("model", self.model)
        if not 0 <= self.rank < self.world_size:
            raise InvalidInput(f"rank {self.rank} of a world of {self.world_size}: ranks count from 0")


@dataclass(frozen=True, kw_only=True)
class SubscriberOptions:
    """Which service a replica subscribes to, and as what.

    Attributes:
        service: where the service answers gRPC; an address alone is HOST:PORT.
        consumer: name of an existing consumer.
        replica: name of this process inside the consumer's fleet; by default one of its own.
        held: the position the target's rows are at, where they outlived the process.
        checkpoints: folder or URL of the service's checkpoints. A replica that holds nothing reads the newest, and
            the service sends only what has changed since. Where none can be used it sends everything.
        max_outstanding_bytes: bound of the bytes under way to this replica. Of a large first copy four times as
            many are written at a time, where the target takes parts.
        guest: whether this replica is only there to look at something: no lag and no state of its consumer counts
            it, and the service forgets it as soon as it is away, however it has ended.
        on_readiness: called with each change of `Subscriber.ready`, from a thread for that alone, one call at a
            time. Of changes during a call only the last is told; what it raises is logged. Never in a process that
            was forked since, which may share files or probes with its parent: ask `readiness` there.
    """

    service: Endpoint | str
    consumer: str
    replica: str = field(default_factory=lambda: f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}")
    held: Position = field(default_factory=Position)
    checkpoints: str = ""
    max_outstanding_bytes: int = 16 << 20
    guest: bool = False
    on_readiness: Callable[[Decision], None] | None = None

    def __post_init__(self) -> None:
        check_type("SubscriberOptions(...)", "held", self.held, Position)
        Endpoint.of_grpc(self.service)
        check_name("consumer", self.consumer)
        check_name("replica", self.replica)
        if self.max_outstanding_bytes < 1:
            raise InvalidInput(f"max_outstanding_bytes: {self.max_outstanding_bytes}, expected at least 1")
