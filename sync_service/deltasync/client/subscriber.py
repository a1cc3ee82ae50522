"""A replica: receives releases, writes them into a target, and acknowledges them."""

import logging
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import grpc

from deltasync.base.arguments import check_name, check_type
from deltasync.base.decision import Decision
from deltasync.base.errors import (
    DeltasyncError,
    InvalidInput,
    NotFound,
    NotPermitted,
    ServiceFailed,
    ServiceUnavailable,
)
from deltasync.base.process import give_back_memory
from deltasync.base.words import listed, printable
from deltasync.client.assembler import ReleaseAssembler
from deltasync.client.checkpoint_start import CheckpointStart, read_start
from deltasync.client.connection import Connection, Connectivity, ForkGuard, LiveStream, Tuning, check_process
from deltasync.client.endpoint import Endpoint, Route
from deltasync.client.readiness import Readiness, newest_ns
from deltasync.client.targets.checksums import TargetChecksums
from deltasync.client.targets.local import LocalTarget
from deltasync.client.targets.target import (
    GradualTarget,
    PartialTarget,
    ReadableTarget,
    Release,
    Target,
    Written,
    check_target,
)
from deltasync.core.position import Position, reaches
from deltasync.core.tables import TableSpec
from deltasync.v1 import subscribe_pb2, subscribe_pb2_grpc, tables_pb2
from deltasync.wire.errors import is_final, of_connection
from deltasync.wire.messages import (
    checksums_to_message,
    event_time_from_message,
    position_from_message,
    position_to_message,
)
from deltasync.wire.row_messages import ReceivedRows, SubscribeResponse, read_response

logger = logging.getLogger(__name__)

_Requests: TypeAlias = "queue.SimpleQueue[subscribe_pb2.SubscribeRequest | None]"
_Message: TypeAlias = subscribe_pb2.ReleaseEnd | subscribe_pb2.Progress
# How long `close` waits until the service has received the last ack or the goodbye.
_GOODBYE_SECONDS = 2.0
_SUBSCRIBE = f"/{subscribe_pb2.DESCRIPTOR.services_by_name['SubscribeService'].full_name}/Subscribe"
# After a larger first copy, freed memory is returned to the system.
_LARGE_BYTES = 64 << 20


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


class Subscriber:
    """Subscribes to a consumer and applies its releases to a target. Reconnects by itself.

    Attributes:
        held: the target's position. If the consumer has a policy, it is the position of a release.
        version: the position in the model's history from which that release was made. With a policy, later
            releases may still bring older changes.
        event_time_unix_ns: the time of the newest event that the model had been trained on at `version`,
            nanoseconds since 1970; None if the trainer does not report it, and before the first release.
    """

    def __init__(self, options: SubscriberOptions, target: Target, *, tuning: Tuning | None = None) -> None:
        """Start the subscriber's thread. Only tests pass `tuning`.

        Raises:
            TypeError: an argument has another type, such as a torch module without a `TorchTarget`.
        """
        check_type("Subscriber(options, target)", "options", options, SubscriberOptions)
        check_target("Subscriber(options, target)", target)
        check_process()  # Here, because the thread would retry after this error.
        self._options, self._tuning = options, tuning or Tuning()
        self._fork_guard = ForkGuard(f"replica {options.replica!r}")
        self._route = Route(Endpoint.of_grpc(options.service))
        self._target = target
        self.held = options.held
        self.version = options.held
        if options.held.number and isinstance(target, LocalTarget):
            target.begin_at(options.held)
        self._told_version = Position()  # With its seal. `options.held` may be a release's position instead.
        self.event_time_unix_ns: int | None = None
        self._instance = uuid.uuid4().hex
        self._checksums: TargetChecksums | None = None
        if isinstance(target, ReadableTarget):
            self._checksums = TargetChecksums(target, self._tuning.read_rows, sweeps=self._tuning.sweeps)
        self._applied: list[TableSpec] = []  # The tables of the last release.
        self._start: CheckpointStart | None = None  # The checkpoint to merge with the first release.
        self._bound = set[str]()  # All tables that the target has ever had.
        # Of the current stream.
        self._opened_ns = 0
        self._requests: _Requests = queue.SimpleQueue()
        self._assembler = ReleaseAssembler(options.max_outstanding_bytes)
        self._moved = threading.Condition()
        self._failure: Exception | None = None
        self._trouble: Exception | None = None
        self._closing = threading.Event()
        self._call: Any = None  # gRPC has no types.
        self._gives_back = False  # Whether to return freed memory after the current release.
        self._let_in = False  # Whether the service has accepted this replica on the current stream.
        self._known = False  # Whether the service knows this replica and has had no goodbye.
        self._connectivity = Connectivity(
            f"replica {options.replica!r} of consumer {options.consumer!r}", self._tuning.clock
        )
        self._readiness = Readiness(options.replica, options.on_readiness, self._tuning.clock)
        self._thread = threading.Thread(target=self._run, name="deltasync-subscriber", daemon=True)
        self._thread.start()

    @property
    def connection(self) -> Connection:
        """The state of the connection."""
        return self._connectivity.forked(left) if (left := self._fork_guard.left) else self._connectivity.now

    @property
    def ready(self) -> bool:
        """Whether the target's rows are new enough to serve: see `readiness`."""
        return self.readiness.yes

    @property
    def readiness(self) -> Decision:
        """Whether the replica is ready, and the reason.

        With a limit (`Policy.ready_within_seconds`), it is ready while its rows were the newest at most that long
        ago. Without a limit, it is ready after it has caught up once. It is never ready while rows differ from the
        service's, after the subscriber has stopped, or in a forked process.
        """
        return Decision(False, left) if (left := self._fork_guard.left) else self._readiness.decision

    def wait_until_ready(self, timeout_seconds: float | None = None) -> None:
        """Wait until the replica is ready.

        Args:
            timeout_seconds: timeout; None = no limit.

        Raises:
            TimeoutError: the replica is still not ready; the message has the reason.
            DeltasyncError: the subscriber has stopped for good.
        """
        self.check()
        decision = self._readiness.wait(timeout_seconds)
        if not decision.yes:
            self.check()
            raise TimeoutError(f"replica {self._options.replica!r} is not ready: {decision.reason}")

    def wait_for(self, wanted: Position | int, timeout_seconds: float | None = None) -> Position:
        """Wait until the target has a version of the model, or a later one.

        Args:
            wanted: a version, a position from a publisher, or the position of a release.
            timeout_seconds: timeout; None = no limit.

        Returns:
            The target's position.

        Raises:
            TimeoutError: the target is still at an earlier version.
            DeltasyncError: the subscriber has stopped for good.
        """
        self.check()
        with self._moved:
            self._moved.wait_for(
                lambda: self._failure or self._closing.is_set() or self._reached(wanted), timeout_seconds
            )
        self.check()
        if not self._reached(wanted):
            trouble = f"last error: {self._trouble}" if self._trouble else "its consumer's lag may show the reason"
            replica = f"replica {self._options.replica!r}"
            raise TimeoutError(f"{replica} is at version {self.version.number}, not {wanted}; {trouble}")
        return self.held

    def check(self) -> None:
        """Raise the error that has stopped the subscriber, if any. Also raises in a forked process."""
        self._fork_guard.check()
        if self._failure:
            raise self._failure

    def close(self) -> None:
        """Stop: drop an incomplete release, acknowledge applied ones, and sign off from the service.

        The service forgets the replica, which then no longer counts for lag. A new subscriber with the same
        name can continue from the target's position. If the service cannot be reached within 2 seconds, it
        counts the replica as disconnected. Does nothing in a forked process; the parent's replica continues.
        """
        if self._fork_guard.left:
            return
        self._closing.set()
        ends = time.monotonic() + _GOODBYE_SECONDS
        self._readiness.end("its subscriber was closed")
        self._hang_up()
        self._thread.join(_GOODBYE_SECONDS)
        if call := self._call:
            call.cancel()
        self._thread.join()
        if self._known:
            self._known = False
            self._leave(max(ends - time.monotonic(), 0.01))
        self._connectivity.note_lost(ServiceUnavailable("the subscriber is closed"))
        with self._moved:
            self._moved.notify_all()
        self._readiness.close()

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The subscriber's thread.

    def _run(self) -> None:
        try:
            if self._options.checkpoints and not self.held.number:
                self._start = read_start(self._options.checkpoints, self._options.consumer)
            self._follow()
        except Exception as error:  # noqa: BLE001  # `check` and `wait_for` raise it.
            logger.error("replica %s has stopped: %s", self._options.replica, error)
            self._connectivity.note_failed(error, None)
            with self._moved:
                self._failure = error
                self._moved.notify_all()
            self._readiness.end(f"its subscriber has stopped: {error}")

    def _follow(self) -> None:
        pauses = self._tuning.pauses()
        while not self._closing.is_set():
            before = self.held
            try:
                self._subscribe()
            except grpc.RpcError as failure:
                error = self._route.endpoint.error_of(failure)
                if self._stops(error, failure) and not self._closing.is_set():
                    raise error from failure
            except ServiceUnavailable as unusable:  # The endpoint's files or the received data are unusable.
                error = unusable
            else:
                error = ServiceUnavailable("the service ended the stream")
                self._known &= not self._closing.is_set()  # After `close` the stream's end confirms the goodbye.
            if self.held != before:
                self._route.answered()
                pauses = self._tuning.pauses()
            pause = 0.0 if self._route.turn(error) else self._route.pause(next(pauses))
            if not self._closing.is_set():
                self._trouble = error
                self._readiness.note(lacking=f"it reconnects: {error}")
                self._connectivity.note_failed(error, pause)
            self._closing.wait(pause)

    def _stops(self, error: DeltasyncError, failure: grpc.RpcError) -> bool:
        """Whether to stop after a failed stream: only if the service itself has refused this replica.

        A network error or an unexpected error of the service may not occur again. A replica that was accepted
        once keeps trying, because an operator may renew tokens, repair roles, or create a lost consumer again.
        If the service no longer finds the consumer of an open stream, the consumer was deleted.
        """
        if of_connection(failure) or isinstance(error, ServiceFailed):
            return False
        if isinstance(error, NotFound) and self._let_in:
            return True
        followed = self.connection.connections or self.held.number
        return is_final(error) and not (followed and isinstance(error, NotPermitted | NotFound))

    def _subscribe(self) -> None:
        options = self._options
        message = subscribe_pb2.SubscribeOpen(
            consumer=options.consumer,
            replica=options.replica,
            held=position_to_message(self._start.release.position if self._start else self.held),
            version=position_to_message(self._told_version) if self._told_version.number else None,
            max_outstanding_bytes=options.max_outstanding_bytes,
            instance=self._instance,
            guest=options.guest,
        )
        requests: _Requests = queue.SimpleQueue()
        requests.put(subscribe_pb2.SubscribeRequest(open=message))
        self._requests = requests  # From here on `close` can send a goodbye.
        self._opened_ns, self._let_in = self._tuning.clock(), False
        endpoint = self._route.endpoint
        with endpoint.channel() as channel:
            subscribe: Any = channel.stream_stream(
                _SUBSCRIBE,
                request_serializer=subscribe_pb2.SubscribeRequest.SerializeToString,
                response_deserializer=read_response,
            )
            self._call = subscribe(iter(requests.get, None))
            if self._closing.is_set():
                self._hang_up()
            alive = subscribe_pb2.SubscribeRequest(alive=tables_pb2.Alive())
            responses: LiveStream[SubscribeResponse] = LiveStream(
                self._call, str(endpoint), endpoint.timeout_seconds, requests, alive
            )
            try:
                for response in responses:
                    self._take(response)
                    del response  # Nothing else refers to the release any more.
                    if self._gives_back:
                        self._gives_back = False
                        give_back_memory()
            except Exception as error:
                # The service knows about an RpcError. After ServiceUnavailable, this replica reconnects.
                if not isinstance(error, grpc.RpcError | ServiceUnavailable):
                    stopped = printable(f"{type(error).__name__}: {error}")
                    requests.put(subscribe_pb2.SubscribeRequest(ack=subscribe_pb2.Ack(stopped=stopped)))
                    requests.put(None)
                    ended = threading.Event()
                    self._call.add_done_callback(lambda _: ended.set())
                    ended.wait(_GOODBYE_SECONDS)  # Until the service has read it.
                raise
            finally:
                requests.put(None)
                self._call.cancel()
                responses.close()
                self._assembler = ReleaseAssembler(options.max_outstanding_bytes)  # Empty for the next stream.

    def _hang_up(self) -> None:
        """Send a goodbye and end the requests."""
        self._requests.put(subscribe_pb2.SubscribeRequest(ack=subscribe_pb2.Ack(goodbye=True)))
        self._requests.put(None)

    def _leave(self, seconds: float) -> None:
        """Sign off from the service without a stream, with one attempt of at most `seconds`."""
        name, consumer = self._options.replica, self._options.consumer
        replica = subscribe_pb2.LeaveRequest(consumer=consumer, replica=name, instance=self._instance)
        with replace(self._route.endpoint, timeout_seconds=seconds).channel() as channel:
            try:
                subscribe_pb2_grpc.SubscribeServiceStub(channel).Leave(replica)
            except grpc.RpcError as error:
                text = "replica %s of consumer %s could not sign off and counts as disconnected: %s"
                logger.info(text, name, consumer, error.details())

    def _take(self, response: SubscribeResponse) -> None:
        self._connectivity.note_connected()
        if isinstance(response, ReceivedRows):
            self._take_rows(response)
        elif response.HasField("opened"):
            self._known = self._let_in = True
            if self._checksums:
                self._checksums.forget_question()
            # An empty target may get a first copy in parts, so that its rows are not in memory twice.
            takes_parts = isinstance(self._target, GradualTarget) and self._target.takes_parts
            in_parts = takes_parts and not (self.held.number or self._start)
            with _arriving():
                self._assembler.begin(response.opened, in_parts=in_parts)
            self._readiness.note(
                limit_ns=int(response.opened.ready_within_seconds * 1e9) or None,
                lacking="it has not applied a release yet",
            )
        elif response.HasField("progress"):
            self._go_on(response.progress)
            if response.progress.read_again:
                self._read_again(response.progress)
        elif response.HasField("release_end"):
            self._end_release(response.release_end)

    def _take_rows(self, received: ReceivedRows[subscribe_pb2.ReleaseEnd]) -> None:
        due = False
        with _arriving():
            for slot, columns in received.rows:
                due = self._assembler.add(slot, columns)
            part = None if received.end else self._assembler.part()
        if received.end:  # The ack returns all credit.
            self._end_release(received.end)
        elif due:
            self._ack(None)
        if part:  # No reader sees a partial first copy. If the stream breaks, the next one starts it over.
            if not part.continues:
                logger.info("writing a first copy as it arrives; the target cannot be read until it is complete")
            written = self._target.apply(part)
            if self._checksums and self._assembler.has_values:
                self._checksums.after(part, written)

    def _go_on(self, progress: subscribe_pb2.Progress) -> None:
        """Advance to a version that changes no rows of this replica."""
        head = position_from_message(progress.head)
        if head.number == 0:
            self._readiness.note(
                lacking="the service has no rows for its consumer yet; see its lag for the reason"
            )
        if self._start and head == self._start.release.position:
            start, self._start = self._start, None
            self._apply(start.alone(self._assembler.tables, progress.version), progress)
        elif head == self.held:
            self._advance(self.held, progress)
            self._look_again()

    def _end_release(self, end: subscribe_pb2.ReleaseEnd) -> None:
        with _arriving():
            release = self._assembler.end(end, self._applied)
        start, self._start = self._start, None
        self._apply(start.completed(release) if start else release, end)

    def _apply(self, release: Release, message: _Message) -> None:
        """Write a release into the target and acknowledge it. `message` has its version."""
        checksums = dict[str, int]()
        new = release.position != self.held or release.position.seal != self.held.seal
        written: Written | None = None
        if new or release.changes or release.tables != self._applied:
            written = self._target.apply(release)
            self._applied = release.tables
            # Later releases need far less memory than a first copy.
            large = release.continues or sum(each.nbytes for each in release.rows) > _LARGE_BYTES
            self._gives_back |= release.resync and large
        if self._checksums and self._assembler.has_values:
            checksums = self._checksums.after(release, written)
        self._ack(release.position, checksums)
        # After the ack: a thread that waits for the version may close the subscriber at once.
        if not self._differs(checksums):
            self._advance(release.position, message, reset=release.resync)
        elif release.resync:  # The release that repairs the rows will not be a resync.
            self._readiness.holds(None, reset=True)

    def _look_again(self) -> None:
        """Verify a block of the target's rows while there is no new release, and send the checksums."""
        tables = self._assembler.tables
        if self._checksums and self._assembler.has_values and self._applied and tables == self._applied:
            checksums = self._checksums.look()
            self._ack(self.held, checksums)
            self._differs(checksums)
        else:
            self._ack(None)

    def _read_again(self, progress: subscribe_pb2.Progress) -> None:
        """Continue to verify all of the target's rows for a while, and send the checksums."""
        reads = self._checksums if self._assembler.has_values else None
        left = reads.read_again(progress.read_again, self._tuning.read_seconds) if reads else 0
        # If rows differ, the ack has no position, only checksums.
        held = self.held if self.held == position_from_message(progress.head) else None
        self._ack(held, reads.by_table if reads else {}, read_again=progress.read_again, rows_left=left)

    def _ack(
        self,
        applied: Position | None,
        checksums: Mapping[str, int] | None = None,
        *,
        read_again: int = 0,
        rows_left: int = 0,
    ) -> None:
        """Return credit for received bytes; send the target's position, if any, and its tables' checksums."""
        target = self._target
        ack = subscribe_pb2.Ack(
            received_bytes=self._assembler.received_bytes,
            applied=position_to_message(applied) if applied else None,
            sums=checksums_to_message(self._assembler.by_slot(checksums or {})),
            token=self._tuning.clock(),
            unbound=self._assembler.unbound(target.bound()) if isinstance(target, PartialTarget) else [],
            read_again=read_again,
            rows_left=rows_left,
        )
        self._requests.put(subscribe_pb2.SubscribeRequest(ack=ack))

    def _differs(self, checksums: Mapping[str, int]) -> bool:
        """Whether the target's rows differ from the service's."""
        wrong = self._assembler.wrong(checksums)
        self._readiness.note(wrong=tuple(wrong))
        if wrong:
            text = "replica %s has rows that differ from those sent in %s; the service sends them again"
            logger.error(text, self._options.replica, listed(wrong))
        return bool(wrong)

    def _advance(self, position: Position, message: _Message, *, reset: bool = False) -> None:
        """Move to a position, with the version and age that a message reports.

        Position and readiness change together: a thread that waits for one finds the other.
        """
        with self._moved:
            self.held, self._trouble = position, None
            version = Position(self._assembler.model_history, message.version, message.version_seal)
            self.version = self._told_version = version
            self.event_time_unix_ns = event_time_from_message(message)
            if position.number:
                self._show(message, reset=reset)
            self._moved.notify_all()

    def _show(self, message: _Message, *, reset: bool) -> None:
        """Record when the target's version was last the newest, unless it no longer updates some tables."""
        unbound = set[str]()
        if isinstance(self._target, PartialTarget):
            bound = self._target.bound()
            self._bound |= bound
            unbound = self._bound.intersection(table.name for table in self._assembler.tables) - bound
        if unbound:
            self._readiness.note(lacking=f"its target no longer updates {listed(unbound)}")
        else:
            newest = newest_ns(message.token, message.behind_ns, self._opened_ns)
            self._readiness.holds(newest, reset=reset)

    def _reached(self, wanted: Position | int) -> bool:
        if isinstance(wanted, int):
            return self.version.number >= wanted
        return any(reaches(at, wanted) for at in (self.held, self.version))


@contextmanager
def _arriving() -> Iterator[None]:
    """Turn errors of received data into ServiceUnavailable, after which the replica reconnects."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise ServiceUnavailable(f"the stream is damaged, the replica reconnects: {error}") from error
