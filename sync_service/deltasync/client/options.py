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
        service: the gRPC endpoint of the service, or its address HOST:PORT.
        model: name of the model.
        run: unique id of this training run, the same on all ranks.
        run_started_unix_ns: start of the run, nanoseconds since 1970, the same on all ranks.
        rank: number of this process, from 0.
        world_size: number of ranks.
        continues: the position of this run's rows, from the checkpoint that it loaded.
        takes_deletes: whether this rank deletes rows on request (`Publisher.deletes`).
        start_over: whether the rows of this run are good although `continues` is not set. After a rollback the
            service admits no other run that does not continue from its version or an earlier one.
    """

    service: Endpoint | str
    model: str
    run: str
    run_started_unix_ns: int
    rank: int = 0
    world_size: int = 1
    continues: Position = field(default_factory=Position)
    takes_deletes: bool = False
    start_over: bool = False

    def __post_init__(self) -> None:
        check_type("PublisherOptions(...)", "continues", self.continues, Position)
        Endpoint.of_grpc(self.service)
        check_name("model", self.model)
        if self.world_size < 1:
            raise InvalidInput(f"world_size {self.world_size}: expected 1 or more")
        if not 0 <= self.rank < self.world_size:
            raise InvalidInput(f"rank {self.rank}: expected 0 to {self.world_size - 1}, below world_size")


@dataclass(frozen=True, kw_only=True)
class SubscriberOptions:
    """The service and the consumer that a replica subscribes to.

    Attributes:
        service: the gRPC endpoint of the service, or its address HOST:PORT.
        consumer: name of an existing consumer.
        replica: name of this process in the consumer's fleet; by default a unique one.
        held: the position of rows that are in the target already, from an earlier process.
        checkpoints: folder or URL of the service's checkpoints. An empty replica reads the newest one, and the
            service sends only later changes. Without a usable checkpoint it sends everything.
        max_outstanding_bytes: limit of the bytes in flight to this replica. A target that supports parts receives
            a large first copy in parts of four times this size.
        guest: whether to leave this replica out of its consumer's lag and state. The service forgets a guest when
            it disconnects.
        on_readiness: called in one separate thread after each change of `Subscriber.ready`. Its errors are logged.
            A forked process may share files or probes with its parent, so it gets no calls: read `readiness`.
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
            raise InvalidInput(f"max_outstanding_bytes {self.max_outstanding_bytes}: expected at least 1")
