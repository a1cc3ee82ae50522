"""One replica's stream: releases down, credit and acks up."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc.aio

from deltasync.access.roles import caller, current_call
from deltasync.api.errors import abort, answer
from deltasync.api.sent_releases import ReadingAgain, SentRelease, SentReleases, check_ack, unbound
from deltasync.base.clock import steady_ns
from deltasync.base.decision import Decision
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
from deltasync.base.events import EventKind, error_text
from deltasync.base.waiting import Signal, first_of
from deltasync.base.words import printable
from deltasync.consumers.consumer import Consumer, Replica, Rewind
from deltasync.core.delivery import Delivery
from deltasync.core.position import Position
from deltasync.core.rows import DamagedRows
from deltasync.core.seal import seal_of
from deltasync.model.feed import Feed
from deltasync.model.model import Model
from deltasync.model.releases import BLOCK_BYTES, FrozenRelease, Head, LargeRelease, Release
from deltasync.service.service import Service
from deltasync.v1 import subscribe_pb2, subscribe_pb2_grpc
from deltasync.wire.messages import (
    checksums_to_message,
    delivery_to_message,
    mode_to_message,
    position_from_message,
    position_to_message,
)
from deltasync.wire.row_messages import fits_message, whole_release


class Credit:
    """Bytes of ids and values that one stream may have under way.

    Attributes:
        budget: so many.
        sent_bytes: what was sent on the stream.
        taken_bytes: what the replica has taken of that, as it has said.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.sent_bytes = self.taken_bytes = 0
        self._signal = Signal()

    def allows(self, size: int) -> bool:
        """Whether so many more may be sent. One message may whatever its size, once nothing is under way."""
        outstanding = self.sent_bytes - self.taken_bytes
        return outstanding <= 0 or outstanding + size <= self.budget

    def take_back(self, received_bytes: int) -> bool:
        """Note that the replica has taken so many since the stream began; whether it has taken more.

        Raises:
            InvalidInput: more than were sent.
        """
        if received_bytes > self.sent_bytes:
            raise InvalidInput(f"acked {received_bytes} bytes, only {self.sent_bytes} were sent")
        more = received_bytes > self.taken_bytes
        self.taken_bytes = max(self.taken_bytes, received_bytes)
        self._signal.wake()
        return more

    def returned(self) -> Awaitable[object]:
        """To be awaited: what the replica says next, from this call on."""
        return self._signal.changed()


# A replica that takes nothing of a release for this long is given up, since it holds memory. If its target only
# takes long to apply what came before, it comes back.
QUIET_SECONDS = 120.0


class Sending:
    """Watches one replica's stream while a release is sent on it. Used in the event loop."""

    def __init__(self) -> None:
        self._moved: float | None = None

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """While a release is sent."""
        self._moved = time.monotonic()
        try:
            yield
        finally:
            self._moved = None

    def note_moved(self) -> None:
        """Note that the replica has taken something, is given more, or waits for the service."""
        if self._moved is not None:
            self._moved = time.monotonic()

    @property
    def decision(self) -> Decision:
        """Whether the stream may go on."""
        if self._moved is None:
            return Decision(True, "nothing is being sent")
        quiet = time.monotonic() - self._moved
        if quiet > QUIET_SECONDS:
            return Decision(False, f"it has taken nothing of its release for {quiet:.0f} s")
        return Decision(True, "it takes what it is sent")


# What a replica has itself to do with; all else is the service's, and may be over when it comes again.
_OF_PEERS = (InvalidInput, NotFound, NotPermitted, Contradiction, LimitReached)


class StreamEnded(Exception):
    """The replica has ended its side of the stream."""


@dataclass(frozen=True)
class Departure:
    """What is told of a replica whose stream has ended, why it has, and whether the replica is expected back."""

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
    """How a replica has left.

    Args:
        error: what has ended its stream.
        goodbye: whether it has said that it ends for good.
        instance: what it says of itself; those that say nothing do not say goodbye either.
        replaced: whether a newer stream of its name has come.
        stopped: why it has stopped, as it says itself; empty where it says nothing.
        given_up: why the service has ended the stream of one that takes nothing; empty if it has not.
    """
    if goodbye:
        return Departure(EventKind.REPLICA_LEFT, "it has said goodbye")
    if replaced:
        text = str(error) if isinstance(error, DeltasyncError) else "a newer stream has taken over"
        return Departure(EventKind.REPLICA_REPLACED, text)
    if stopped:
        return Departure(EventKind.REPLICA_LOST, f"it has stopped: {printable(stopped)}", expected=True)
    if given_up:
        return Departure(EventKind.REPLICA_LEFT, given_up, expected=True)
    if isinstance(error, StreamEnded):
        if instance:
            return Departure(EventKind.REPLICA_LOST, "its stream has ended without a goodbye")
        return Departure(EventKind.REPLICA_LEFT, "its stream has ended")
    if isinstance(error, GeneratorExit | asyncio.CancelledError):
        return Departure(EventKind.REPLICA_LOST, "its connection is lost")
    reason = error_text(error) if isinstance(error, Exception) else str(error)
    return Departure(EventKind.REPLICA_LEFT, reason, expected=not isinstance(error, _OF_PEERS))


def superseded(consumer: str, replica: str, ours: str, newer: str) -> DeltasyncError:
    """What ends a stream when a newer one of the same replica has come, of an instance or of nobody knows which.

    One that reconnects is told to do so again, if it still hears that; another of its name would be told the same,
    and the two would take each other's place for ever: so the older one has to stop.
    """
    if ours and newer and ours != newer:
        return Contradiction(
            f"another replica named {replica!r} of consumer {consumer!r} has come, and this one has to stop: give "
            "each a name of its own, SubscriberOptions(replica=...)"
        )
    return Superseded(f"a newer stream of replica {replica!r} has taken over")


class DeliveryTimes:
    """The times of what is delivered on one stream, which tell those of the consumer.

    Attributes:
        held: the version that the replica holds.
    """

    def __init__(self, consumer: Consumer, *, guest: bool) -> None:
        self.held = 0
        self._consumer, self._guest = consumer, guest
        self._begun_ns = steady_ns()

    def note_held(self, sent: SentRelease, model: Model) -> None:
        """Note that the replica holds what it was sent."""
        if sent.version <= self.held:
            return
        before, self.held = self.held, sent.version
        sealed_ns = model.succession.since_ns(self.held)
        if not self._guest and sealed_ns is not None and sealed_ns >= self._begun_ns:
            self._count(model, before, sent.sent_ns)

    def _count(self, model: Model, before: int, sent_ns: int) -> None:
        durations, now_ns = self._consumer.durations, steady_ns()
        release = model.recent.deliver(self._consumer.name, before, self.held, sent_ns, self._begun_ns)
        if release is not None:
            durations.release.add(release)
        durations.ack.add((now_ns - sent_ns) / 1e9)
        if model.seals and model.seals[0].version <= self.held:
            ended = seal_of(self.held, model.seals).step_end_unix_ns
            durations.note_freshness(max(0, time.time_ns() - ended) / 1e9)


def opened(
    consumer: Consumer, feed: Feed, deliveries: Sequence[Delivery], decision: Decision
) -> subscribe_pb2.SubscribeResponse:
    """What it will be sent, and whether it goes on from what it holds."""
    message = subscribe_pb2.SubscribeOpened(
        model=consumer.model,
        head=position_to_message(feed.position),
        tables=[delivery_to_message(each) for each in deliveries],
        resync=not decision.yes,
        reason=decision.reason,
        mode=mode_to_message(deliveries[0].mode),
        model_history=feed.model_history,
        ready_within_seconds=consumer.policy.ready_within_seconds or 0,
    )
    return subscribe_pb2.SubscribeResponse(opened=message)


def no_news(
    feed: Feed, consumer: Consumer, held: Position, token: int, read_again: int = 0
) -> subscribe_pb2.SubscribeResponse:
    """That nothing is sent now to who holds what it was sent last; and what it is to read again."""
    version = feed.version_of(held.number)
    progress = subscribe_pb2.Progress(
        head=position_to_message(held),
        version=version,
        event_time_unix_ns=feed.event_time_of(version) or 0,
        token=token,
        behind_ns=_behind_ns(feed, consumer, held.number),
        version_seal=feed.model_position(version).seal,
        read_again=read_again,
    )
    return subscribe_pb2.SubscribeResponse(progress=progress)


def goes_whole(release: FrozenRelease, budget: int) -> bool:
    """Whether a release still has rows to send, and so few that they go with its end within such a budget."""
    return bool(release.chunks) and release.nbytes <= budget and fits_message(release.nbytes)


def release_end(
    feed: Feed, consumer: Consumer, release: FrozenRelease, head: Head, token: int
) -> subscribe_pb2.ReleaseEnd:
    """The end of a release that leads to `head`."""
    return subscribe_pb2.ReleaseEnd(
        position=position_to_message(Position(feed.history, head.number, head.seal)),
        step=head.step,
        step_end_unix_ns=head.step_end_unix_ns,
        rows=release.rows,
        version=head.version,
        whole=sorted(release.whole),
        sums=checksums_to_message(dict(enumerate(release.checksums))),
        event_time_unix_ns=head.event_time_unix_ns or 0,
        token=token,
        behind_ns=_behind_ns(feed, consumer, head.number),
        version_seal=feed.model_position(head.version).seal,
    )


def _behind_ns(feed: Feed, consumer: Consumer, number: int) -> int:
    """For how long a number has not been the newest that replicas are given: a pause does not count."""
    policy, pause = consumer.policy, consumer.pause
    if pause:
        return pause.behind_ns(feed.outdated(number), policy.min_interval_seconds)
    return feed.behind_ns(number, policy)


_PROGRESS_SECONDS = 5.0
_DEFAULT_OUTSTANDING_BYTES = 16 << 20
# So many acks are taken as they come, and so many of each message sent; of others, one in so many seconds.
_FIRST_ACKS, _ACKS_OF_A_MESSAGE, _PACE_SECONDS = 32, 2, 0.05
# So often it is seen whether a replica still takes what it is sent.
_WATCH_SECONDS = 5.0

# Rows come as messages that are written already, which all replicas are sent.
Responses: TypeAlias = AsyncGenerator[subscribe_pb2.SubscribeResponse | bytes, None]


class ReplicaStream:
    """One replica's stream, from its open to its end."""

    def __init__(self, service: Service, message: subscribe_pb2.SubscribeOpen) -> None:
        self._service = service
        self._registry = service.registry
        self._consumer: Consumer = service.registry.get(message.consumer)
        self._claim = position_from_message(message.held)
        self._claimed_version = position_from_message(message.version)
        self._sent = Position()
        self._deliveries: list[Delivery] = []
        self._ended = asyncio.Event()
        self._instance, self._goodbye = message.instance, False
        self._replica: Replica = self._registry.connect(
            self._consumer, message.replica, self._ended, self._instance, caller().name
        )
        self._replica.guest = message.guest
        self._under_way = SentReleases(self._replica)
        self._times = DeliveryTimes(self._consumer, guest=message.guest)
        self._token = 0  # The newest that the replica has sent.
        budget = message.max_outstanding_bytes or _DEFAULT_OUTSTANDING_BYTES
        self._credit = Credit(min(budget, service.limits.options.outstanding_bytes))
        self._reading_again = ReadingAgain(self._replica.verification)
        self._messages = 0  # That were sent.
        self._damaged = asyncio.Event()
        self._sending = Sending()
        self._given_up = self._stopped = ""  # Why, if it is, or has.
        # Also of a replica that lacks nothing the first release asks to show what it holds.
        self._asked = False

    async def run(self, requests: AsyncIterator[subscribe_pb2.SubscribeRequest]) -> Responses:
        """Everything there is to send, until either side ends the stream."""
        acks = asyncio.create_task(self._take_acks(requests))
        watch = asyncio.create_task(self._watch(asyncio.current_task()))
        try:
            async for response in self._responses(acks):
                self._messages += 1
                yield response
        except StreamEnded as error:
            self._leave(error)  # All of its acks were taken; there is nothing more to say.
        except DamagedRows as damaged:
            text = f"model {self._consumer.model!r} has damaged rows and is reloaded; reconnect"
            unavailable = ServiceUnavailable(text, detail=f" ({damaged})")
            self._leave(unavailable)
            raise unavailable from damaged
        except BaseException as error:
            self._leave(error)
            raise
        finally:
            acks.cancel()
            watch.cancel()

    def _leave(self, error: BaseException) -> None:
        """Note that the stream is over, and tell why."""
        left = departure(
            current_call().error or error,
            goodbye=self._goodbye,
            instance=self._instance,
            replaced=self._replica.stream is not self._ended,
            given_up=self._given_up,
            stopped=self._stopped,
        )
        self._registry.disconnect(
            self._consumer, self._replica, self._ended, left.reason, forget=self._goodbye, expected=left.expected
        )
        if self._deliveries:
            self._say(left.kind, left.reason)

    async def _watch(self, stream: asyncio.Task[Any] | None) -> None:
        """End a stream whose replica takes nothing of a release for too long; it may be waiting in gRPC itself."""
        while stream:
            await asyncio.sleep(_WATCH_SECONDS)
            if not (decision := self._sending.decision).yes:
                self._given_up = decision.reason
                stream.cancel()
                return

    async def _responses(self, acks: asyncio.Task[None]) -> Responses:
        while (feed := self._ready_feed()) is None:
            yield subscribe_pb2.SubscribeResponse(progress=subscribe_pb2.Progress())
            if self._ready_feed() is None:  # Anew: what came while progress was sent would not wake anybody.
                await self._wait(acks, self._preparation())
        self._feed: Feed = feed
        yield self._opened()
        while True:
            self._check_fed()
            self._check_deliveries()
            self._check_limit()
            self._damaged.clear()
            if self._asked and (number := self._reading_again.due):
                yield self._read_again(number)
                continue
            if self._holds_back:
                await self._wait_to_go_on(acks)
                if self._holds_back:
                    yield self._no_news()
                continue
            whole = self._under_way.due(time.monotonic())
            if self._feed.position == self._sent and not whole and self._asked:
                asked = self._replica.verification.signal.changed()
                await self._wait(acks, self._feed.changed(), self._damaged.wait(), asked)
                if self._feed.position == self._sent and not (self._under_way.damaged or self._reading_again.due):
                    yield self._no_news()
                continue
            async for response in self._send(self._feed.release(self._sent.number, whole), acks):
                yield response

    @property
    def _holds_back(self) -> bool:
        """Whether nothing new is sent now: the consumer is paused, or the replica has enough to apply."""
        paused = self._consumer.pause is not None and self._feed.position != self._sent
        return paused or self._under_way.full

    async def _wait_to_go_on(self, acks: asyncio.Task[None]) -> None:
        pause, asked = self._consumer.pause, self._replica.verification.signal.changed()
        await self._wait(acks, self._consumer.brake.changed(), asked, self._under_way.room())
        if pause and self._consumer.pause is None and not self._feed.may_serve(self._consumer.policy):
            raise Superseded(f"consumer {self._consumer.name!r} got another policy while it was paused; reconnect")

    def _no_news(self, read_again: int = 0) -> subscribe_pb2.SubscribeResponse:
        return no_news(self._feed, self._consumer, self._sent, self._token, read_again)

    def _read_again(self, number: int) -> subscribe_pb2.SubscribeResponse:
        self._reading_again.ask(number, self._feed.version_of(self._sent.number), self._under_way.checksums)
        return self._no_news(number)

    def _ready_feed(self) -> Feed | None:
        """What the consumer is fed from, once there is something to send; or to hold, while it is paused."""
        feed = self._service.consumers.feed(self._consumer)
        if feed and self._consumer.pause and feed.deliveries:
            return feed
        return feed if feed and feed.may_serve(self._consumer.policy) else None

    def _preparation(self) -> Awaitable[object]:
        """To be awaited: what may make it ready, from this call on."""
        feed = self._service.consumers.feed(self._consumer)
        return feed.changed() if feed else self._service.models.added.changed()

    def _opened(self) -> subscribe_pb2.SubscribeResponse:
        self._check_current()  # It may have been replaced while the progress before was being sent.
        deliveries = self._deliveries = list(self._feed.deliveries)
        self._limit = self._consumer.policy.ready_within_seconds
        # Only what the replica is known to hold may become its offset, not what it claims.
        decision, self._sent = self._feed.resume(self._claim, self._replica.applied)
        self._replica.checked, self._replica.unbound, self._replica.sent_number = False, (), self._sent.number
        self._times.held = self._feed.version_of(self._sent.number)
        self._note_rewind(resumes=decision.yes)
        self._registry.acknowledge(self._consumer, self._replica, self._sent)
        self._say(EventKind.REPLICA_JOINED, decision.reason)
        return opened(self._consumer, self._feed, deliveries, decision)

    def _note_rewind(self, *, resumes: bool) -> None:
        """Note whether the replica has rows of a discarded past, until it has others."""
        before, held = self._replica.rewind, self._claim
        if resumes or not self._feed.discards(held, self._claimed_version):
            self._replica.rewind = None
        elif before is None or before.held != held:
            self._replica.rewind = Rewind(held, steady_ns())
            self._consumer.rewinds += 1
            given = self._feed.position.number
            text = f"it held {held.number} of history {held.history}, which was discarded, and is given {given}"
            self._say(EventKind.REPLICA_REWOUND, text)

    async def _send(self, found: asyncio.Future[Release], acks: asyncio.Task[None]) -> Responses:
        # Waited for only here, so that no release is kept in memory while there is nothing to send.
        async for progress in self._until_done(found, acks):
            yield progress
        release = found.result()
        self._check_deliveries()
        if self._kept_from(release):  # It is dropped, and with its rows comes again what it repairs.
            if self._feed.position == self._sent:  # Or the feed has changed already, and the pause is waited for.
                await self._wait(acks, self._feed.changed(), self._consumer.brake.changed())
            return
        self._asked = True
        with self._sending.going_on():
            if isinstance(release, LargeRelease):
                copying = release.begin()
                while not isinstance(release, FrozenRelease):
                    await self._room_for(min(BLOCK_BYTES, self._credit.budget // 4), release, acks)
                    copied = asyncio.ensure_future(copying.next())
                    async for progress in self._until_done(copied, acks):
                        yield progress
                    self._check_deliveries()
                    if isinstance(block := copied.result(), FrozenRelease):
                        release = block
                    else:
                        for chunk in block:
                            await self._take_credit(chunk.nbytes, release, acks)
                            yield chunk.message
            if release.head and goes_whole(release, self._credit.budget):
                await self._take_credit(release.nbytes, release, acks)
                end = self._end(release, release.head)
                yield whole_release([(chunk.slot, chunk.rows) for chunk in release.chunks], end)
                return
            for chunk in release.chunks:
                await self._take_credit(chunk.nbytes, release, acks)
                yield chunk.message
            if release.head:
                self._check_running(release)
                yield subscribe_pb2.SubscribeResponse(release_end=self._end(release, release.head))

    async def _until_done(self, reading: asyncio.Future[Any], acks: asyncio.Task[None]) -> Responses:
        """Progress, until rows were read: nobody may be given those of a release before it is durable."""
        try:
            while not reading.done():
                await self._wait(acks, asyncio.shield(reading))
                self._check_fed()
                self._sending.note_moved()
                if not reading.done() and self._feed.position != self._sent:
                    head = position_to_message(self._feed.position)  # Which the replica does not hold.
                    yield subscribe_pb2.SubscribeResponse(progress=subscribe_pb2.Progress(head=head))
        finally:
            if isinstance(reading, asyncio.Task):  # It is this stream's own; others may wait for a future.
                reading.cancel()

    async def _take_credit(self, size: int, release: Release, acks: asyncio.Task[None]) -> None:
        """Wait until so many bytes of a release may be sent, and count them as sent."""
        await self._room_for(size, release, acks)
        self._sending.note_moved()
        self._credit.sent_bytes += size
        self._consumer.released_bytes += size

    async def _room_for(self, size: int, release: Release, acks: asyncio.Task[None]) -> None:
        """Wait until so many bytes of a release may be sent."""
        while not self._credit.allows(size):
            await self._wait(acks, self._credit.returned())
            self._check_fed()
        self._check_running(release)

    def _end(self, release: FrozenRelease, head: Head) -> subscribe_pb2.ReleaseEnd:
        """The end of a release whose rows are sent, or are sent with it."""
        self._sent = Position(self._feed.history, head.number, head.seal)
        self._under_way.note(release, head, self._credit.sent_bytes, time.monotonic())
        self._consumer.released_rows += release.rows
        return release_end(self._feed, self._consumer, release, head, self._token)

    async def _take_acks(self, requests: AsyncIterator[subscribe_pb2.SubscribeRequest]) -> None:
        taken = 0
        async for request in requests:
            if request.WhichOneof("message") != "ack":
                raise InvalidInput("after the open message a replica sends only acks")
            self._take_ack(request.ack)
            taken += 1
            del request  # Or it would stay until the next one has come.
            if taken > _FIRST_ACKS + _ACKS_OF_A_MESSAGE * self._messages:
                await asyncio.sleep(_PACE_SECONDS)  # Meanwhile gRPC holds back who says more than it was told.

    def _take_ack(self, ack: subscribe_pb2.Ack) -> None:
        self._goodbye |= ack.goodbye
        self._stopped = ack.stopped
        if self._credit.take_back(ack.received_bytes):
            self._sending.note_moved()
        self._token = ack.token or self._token
        check_ack(ack, self._deliveries)
        self._reading_again.take(ack, self._deliveries)
        if ack.HasField("applied"):
            self._acknowledge(position_from_message(ack.applied), ack)

    def _acknowledge(self, applied: Position, ack: subscribe_pb2.Ack) -> None:
        if applied.history != self._sent.history or applied.number > self._sent.number:
            raise InvalidInput(
                f"acked number {applied.number} of history {applied.history!r}, only number "
                f"{self._sent.number} of {self._sent.history!r} was sent"
            )
        # An earlier ack that is repeated changes nothing.
        if self._replica.stream is not self._ended or applied.number < self._replica.applied.number:
            return
        checksums = {each.slot: each.sum for each in ack.sums}
        acked = self._under_way.take(applied.number, self._credit.taken_bytes, checksums)
        sent = acked.sent
        if acked.wrong:
            self._report(acked.wrong, helpless=bool(sent and acked.wrong & sent.whole))
            return
        if sent and (model := self._service.models.get(self._consumer.model)):
            self._times.note_held(sent, model)
        if acked.compared:  # It holds nothing else than it was sent.
            if self._replica.damaged and ack.sums:
                names = ", ".join(self._replica.damaged)
                self._say(EventKind.REPLICA_REPAIRED, f"holds what it was sent in {names}")
                self._replica.damaged = ()
            self._replica.checked, self._replica.unbound = bool(ack.sums), unbound(ack, self._deliveries)
        elif applied.number > self._replica.applied.number:
            self._replica.checked = False
        if applied.number:
            self._replica.rewind = None  # Of what it held before, nothing is left.
        # With the seal that this history has, whatever the replica says.
        sealed = Position(applied.history, applied.number, self._feed.seal_of(applied.number))
        self._registry.acknowledge(self._consumer, self._replica, sealed)

    def _report(self, damaged: frozenset[int], *, helpless: bool) -> None:
        """Have damaged tables sent again. They are told of once, and each time that this did not help."""
        names = tuple(self._deliveries[slot].spec.name for slot in sorted(damaged))
        more = set(names) - set(self._replica.damaged)
        self._consumer.damages += len(more)
        self._replica.note_damage(names)
        if more or helpless:
            self._say(EventKind.REPLICA_DAMAGED, f"holds other rows than it was sent in {', '.join(names)}")
        self._damaged.set()

    async def _wait(self, acks: asyncio.Task[None], *events: Awaitable[object]) -> None:
        """Wait for one of the events, for a while; an ended or broken ack stream ends this stream too."""
        endings = (self._ended.wait(), self._service.draining.wait())
        await first_of(*events, *endings, seconds=self._progress_seconds, task=acks)
        if acks.done():
            acks.result()
            raise StreamEnded
        if self._service.draining.is_set():
            raise ServiceUnavailable("the service is shutting down; reconnect")
        self._check_current()

    @property
    def _progress_seconds(self) -> float:
        """So often that of two messages the later comes well within the limit."""
        limit = self._consumer.policy.ready_within_seconds
        return min(_PROGRESS_SECONDS, limit / 4) if limit else _PROGRESS_SECONDS

    def _say(self, kind: EventKind, text: str) -> None:
        """Tell what happens to this replica."""
        self._service.events.emit(kind, text, consumer=self._consumer.name, replica=self._replica.name)

    def _check_deliveries(self) -> None:
        """Check that slots still mean the tables the replica was told of."""
        if list(self._feed.deliveries) != self._deliveries:
            raise Superseded(
                f"consumer {self._consumer.name!r} is sent other tables now, or in another form; reconnect"
            )

    def _check_limit(self) -> None:
        """Check that a replica which tells whether it is ready was told the consumer's limit."""
        if self._token and self._consumer.policy.ready_within_seconds != self._limit:
            raise Superseded(f"consumer {self._consumer.name!r} has another limit of readiness now; reconnect")

    def _check_fed(self) -> None:
        """Check that this stream is still the replica's, and fed from what the consumer is fed from."""
        self._check_current()
        self._service.models.check_reloaded(self._consumer.model)
        if self._service.consumers.feed(self._consumer) is not self._feed:
            raise Superseded(f"consumer {self._consumer.name!r} has a policy now; reconnect")

    def _check_running(self, release: Release) -> None:
        """Check that no pause has come while a release is sent: the replica drops what it has of it."""
        if (pause := self._consumer.pause) and self._kept_from(release):
            text = f"consumer {self._consumer.name!r} is paused: reconnect"
            raise Superseded(text, detail=f" ({pause.words})")

    def _kept_from(self, release: Release) -> bool:
        """Whether a pause keeps the replica from a release, which would bring it further."""
        if isinstance(release, LargeRelease):
            leads_to = self._feed.position.number
        else:
            leads_to = release.head.number if release.head else self._sent.number
        return bool(self._consumer.pause and leads_to != self._sent.number)

    def _check_current(self) -> None:
        if self._consumer.moved:
            raise ServiceUnavailable(f"consumer {self._consumer.name!r} was moved; reconnect")
        if self._registry.consumers.get(self._consumer.name) is not self._consumer:
            raise NotFound(f"consumer {self._consumer.name!r} was deleted")
        if self._consumer.replicas.get(self._replica.name) is not self._replica:
            self._goodbye = True  # Not on this stream, of which it has not been heard yet that it is lost.
            raise StreamEnded
        if self._replica.stream is not self._ended:
            newer = self._replica.instance
            raise superseded(self._consumer.name, self._replica.name, self._instance, newer)


class SubscribeServicer(subscribe_pb2_grpc.SubscribeServiceServicer):
    """Feeds the replicas of consumers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Subscribe(  # type: ignore[override]  # gRPC takes this kind of handler, too
        self,
        request_iterator: AsyncIterator[subscribe_pb2.SubscribeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Answer one replica's stream."""
        try:
            stream = await self._open(request_iterator)
            await answer(context, stream.run(request_iterator))
        except DeltasyncError as error:
            self._service.volumes.note(error)
            await abort(context, error)

    async def Leave(
        self, request: subscribe_pb2.LeaveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> subscribe_pb2.LeaveResponse:
        """Forget a replica that has ended, and has no stream to say so."""
        self._service.registry.leave(request.consumer, request.replica, request.instance, caller().name)
        return subscribe_pb2.LeaveResponse()

    async def _open(self, requests: AsyncIterator[subscribe_pb2.SubscribeRequest]) -> ReplicaStream:
        opening = subscribe_pb2.SubscribeOpen()
        try:
            first = await anext(requests, None)
            if first is None or first.WhichOneof("message") != "open":
                raise InvalidInput("a stream begins with an open message")
            opening = first.open
            return ReplicaStream(self._service, opening)
        except DeltasyncError as error:
            named = {"consumer": opening.consumer, "replica": opening.replica}
            known = {name: value for name, value in named.items() if value}
            self._service.events.emit(EventKind.REPLICA_REFUSED, "", error, **known)
            raise
