"""A replica's stream: sends releases, receives credit and acks."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc.aio

from deltasync.access.limits import Limits
from deltasync.access.roles import caller, current_call
from deltasync.api.acks import Acks, Credit
from deltasync.api.errors import abort
from deltasync.api.live_stream import ClientSilent, LiveStream
from deltasync.base.clock import steady_ns
from deltasync.base.errors import (
    Contradiction,
    DeltasyncError,
    InvalidInput,
    LimitReached,
    NotFound,
    NotPermitted,
    ServiceUnavailable,
    Superseded,
)
from deltasync.base.events import EventKind, Events, error_text
from deltasync.base.waiting import first_of
from deltasync.base.words import printable
from deltasync.consumers.consumer import Consumer, Replica, Rewind
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.position import Position
from deltasync.core.rows import DamagedRows
from deltasync.core.seal import event_time_of
from deltasync.model.feed import Feed
from deltasync.model.releases import FrozenRelease, Head, LargeRelease, Release
from deltasync.service.consumers import Consumers
from deltasync.service.models import Models
from deltasync.service.options import ServiceOptions
from deltasync.service.volumes import Volumes
from deltasync.v1 import subscribe_pb2, subscribe_pb2_grpc, tables_pb2
from deltasync.wire.messages import (
    form_to_message,
    mode_to_message,
    position_from_message,
    position_to_message,
)
from deltasync.wire.row_messages import Pieces, fits_message, release_end, whole_message

# Errors that the replica causes. All others are the service's, and may have passed when the replica reconnects.
_OF_PEERS = (InvalidInput, NotFound, NotPermitted, Contradiction, LimitReached)


class StreamEnded(Exception):
    """The replica ended its side of the stream."""


@dataclass(frozen=True)
class Departure:
    """The event and reason for the end of a replica's stream, and whether the replica should return."""

    kind: EventKind
    reason: str
    expected: bool = False


def departure(
    error: BaseException,
    *,
    goodbye: bool,
    instance: str,
    replaced: bool,
    given_up: str = "",
    stopped: str = "",
) -> Departure:
    """Classify the end of a replica's stream."""
    if goodbye:
        return Departure(EventKind.REPLICA_LEFT, "it said goodbye")
    if replaced:
        text = str(error) if isinstance(error, DeltasyncError) else "a newer stream took over"
        return Departure(EventKind.REPLICA_REPLACED, text)
    if stopped:
        return Departure(EventKind.REPLICA_LOST, f"it stopped: {printable(stopped)}", expected=True)
    if given_up:
        return Departure(EventKind.REPLICA_LEFT, given_up, expected=True)
    if isinstance(error, StreamEnded):
        if instance:
            return Departure(EventKind.REPLICA_LOST, "its stream ended without a goodbye")
        return Departure(EventKind.REPLICA_LEFT, "its stream ended")
    if isinstance(error, GeneratorExit | asyncio.CancelledError):
        return Departure(EventKind.REPLICA_LOST, "its connection was lost")
    if isinstance(error, ClientSilent):
        return Departure(EventKind.REPLICA_LOST, str(error))
    reason = error_text(error) if isinstance(error, Exception) else str(error)
    return Departure(EventKind.REPLICA_LEFT, reason, expected=not isinstance(error, _OF_PEERS))


def superseded(consumer: str, replica: str, ours: str, newer: str) -> DeltasyncError:
    """The error for a stream that a newer one of the same name replaces.

    The same instance may reconnect. Two instances would replace each other for ever, so the older must stop.
    """
    if ours and newer and ours != newer:
        return Contradiction(
            f"another replica named {replica!r} of consumer {consumer!r} has connected, so this one stops; give "
            "each a different name, SubscriberOptions(replica=...)"
        )
    return Superseded(f"a newer stream of replica {replica!r} took over")


_DEFAULT_OUTSTANDING_BYTES = 16 << 20

# Chunks are encoded once and sent to every replica as bytes.
Responses: TypeAlias = AsyncGenerator[subscribe_pb2.SubscribeResponse | bytes, None]


@dataclass(frozen=True, kw_only=True)
class StreamCollaborators:
    """The parts of the service that streams use; `draining` is set at shutdown."""

    models: Models
    registry: ConsumerRegistry
    consumers: Consumers
    limits: Limits
    volumes: Volumes
    events: Events
    draining: asyncio.Event
    options: ServiceOptions


class ReplicaStream:
    """One replica's stream, from its open to its end."""

    def __init__(self, service: StreamCollaborators, message: subscribe_pb2.SubscribeOpen) -> None:
        self._models, self._consumers = service.models, service.consumers
        self._draining, self._options = service.draining, service.options
        self._registry = service.registry
        self._consumer: Consumer = service.registry.get(message.consumer)
        self._claim = position_from_message(message.held)
        self._claimed_version = position_from_message(message.version)
        self._ended = asyncio.Event()
        self._instance = message.instance
        self._replica: Replica = self._registry.connect(
            self._consumer, message.replica, self._ended, self._instance, caller().name
        )
        self._replica.guest = message.guest
        self._emit = partial(service.events.emit, consumer=self._consumer.name, replica=self._replica.name)
        budget = message.max_outstanding_bytes or _DEFAULT_OUTSTANDING_BYTES
        self._credit = Credit(min(budget, service.limits.options.outstanding_bytes), self._options.quiet_seconds)
        self._acks = Acks(
            self._consumer,
            self._replica,
            self._registry,
            self._models,
            self._credit,
            self._emit,
            self._options.ack_pace_seconds,
        )
        self._given_up = ""  # Why the service ended a stalled stream.
        # The first release requests checksums, even if the replica is up to date.
        self._asked = False

    async def run(self, requests: AsyncIterator[subscribe_pb2.SubscribeRequest]) -> Responses:
        """Yield responses until either side ends the stream."""
        self._ack_reader = asyncio.create_task(self._acks.run(requests))
        # One task for all waits of this stream.
        self._stop = asyncio.create_task(first_of(self._ended.wait(), self._draining.wait(), seconds=None))
        watch = asyncio.create_task(self._watch(asyncio.current_task()))
        try:
            async for response in self._responses():
                self._acks.messages += 1
                yield response
        except StreamEnded as error:
            self._leave(error)  # All acks are processed.
        except DamagedRows as damaged:
            text = f"model {self._consumer.model!r} has damaged rows and is being reloaded; reconnect"
            unavailable = ServiceUnavailable(text, detail=f" ({damaged})")
            self._leave(unavailable)
            raise unavailable from damaged
        except BaseException as error:
            self._leave(error)
            raise
        finally:
            for task in (self._ack_reader, self._stop, watch):
                task.cancel()

    def _leave(self, error: BaseException) -> None:
        """Record and report the end of the stream."""
        end = departure(
            current_call().error or error,
            goodbye=self._acks.goodbye,
            instance=self._instance,
            replaced=self._replica.stream is not self._ended,
            given_up=self._given_up,
            stopped=self._acks.stopped,
        )
        self._registry.disconnect(
            self._consumer,
            self._replica,
            self._ended,
            end.reason,
            forget=self._acks.goodbye,
            expected=end.expected,
        )
        if self._acks.forms:
            self._emit(end.kind, end.reason)

    async def _watch(self, stream: asyncio.Task[Any] | None) -> None:
        """End a stalled stream. It may be blocked inside gRPC, so another task has to cancel it."""
        while stream:
            await asyncio.sleep(self._options.watch_seconds)
            if not (decision := self._credit.decision).yes:
                self._given_up = decision.reason
                stream.cancel()
                return

    async def _responses(self) -> Responses:
        while (feed := self._ready_feed()) is None:
            yield subscribe_pb2.SubscribeResponse(progress=subscribe_pb2.Progress())
            if self._ready_feed() is None:  # Check again, as a change during the yield woke nobody.
                source = self._consumers.feed(self._consumer)
                await self._wait(source.changed() if source else self._models.added.changed())
        self._feed = self._acks.feed = feed
        under_way, repeated_read = self._acks.under_way, self._acks.repeated_read
        yield self._opened()
        while True:
            self._check_fed()
            self._check_forms()
            if self._acks.token and self._consumer.policy.ready_within_seconds != self._limit:
                # The replica still reports readiness by the old limit.
                text = f"consumer {self._consumer.name!r} has a new readiness limit; reconnect"
                raise Superseded(text)
            if self._asked and (number := repeated_read.due):
                repeated_read.ask(number, self._feed.version_of(self._acks.sent.number), under_way.checksums)
                yield self._no_news(number)
                continue
            if self._blocked:
                await self._wait_unblocked()
                if self._blocked:
                    yield self._no_news()
                continue
            whole = under_way.due(time.monotonic())
            if self._feed.position == self._acks.sent and not whole and self._asked:
                asked = self._replica.verification.signal.changed()
                await self._wait(self._feed.changed(), self._acks.damaged.changed(), asked)
                if self._feed.position == self._acks.sent and not (under_way.damaged or repeated_read.due):
                    yield self._no_news()
                continue
            async for response in self._send(self._feed.release(self._acks.sent.number, whole)):
                yield response

    @property
    def _blocked(self) -> bool:
        """Whether no release may be sent: the consumer is paused, or the replica has enough to apply."""
        paused = self._consumer.pause is not None and self._feed.position != self._acks.sent
        return paused or self._acks.under_way.full

    async def _wait_unblocked(self) -> None:
        pause, asked = self._consumer.pause, self._replica.verification.signal.changed()
        await self._wait(self._consumer.pause_changed.changed(), asked, self._acks.under_way.room())
        if pause and self._consumer.pause is None and not self._feed.may_serve(self._consumer.policy):
            raise Superseded(f"consumer {self._consumer.name!r} got a new policy during a pause; reconnect")

    def _no_news(self, read_again: int = 0) -> subscribe_pb2.SubscribeResponse:
        """Progress for a replica that gets no release now; `read_again` asks it to verify its rows."""
        feed, held = self._feed, self._acks.sent
        version = feed.version_of(held.number)
        progress = subscribe_pb2.Progress(
            head=position_to_message(held),
            version=version,
            event_time_unix_ns=event_time_of(version, feed.seals) or 0,
            token=self._acks.token,
            behind_ns=self._behind_ns(held.number),
            version_seal=feed.seals.checksum_of(version),
            read_again=read_again,
        )
        return subscribe_pb2.SubscribeResponse(progress=progress)

    def _behind_ns(self, number: int) -> int:
        """Nanoseconds since replicas could have had a newer number; a pause does not count."""
        feed, policy, pause = self._feed, self._consumer.policy, self._consumer.pause
        if pause:
            return pause.behind_ns(feed.seals.outdated(feed.version_of(number)), policy.min_interval_seconds)
        return feed.behind_ns(number, policy)

    def _ready_feed(self) -> Feed | None:
        """The consumer's feed, once it can serve a release, or once it has tables while paused."""
        feed = self._consumers.feed(self._consumer)
        if feed and self._consumer.pause and feed.forms:
            return feed
        return feed if feed and feed.may_serve(self._consumer.policy) else None

    def _opened(self) -> subscribe_pb2.SubscribeResponse:
        """The first response: the tables of the stream, and whether the replica continues from its own rows."""
        self._check_current()  # The stream may have been replaced during the last yield.
        forms = self._acks.forms = list(self._feed.forms)
        self._limit = self._consumer.policy.ready_within_seconds
        # The offset is the acknowledged position, not the claimed one.
        decision, sent = self._feed.continue_from(self._claim, self._replica.applied)
        self._acks.sent = sent
        self._replica.checked, self._replica.unbound = False, ()
        self._replica.sent_number = sent.number
        self._acks.times.held = self._feed.version_of(sent.number)
        self._record_rewind(resumes=decision.yes)
        self._registry.acknowledge(self._consumer, self._replica, sent)
        self._emit(EventKind.REPLICA_JOINED, decision.reason)
        message = subscribe_pb2.SubscribeOpened(
            model=self._consumer.model,
            head=position_to_message(self._feed.position),
            tables=[form_to_message(each) for each in forms],
            resync=not decision.yes,
            reason=decision.reason,
            mode=mode_to_message(forms[0].mode),
            model_history=self._feed.model_history,
            ready_within_seconds=self._limit or 0,
        )
        return subscribe_pb2.SubscribeResponse(opened=message)

    def _record_rewind(self, *, resumes: bool) -> None:
        """Record whether the replica has rows of a discarded history, until new ones replace them."""
        before, held = self._replica.rewind, self._claim
        if resumes or not self._feed.discards(held, self._claimed_version):
            self._replica.rewind = None
        elif before is None or before.held != held:
            self._replica.rewind = Rewind(held, steady_ns())
            self._consumer.rewinds += 1
            head = self._feed.position.number
            text = f"it had number {held.number} of discarded history {held.history}, and now gets {head}"
            self._emit(EventKind.REPLICA_REWOUND, text)

    async def _send(self, reading: asyncio.Future[Release]) -> Responses:
        # Awaited only here, to keep no release in memory while there is nothing to send.
        await self._wait_until_done(reading)
        release = reading.result()
        self._check_forms()
        if self._kept_from(release):  # Drop the release; a later one repeats its rows and repairs.
            if self._feed.position == self._acks.sent:  # Otherwise the caller waits for the end of the pause.
                await self._wait(self._feed.changed(), self._consumer.pause_changed.changed())
            return
        self._asked = True
        with self._credit.going_on():
            if isinstance(release, LargeRelease):
                copying = release.begin()
                while not isinstance(release, FrozenRelease):
                    await self._room_for(min(self._options.release_block_bytes, self._credit.budget // 4), release)
                    copied = asyncio.ensure_future(copying.next())
                    await self._wait_until_done(copied)
                    self._check_forms()
                    if isinstance(block := copied.result(), FrozenRelease):
                        release = block
                    else:
                        for chunk in block:
                            await self._take_credit(chunk.nbytes, release)
                            yield chunk.message
            fits = release.nbytes <= self._credit.budget and fits_message(release.message_bytes)
            if release.head and release.chunks and fits:
                await self._take_credit(release.nbytes, release)
                yield whole_message(self._end(release, release.head), [release.table_rows])
                return
            for chunk in release.chunks:
                await self._take_credit(chunk.nbytes, release)
                yield chunk.message
            if release.head:
                self._check_running(release)
                yield release_end(self._end(release, release.head))

    async def _wait_until_done(self, reading: asyncio.Future[Any]) -> None:
        """Wait until the rows are read, as a release must be durable before it is sent."""
        try:
            while not reading.done():
                await self._wait(asyncio.shield(reading))
                self._check_fed()
                self._credit.restart()
        finally:
            if isinstance(
                reading, asyncio.Task
            ):  # A task belongs to this stream, while others may await a future.
                reading.cancel()

    async def _take_credit(self, size: int, release: Release) -> None:
        """Wait until `size` bytes of a release may be sent, and count them."""
        await self._room_for(size, release)
        self._credit.restart()
        self._credit.sent_bytes += size
        self._consumer.released_bytes += size

    async def _room_for(self, size: int, release: Release) -> None:
        """Wait until `size` bytes of a release may be sent."""
        while not self._credit.allows(size):
            await self._wait(self._credit.returned())
            self._check_fed()
        self._check_running(release)

    def _end(self, release: FrozenRelease, head: Head) -> Pieces:
        """Make the end of a release, in pieces, and record the release as sent."""
        self._acks.sent = Position(self._feed.history, head.number, head.seal)
        self._acks.under_way.record(release, head, self._credit.sent_bytes, time.monotonic())
        self._consumer.released_rows += release.rows
        end = subscribe_pb2.ReleaseEnd(  # The fields that `release.end` lacks.
            position=position_to_message(self._acks.sent),
            token=self._acks.token,
            behind_ns=self._behind_ns(head.number),
            version_seal=self._feed.seals.checksum_of(head.version),
        )
        return [release.end, end.SerializeToString()]

    async def _wait(self, *events: Awaitable[object]) -> None:
        """Wait briefly for one of the events. If the ack stream has ended, end this stream too."""
        limit = self._consumer.policy.ready_within_seconds
        # Send the next message well within the limit.
        seconds = min(self._options.progress_seconds, limit / 4) if limit else self._options.progress_seconds
        await first_of(*events, seconds=seconds, tasks=(self._ack_reader, self._stop))
        if self._ack_reader.done():
            self._ack_reader.result()
            raise StreamEnded
        if self._draining.is_set():
            raise ServiceUnavailable("the service is shutting down; reconnect")
        self._check_current()

    def _check_forms(self) -> None:
        """Check that the tables are still those in the answer to the replica's open."""
        if list(self._feed.forms) != self._acks.forms:
            raise Superseded(f"consumer {self._consumer.name!r} has other tables or another format now; reconnect")

    def _check_fed(self) -> None:
        """Check that this stream is still current, and its feed still the consumer's."""
        self._check_current()
        self._models.check_reloaded(self._consumer.model)
        if self._consumers.feed(self._consumer) is not self._feed:
            raise Superseded(f"consumer {self._consumer.name!r} has a new policy; reconnect")

    def _check_running(self, release: Release) -> None:
        """Check that no pause began during a release. The replica drops an incomplete one."""
        if (pause := self._consumer.pause) and self._kept_from(release):
            text = f"consumer {self._consumer.name!r} is paused; reconnect"
            raise Superseded(text, detail=f" ({pause.description})")

    def _kept_from(self, release: Release) -> bool:
        """Whether a pause forbids a release, as it would advance the replica."""
        if isinstance(release, LargeRelease):
            leads_to = self._feed.position.number
        else:
            leads_to = release.head.number if release.head else self._acks.sent.number
        return bool(self._consumer.pause and leads_to != self._acks.sent.number)

    def _check_current(self) -> None:
        if self._consumer.moved:
            raise ServiceUnavailable(f"consumer {self._consumer.name!r} was moved; reconnect")
        if self._registry.consumers.get(self._consumer.name) is not self._consumer:
            raise NotFound(f"consumer {self._consumer.name!r} was deleted")
        if self._consumer.replicas.get(self._replica.name) is not self._replica:
            self._acks.goodbye = True  # `Leave` came before the service noticed the loss of this stream.
            raise StreamEnded
        if self._replica.stream is not self._ended:
            newer = self._replica.instance
            raise superseded(self._consumer.name, self._replica.name, self._instance, newer)


class SubscribeServicer(subscribe_pb2_grpc.SubscribeServiceServicer):
    """The gRPC service for replicas."""

    def __init__(self, service: StreamCollaborators) -> None:
        self._service = service
        alive = tables_pb2.Alive(within_seconds=service.options.silence_seconds)
        self._alive = subscribe_pb2.SubscribeResponse(alive=alive)

    async def Subscribe(  # type: ignore[override]  # gRPC also accepts this kind of handler
        self,
        request_iterator: AsyncIterator[subscribe_pb2.SubscribeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Serve the stream of one replica."""
        try:
            live = LiveStream(context, request_iterator, self._alive)
            stream = await self._open(live)
            await live.answer(stream.run(live))
        except DeltasyncError as error:
            self._service.volumes.record(error)
            await abort(context, error)

    async def Leave(
        self, request: subscribe_pb2.LeaveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> subscribe_pb2.LeaveResponse:
        """Forget a replica that says goodbye without a stream."""
        self._service.registry.leave(request.consumer, request.replica, request.instance, caller().name)
        return subscribe_pb2.LeaveResponse()

    async def _open(self, requests: AsyncIterator[subscribe_pb2.SubscribeRequest]) -> ReplicaStream:
        opening = subscribe_pb2.SubscribeOpen()
        try:
            first = await anext(requests, None)
            if first is None or first.WhichOneof("message") != "open":
                raise InvalidInput("a stream must begin with an open message")
            opening = first.open
            return ReplicaStream(self._service, opening)
        except DeltasyncError as error:
            named = {"consumer": opening.consumer, "replica": opening.replica}
            subject = {name: value for name, value in named.items() if value}
            self._service.events.emit(EventKind.REPLICA_REFUSED, "", error, **subject)
            raise
