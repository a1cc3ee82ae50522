"""A replica: receives releases, writes them into a target, and acknowledges what it holds."""

import logging
import queue
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import grpc

from deltasync.base.arguments import check_type
from deltasync.base.clock import steady_ns
from deltasync.base.decision import Decision
from deltasync.base.errors import DeltasyncError, NotFound, NotPermitted, ServiceFailed, ServiceUnavailable
from deltasync.base.process import give_back_memory
from deltasync.base.waiting import backoff
from deltasync.base.words import listed, printable
from deltasync.client.assembler import ReleaseAssembler
from deltasync.client.checkpoint_start import CheckpointStart, read_start
from deltasync.client.connection import Connection, Connectivity, Home, check_process
from deltasync.client.endpoint import Endpoint, Route
from deltasync.client.options import SubscriberOptions
from deltasync.client.readiness import Readiness, newest_ns
from deltasync.client.targets.checksums import TargetChecksums
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
from deltasync.v1 import subscribe_pb2, subscribe_pb2_grpc
from deltasync.wire.errors import is_final, of_connection
from deltasync.wire.messages import (
    checksums_to_message,
    event_time_from_message,
    position_from_message,
    position_to_message,
)

logger = logging.getLogger(__name__)

Requests: TypeAlias = "queue.SimpleQueue[subscribe_pb2.SubscribeRequest | None]"
_Responses: TypeAlias = "grpc._CallIterator[subscribe_pb2.SubscribeResponse]"
_Moment: TypeAlias = subscribe_pb2.ReleaseEnd | subscribe_pb2.Progress
# How long close() waits for the service to take the last ack, or the goodbye.
_GOODBYE_SECONDS = 2.0
# For how long at a time all rows are read again: releases that have come meanwhile are applied in between.
_READ_SECONDS = 0.1
# After a larger first copy, the memory that it took goes back to the system.
_LARGE_BYTES = 64 << 20


class Subscriber:
    """Subscribes to a consumer and applies its releases to a target; reconnects by itself.

    Attributes:
        held: the position the target is at: for a consumer with a policy, that of a release.
        version: the position, in the model's history, of what that was made of. With a policy, rows that have
            changed before may still be left for later releases.
        event_time_unix_ns: the time of the newest event that the model had been trained on at `version`,
            nanoseconds since 1970; None where the trainer does not say it, and before anything has come.
    """

    def __init__(self, options: SubscriberOptions, target: Target) -> None:
        """Start to follow a consumer in a thread.

        Raises:
            TypeError: other types, such as a module that is not in a `TorchTarget`.
        """
        check_type("Subscriber(options, target)", "options", options, SubscriberOptions)
        check_target("Subscriber(options, target)", target)
        check_process()  # At once, and not first in the thread, which would try again.
        self._options = options
        self._home = Home(f"replica {options.replica!r}")
        self._route = Route(Endpoint.of_grpc(options.service))
        self._target = target
        self.held = options.held
        self.version = options.held
        self._told_version = Position()  # With its seal; not what the options say, which may be a release's.
        self.event_time_unix_ns: int | None = None
        self._instance = uuid.uuid4().hex
        self._checksums = TargetChecksums(target) if isinstance(target, ReadableTarget) else None
        self._tables: set[str] = set()
        self._applied: list[TableSpec] = []  # Those of the last release.
        self._start: CheckpointStart | None = None  # What the first one goes on top of.
        self._bound = set[str]()  # All tables that the target has ever held.
        self._opened_ns = 0
        self._moved = threading.Condition()
        self._failure: Exception | None = None
        self._trouble: Exception | None = None
        self._closing = threading.Event()
        self._call: _Responses | None = None
        self._requests: Requests | None = None
        self._gives_back = False  # Freed memory, once a release is applied.
        self._let_in = False  # On the stream that there is.
        self._known = False  # To the service, which has not been told that this replica has ended.
        self._connectivity = Connectivity(f"replica {options.replica!r} of consumer {options.consumer!r}")
        self._readiness = Readiness(options.replica, options.on_readiness, steady_ns)
        self._thread = threading.Thread(target=self._run, name="deltasync-subscriber", daemon=True)
        self._thread.start()

    @property
    def connection(self) -> Connection:
        """Whether it is connected, since when, and what went wrong last."""
        return self._connectivity.forked(left) if (left := self._home.left) else self._connectivity.now

    @property
    def ready(self) -> bool:
        """Whether what the target holds is new enough to be served: see `readiness`."""
        return self.readiness.yes

    @property
    def readiness(self) -> Decision:
        """Whether the replica is ready, and why.

        It is while what it holds was the newest no longer ago than its consumer's limit. Without a limit it is
        once it has held the newest since this subscriber was made. It is not while it holds other rows than it
        was sent, nor after the subscriber has stopped, nor in a process that was forked since.
        """
        return Decision(False, left) if (left := self._home.left) else self._readiness.decision

    def wait_until_ready(self, timeout_seconds: float | None = None) -> None:
        """Wait until the replica is ready.

        Args:
            timeout_seconds: how long, at most; None = for ever.

        Raises:
            TimeoutError: it was not in time; the message says why.
            DeltasyncError: the subscriber has stopped for good.
        """
        self.check()
        decision = self._readiness.wait(timeout_seconds)
        if not decision.yes:
            self.check()
            raise TimeoutError(f"replica {self._options.replica!r} is not ready: {decision.reason}")

    def wait_for(self, wanted: Position | int, timeout_seconds: float | None = None) -> Position:
        """Wait until the target holds at least a version of the model, or one made of a later one.

        Args:
            wanted: a version, or a position: of the model's history, as publishers return it, or of a release.
            timeout_seconds: how long, at most; None = for ever.

        Returns:
            The position it holds.

        Raises:
            TimeoutError: it did not in time.
            DeltasyncError: the subscriber has stopped for good.
        """
        self.check()
        with self._moved:
            self._moved.wait_for(
                lambda: self._failure or self._closing.is_set() or self._reached(wanted), timeout_seconds
            )
        self.check()
        if not self._reached(wanted):
            trouble = f"last trouble: {self._trouble}" if self._trouble else "its consumer's lag may say why"
            replica = f"replica {self._options.replica!r}"
            raise TimeoutError(f"{replica} holds version {self.version.number}, not {wanted}; {trouble}")
        return self.held

    def check(self) -> None:
        """Raise what has stopped the subscriber, if anything has; in a process that was forked since, that it does
        not work there.
        """
        self._home.check()
        if self._failure:
            raise self._failure

    def close(self) -> None:
        """End the subscription; what is under way is dropped, what was applied is acknowledged.

        The service then forgets the replica: no lag counts it any more. One that comes back under its name goes on
        from what it holds. A service that cannot be told within 2 seconds counts it as away. In a process that
        was forked since, nothing is done: its parent's replica goes on.
        """
        if self._home.left:
            return
        self._closing.set()
        ends_ns = steady_ns() + int(_GOODBYE_SECONDS * 1e9)
        self._readiness.end("its subscriber was closed")
        if requests := self._requests:
            hang_up(requests)
        self._thread.join(_GOODBYE_SECONDS)
        if call := self._call:
            call.cancel()
        self._thread.join()
        if self._known:
            self._known = False
            say_goodbye(self._route.endpoint, self._leaving, (ends_ns - steady_ns()) / 1e9)
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
        except Exception as error:  # noqa: BLE001  # kept for check() and wait_for()
            logger.error("replica %s has stopped: %s", self._options.replica, error)
            self._connectivity.note_failed(error, None)
            with self._moved:
                self._failure = error
                self._moved.notify_all()
            self._readiness.end(f"its subscriber has stopped: {error}")

    def _follow(self) -> None:
        pauses = backoff()
        while not self._closing.is_set():
            before = self.held
            try:
                self._subscribe()
            except grpc.RpcError as failure:
                error = self._route.endpoint.error_of(failure)
                if self._stops(error, failure) and not self._closing.is_set():
                    raise error from failure
            except ServiceUnavailable as unusable:  # A file of the endpoint is, or what has arrived.
                error = unusable
            else:
                error = ServiceUnavailable("the service ended the stream")
                self._known &= not self._closing.is_set()  # Else it has been told that this was the last one.
            if self.held != before:
                self._route.answered()
                pauses = backoff()
            pause = 0.0 if self._route.turn(error) else self._route.pause(next(pauses))
            if not self._closing.is_set():
                self._trouble = error
                self._readiness.lacks(f"it reconnects: {error}")
                self._connectivity.note_failed(error, pause)
            self._closing.wait(pause)

    def _stops(self, error: DeltasyncError, failure: grpc.RpcError) -> bool:
        """Whether a failed stream is the last one: only if the service itself has refused this replica.

        An error that gRPC has found on the way may be gone with the next stream, and so may an unforeseen error
        of the service. A replica that was let in once goes on: tokens are renewed, roles mended, and consumers
        made again where a service has lost its data. A consumer that ends while it is followed was deleted.
        """
        if of_connection(failure) or isinstance(error, ServiceFailed):
            return False
        if isinstance(error, NotFound) and self._let_in:
            return True
        followed = self.connection.connections or self.held.number
        return is_final(error) and not (followed and isinstance(error, NotPermitted | NotFound))

    def _subscribe(self) -> None:
        requests: Requests = queue.SimpleQueue()
        requests.put(self._open())
        self._requests = requests  # Now: close() says goodbye after that.
        self._opened_ns, self._let_in = steady_ns(), False
        with self._route.endpoint.channel() as channel:
            self._call = subscribe_pb2_grpc.SubscribeServiceStub(channel).Subscribe(iter(requests.get, None))
            if self._closing.is_set():
                hang_up(requests)
            try:
                self._take(self._call, requests)
            except Exception as error:
                # The service knows of an RpcError; after a ServiceUnavailable this replica comes again.
                if not isinstance(error, grpc.RpcError | ServiceUnavailable):
                    say_why(requests, self._call, error, _GOODBYE_SECONDS)
                raise
            finally:
                requests.put(None)
                self._call.cancel()

    def _open(self) -> subscribe_pb2.SubscribeRequest:
        options = self._options
        message = subscribe_pb2.SubscribeOpen(
            consumer=options.consumer,
            replica=options.replica,
            held=position_to_message(self._start.position if self._start else self.held),
            version=position_to_message(self._told_version) if self._told_version.number else None,
            max_outstanding_bytes=options.max_outstanding_bytes,
            instance=self._instance,
            guest=options.guest,
        )
        return subscribe_pb2.SubscribeRequest(open=message)

    @property
    def _leaving(self) -> subscribe_pb2.LeaveRequest:
        options = self._options
        return subscribe_pb2.LeaveRequest(
            consumer=options.consumer, replica=options.replica, instance=self._instance
        )

    def _take(self, responses: _Responses, requests: Requests) -> None:
        assembler = ReleaseAssembler(self._options.max_outstanding_bytes, self._tables)
        for response in responses:
            self._connectivity.note_connected()
            kind = response.WhichOneof("message")
            if kind == "opened":
                self._known = self._let_in = True
                if self._checksums:
                    self._checksums.forget_question()
                in_parts = self._takes_parts
                with _arriving():
                    assembler.begin(response.opened, in_parts=in_parts)
                self._readiness.limit(response.opened.ready_within_seconds)
                self._readiness.lacks("it has yet to show that it holds what it is sent")
            elif kind == "chunk":
                with _arriving():
                    due, part = assembler.add(response.chunk.rows), assembler.part()
                if due:
                    return_credit(requests, assembler.received_bytes)
                if part:
                    self._put(assembler, part)
            elif kind == "release":
                with _arriving():
                    for rows in response.release.rows:
                        assembler.add(rows)  # All credit is returned with the ack.
                self._apply(assembler, response.release.end, requests)
            elif kind == "progress":
                self._go_on(assembler, response.progress, requests)
                if response.progress.read_again:
                    self._read_again(assembler, response.progress, requests)
            elif kind == "release_end":
                self._apply(assembler, response.release_end, requests)
            if self._gives_back:  # Here, where nothing holds the release any more.
                self._gives_back = False
                give_back_memory()

    def _go_on(self, assembler: ReleaseAssembler, progress: subscribe_pb2.Progress, requests: Requests) -> None:
        """Go on to the version that a message names while there is nothing to send."""
        head = position_from_message(progress.head)
        if head.number == 0:
            self._readiness.lacks("the service has no rows for its consumer yet, whose lag says why")
        if self._start and head == self._start.position:
            release = self._on_top(self._start.alone(assembler.tables, progress.version))
            self._tables.update(table.name for table in release.tables)
            self._take_over(assembler, release, progress, requests)
            return
        if head != self.held:
            return
        if head.number:
            self._show(assembler, progress)
        version = Position(assembler.model_history, progress.version, progress.version_seal)
        self._hold(self.held, version, event_time_from_message(progress))
        self._look_again(assembler, requests)

    def _apply(self, assembler: ReleaseAssembler, end: subscribe_pb2.ReleaseEnd, requests: Requests) -> None:
        with _arriving():
            release = assembler.end(end)
        if self._start:
            release = self._on_top(self._start.completed(release))
        self._take_over(assembler, release, end, requests)

    def _on_top(self, release: Release | None) -> Release:
        """A release that has the rows of the checkpoint it goes on top of, too."""
        self._start = None
        if release is None:
            raise ServiceUnavailable("it has begun with a checkpoint of other tables: it begins with nothing")
        return release

    @property
    def _takes_parts(self) -> bool:
        """Whether a first copy may be written as it arrives: nothing is held, and what comes is not held twice."""
        target = self._target
        return isinstance(target, GradualTarget) and target.takes_parts and not (self.held.number or self._start)

    def _put(self, assembler: ReleaseAssembler, part: Release) -> None:
        """Write a part of a first copy. Nobody reads it, and the next stream begins anew if this one breaks."""
        if not part.continues:
            logger.info("a first copy is written as it arrives: nothing can be read until it is whole")
        written = self._target.apply(part)
        if self._checksums and assembler.has_values:
            self._checksums.after(part, written)

    def _take_over(self, assembler: ReleaseAssembler, release: Release, end: _Moment, requests: Requests) -> None:
        checksums_of = self._checksums if assembler.has_values else None
        new = release.position != self.held or release.position.seal != self.held.seal
        written: Written | None = None
        if new or release.changes or release.tables != self._applied:
            written = self._target.apply(release)
            self._applied = release.tables
            # What follows a first copy needs far less.
            large = release.continues or sum(each.nbytes for each in release.rows) > _LARGE_BYTES
            self._gives_back |= release.resync and large
        checksums = checksums_of.after(release, written) if checksums_of else {}
        say(requests, self._ack(assembler, release.position, checksums))
        if self._differs(assembler, checksums):
            if release.resync:  # What repairs it will be none.
                self._readiness.holds(None, reset=True)
            return
        self._show(assembler, end, reset=release.resync)
        # After the ack is on its way: whoever waits for the version may close the subscription at once.
        version = Position(assembler.model_history, release.version, end.version_seal)
        self._hold(release.position, version, release.event_time_unix_ns)

    def _look_again(self, assembler: ReleaseAssembler, requests: Requests) -> None:
        """While nothing comes, read some more of what the target holds, and show what was found."""
        if self._checksums and assembler.has_values and self._applied and assembler.tables == self._applied:
            checksums = self._checksums.look()
            say(requests, self._ack(assembler, self.held, checksums))
            self._differs(assembler, checksums)
        else:
            return_credit(requests, assembler.received_bytes)

    def _read_again(
        self, assembler: ReleaseAssembler, progress: subscribe_pb2.Progress, requests: Requests
    ) -> None:
        """Read for a while all that the target holds, and show what was found so far."""
        reads = self._checksums if assembler.has_values else None
        left = reads.read_again(progress.read_again, _READ_SECONDS) if reads else 0
        # What differs is not held; it is shown all the same.
        held = self.held if self.held == position_from_message(progress.head) else None
        ack = self._ack(assembler, held, reads.by_table if reads else {})
        ack.read_again, ack.rows_left = progress.read_again, left
        say(requests, ack)

    def _ack(
        self, assembler: ReleaseAssembler, applied: Position | None, checksums: Mapping[str, int]
    ) -> subscribe_pb2.Ack:
        """An ack of what the target holds: a position, if any, and the checksum of each table it keeps."""
        target = self._target
        return subscribe_pb2.Ack(
            received_bytes=assembler.received_bytes,
            applied=position_to_message(applied) if applied else None,
            sums=checksums_to_message(assembler.by_slot(checksums)),
            token=steady_ns(),
            unbound=assembler.unbound(target.bound()) if isinstance(target, PartialTarget) else [],
        )

    def _differs(self, assembler: ReleaseAssembler, checksums: Mapping[str, int]) -> bool:
        """Whether the target holds other rows than it was sent."""
        wrong = assembler.wrong(checksums)
        self._readiness.differs(wrong)
        if wrong:
            text = "replica %s holds other rows than it was sent in %s, and will be sent them again"
            logger.error(text, self._options.replica, listed(wrong))
        return bool(wrong)

    def _show(self, assembler: ReleaseAssembler, message: _Moment, *, reset: bool = False) -> None:
        """Note since when what a message names, and the target holds, may not be the newest any more."""
        if unbound := self._unbound_by_now(assembler):
            # What the target goes on to hold of them gets older.
            self._readiness.lacks(f"its target can follow no more: {listed(unbound)}")
        else:
            newest = newest_ns(message.token, message.behind_ns, self._opened_ns)
            self._readiness.holds(newest, reset=reset)

    def _unbound_by_now(self, assembler: ReleaseAssembler) -> list[str]:
        """The tables that the target has held, and is sent without holding them."""
        if not isinstance(self._target, PartialTarget):
            return []
        bound = self._target.bound()
        self._bound |= bound
        return sorted(self._bound.intersection(table.name for table in assembler.tables) - bound)

    def _hold(self, position: Position, version: Position, event_time_unix_ns: int | None) -> None:
        with self._moved:
            self.held, self.version, self._trouble = position, version, None
            self._told_version = version
            self.event_time_unix_ns = event_time_unix_ns
            self._moved.notify_all()

    def _reached(self, wanted: Position | int) -> bool:
        if isinstance(wanted, int):
            return self.version.number >= wanted
        return any(reaches(at, wanted) for at in (self.held, self.version))


@contextmanager
def _arriving() -> Iterator[None]:
    """Take whatever cannot be read of a stream for damage of that stream: the next one may be whole."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise ServiceUnavailable(f"the stream is damaged, and opened again: {error}") from error


def say(requests: Requests, ack: subscribe_pb2.Ack) -> None:
    """Send an ack."""
    requests.put(subscribe_pb2.SubscribeRequest(ack=ack))


def return_credit(requests: Requests, received_bytes: int) -> None:
    """Say how much was taken, and nothing of what became of it."""
    say(requests, subscribe_pb2.Ack(received_bytes=received_bytes, token=steady_ns()))


def hang_up(requests: Requests) -> None:
    """Say goodbye, and nothing more."""
    say(requests, subscribe_pb2.Ack(goodbye=True))
    requests.put(None)


def say_why(requests: Requests, call: Any, error: Exception, seconds: float) -> None:
    """Say on a stream why the replica stops, and wait until the service has read it, `seconds` at most."""
    say(requests, subscribe_pb2.Ack(stopped=printable(f"{type(error).__name__}: {error}")))
    requests.put(None)
    ended = threading.Event()
    call.add_done_callback(lambda _: ended.set())
    ended.wait(seconds)


def say_goodbye(endpoint: Endpoint, replica: subscribe_pb2.LeaveRequest, seconds: float) -> None:
    """Tell a service, once and for at most so many seconds, that a replica has ended."""
    with replace(endpoint, timeout_seconds=max(seconds, 0.01)).channel() as channel:
        try:
            subscribe_pb2_grpc.SubscribeServiceStub(channel).Leave(replica)
        except grpc.RpcError as error:
            text = "replica %s of consumer %s has ended, and counts as away, since nobody could be told: %s"
            logger.info(text, replica.replica, replica.consumer, error.details())
