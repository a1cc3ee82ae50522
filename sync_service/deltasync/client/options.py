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
    """The service and the model that a rank publishes to.

    Attributes:
        service: where the service answers gRPC; an address alone is HOST:PORT.
        model: name of the model.
        run: id shared by all ranks of this training run, and by no other run.
        run_started_unix_ns: when the run began, nanoseconds since 1970, the same on all ranks.
        rank: number of this process, from 0.
        world_size: number of ranks.
        continues: the last position whose rows this run holds, from its checkpoint.
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
    """The service and the consumer that a replica subscribes to.

    Attributes:
        service: where the service answers gRPC; an address alone is HOST:PORT.
        consumer: name of an existing consumer.
        replica: name of this process in the consumer's fleet; by default a unique one.
        held: the position of the target's rows if they outlived an earlier process.
        checkpoints: folder or URL of the service's checkpoints. A replica that holds nothing reads the newest one,
            and the service sends only later changes. It sends everything if no checkpoint can be used.
        max_outstanding_bytes: bound of the bytes under way to this replica. A target that takes parts writes four
            times as many of a large first copy at a time.
        guest: whether this replica only looks: it does not count for lag and state of its consumer, and the
            service forgets it when it disconnects.
        on_readiness: called with each change of `Subscriber.ready`, in a thread of its own, one call at a time. Of
            several changes during a call it gets the last one. Its errors are logged. It is not called in a forked
            process, which may share files or probes with its parent: ask `readiness` there.
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
