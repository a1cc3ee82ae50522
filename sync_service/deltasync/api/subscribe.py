"""The gRPC side of subscribing: releases down, credit and acks up."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any, TypeAlias

import grpc.aio
import numpy as np

from deltasync.api.call_errors import abort
from deltasync.api.protocol import check_known, protocols_of
from deltasync.consumers.consumer import Consumer, Replica
from deltasync.core.damage import ranges
from deltasync.core.delivery import Delivery
from deltasync.core.errors import DeltasyncError, InvalidInput, NotFound, ServiceUnavailable, Superseded
from deltasync.core.events import EventKind, described
from deltasync.core.id_sets import distinct
from deltasync.core.position import Position
from deltasync.core.rows import Ids
from deltasync.core.signals import first_of
from deltasync.core.tables import ID_TYPE
from deltasync.feeds.feed import Feed
from deltasync.feeds.frozen_release import FrozenRelease, Head
from deltasync.feeds.replica_audit import ReplicaAudit
from deltasync.service.service import Service
from deltasync.v1 import subscribe_pb2, subscribe_pb2_grpc, tables_pb2
from deltasync.wire.messages import (
    checksums_to_message,
    delivery_to_message,
    mode_to_message,
    position_from_message,
    position_to_message,
)
from deltasync.wire.protocol import DELETES_PROTOCOL, WHOLE_PROTOCOL, Protocols
from deltasync.wire.row_messages import fits_message, whole_release

_PROGRESS_SECONDS = 5.0
_DEFAULT_OUTSTANDING_BYTES = 16 << 20

# Rows come as messages that are written already, which all replicas are sent.
Responses: TypeAlias = AsyncIterator[subscribe_pb2.SubscribeResponse | bytes]


class _ReplicaLeft(Exception):
    """The replica has ended its side of the stream."""


class SubscribeServicer(subscribe_pb2_grpc.SubscribeServiceServicer):
    """Feeds the replicas of consumers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Subscribe(
        self,
        request_iterator: AsyncIterator[subscribe_pb2.SubscribeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[Any]:
        """Answer one replica's stream."""
        try:
            protocols = protocols_of(context)
            stream = await self._open(request_iterator, protocols)
            async for response in stream.run(request_iterator):
                yield response
        except DeltasyncError as error:
            await abort(context, error)

    async def _open(
        self, requests: AsyncIterator[subscribe_pb2.SubscribeRequest], protocols: Protocols
    ) -> "ReplicaStream":
        opening = subscribe_pb2.SubscribeOpen()
        try:
            first = await anext(requests, None)
            if first is None or first.WhichOneof("message") != "open":
                raise InvalidInput("a stream begins with an open message")
            opening = first.open
            return ReplicaStream(self._service, opening, protocols)
        except DeltasyncError as error:
            emit = self._service.events.emit
            emit(EventKind.REPLICA_REFUSED, error=error, consumer=opening.consumer, replica=opening.replica)
            raise


class ReplicaStream:
    """One replica's stream, from its open to its end."""

    def __init__(self, service: Service, message: subscribe_pb2.SubscribeOpen, protocols: Protocols) -> None:
        self._service = service
        self._registry = service.registry
        self._consumer: Consumer = service.registry.get(message.consumer)
        self._claim = position_from_message(message.held)
        self._sent = Position()
        self._deliveries: list[Delivery] = []
        self._ended = asyncio.Event()
        self._replica: Replica = self._registry.connect(self._consumer, message.replica, self._ended)
        self._audit = ReplicaAudit()
        self._protocols = protocols
        self._token = 0  # The newest that the replica has sent.
        self._budget = message.max_outstanding_bytes or _DEFAULT_OUTSTANDING_BYTES
        self._sent_bytes = 0
        self._received_bytes = 0
        self._credited = asyncio.Event()
        self._damaged = asyncio.Event()
        # Also of a replica that lacks nothing the first release asks to show what it holds.
        self._asked = False

    async def run(self, requests: AsyncIterator[subscribe_pb2.SubscribeRequest]) -> Responses:
        """Everything there is to send, until either side ends the stream."""
        acks, why = asyncio.create_task(self._take_acks(requests)), "its stream has ended"
        try:
            async for response in self._responses(acks):
                yield response
        except _ReplicaLeft:
            pass  # All of its acks were taken; there is nothing more to say.
        except Exception as error:
            why = described(error)
            raise
        finally:
            acks.cancel()
            self._registry.disconnect(self._replica, self._ended)
            if self._deliveries:
                self._say(EventKind.REPLICA_LEFT, why)

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
            repair = self._audit.begin_repair(time.monotonic())
            if self._feed.position == self._sent and not repair.slots and self._asked:
                await self._wait(acks, self._feed.changed(), self._damaged.wait())
                if self._feed.position == self._sent and not self._audit.damaged:
                    yield self._no_news()
                continue
            async for response in self._send(self._feed.release(self._sent.number, repair), acks):
                yield response

    def _no_news(self) -> subscribe_pb2.SubscribeResponse:
        version = self._feed.version_of(self._sent.number)
        progress = subscribe_pb2.Progress(
            head=position_to_message(self._sent),
            version=version,
            event_time_unix_ns=self._feed.event_time_of(version) or 0,
            token=self._token,
            behind_ns=self._feed.behind_ns(self._sent.number, self._consumer.policy),
        )
        return subscribe_pb2.SubscribeResponse(progress=progress)

    def _ready_feed(self) -> Feed | None:
        """What the consumer is fed from, once there is something to send."""
        feed = self._service.feed(self._consumer)
        return feed if feed and feed.may_serve(self._consumer.policy) else None

    def _preparation(self) -> Awaitable[object]:
        """To be awaited: what may make it ready, from this call on."""
        feed = self._service.feed(self._consumer)
        return feed.changed() if feed else self._service.model_added.changed()

    def _opened(self) -> subscribe_pb2.SubscribeResponse:
        self._check_known(self._feed.deliveries)
        deliveries = self._deliveries = list(self._feed.deliveries)
        self._limit = self._consumer.policy.ready_within_seconds
        # Only what the replica is known to hold may become its offset, not what it claims.
        decision, self._sent = self._feed.resume(self._claim)
        self._replica.checked, self._replica.unbound = False, ()
        self._registry.acknowledge(self._consumer, self._replica, self._sent)
        self._say(EventKind.REPLICA_JOINED, decision.reason)
        opened = subscribe_pb2.SubscribeOpened(
            model=self._consumer.model,
            head=position_to_message(self._feed.position),
            tables=[delivery_to_message(each) for each in deliveries],
            resync=not decision.yes,
            reason=decision.reason,
            mode=mode_to_message(deliveries[0].mode),
            model_history=self._feed.model_history,
            ready_within_seconds=self._limit or 0,
        )
        return subscribe_pb2.SubscribeResponse(opened=opened)

    async def _send(self, frozen: asyncio.Future[FrozenRelease], acks: asyncio.Task[None]) -> Responses:
        # Awaited only here, so that no release is kept in memory while there is nothing to send.
        release = await asyncio.shield(frozen)
        self._check_deliveries()
        self._asked = True
        if release.head and self._fits_message(release):
            await self._take_credit(release.nbytes, acks)
            end = self._end(release, release.head)
            yield whole_release([chunk.sent(deletes=True)[0] for chunk in release.chunks], end)
            return
        for chunk in release.chunks:
            message, size = chunk.sent(deletes=self._protocols.newest >= DELETES_PROTOCOL)
            await self._take_credit(size, acks)
            yield message
        if release.head:
            yield subscribe_pb2.SubscribeResponse(release_end=self._end(release, release.head))

    def _fits_message(self, release: FrozenRelease) -> bool:
        """Whether a release has rows, and so few that they go with its end."""
        if self._protocols.newest < WHOLE_PROTOCOL or release.nbytes > self._budget:
            return False
        return bool(release.chunks) and fits_message(release.nbytes)

    async def _take_credit(self, size: int, acks: asyncio.Task[None]) -> None:
        """Wait until so many bytes of rows may be sent, and count them as sent."""
        while self._outstanding > 0 and self._outstanding + size > self._budget:
            self._credited.clear()
            await self._wait(acks, self._credited.wait())
            self._check_fed()
        self._sent_bytes += size
        self._consumer.released_bytes += size

    def _end(self, release: FrozenRelease, head: Head) -> subscribe_pb2.ReleaseEnd:
        """The end of a release whose rows are sent, or are sent with it."""
        self._sent = Position(self._feed.history, head.number)
        self._audit.expect(release, self._sent_bytes)
        self._consumer.released_rows += release.rows
        return subscribe_pb2.ReleaseEnd(
            position=position_to_message(self._sent),
            step=head.step,
            step_end_unix_ns=head.step_end_unix_ns,
            rows=release.rows,
            version=head.version,
            whole=sorted(release.repair.whole),
            sums=checksums_to_message(dict(enumerate(release.checksums))),
            event_time_unix_ns=head.event_time_unix_ns or 0,
            token=self._token,
            behind_ns=self._feed.behind_ns(head.number, self._consumer.policy),
        )

    @property
    def _outstanding(self) -> int:
        return self._sent_bytes - self._received_bytes

    async def _take_acks(self, requests: AsyncIterator[subscribe_pb2.SubscribeRequest]) -> None:
        async for request in requests:
            if request.WhichOneof("message") != "ack":
                raise InvalidInput("after the open message a replica sends only acks")
            ack = request.ack
            if ack.received_bytes > self._sent_bytes:
                raise InvalidInput(f"acked {ack.received_bytes} bytes, only {self._sent_bytes} were sent")
            self._received_bytes = max(self._received_bytes, ack.received_bytes)
            self._credited.set()
            self._token = ack.token or self._token
            if unknown := [slot for slot in _slots(ack) if slot >= len(self._deliveries)]:
                raise InvalidInput(f"an ack of table {unknown[0]}, but there are only {len(self._deliveries)}")
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
        rows = {each.table: ids for each in ack.wanted if len(ids := self._rows_of(each))}
        damaged = self._audit.check(applied.number, checksums, ack.received_bytes, rows)
        if damaged:
            self._report(damaged, rows)
            return
        if self._audit.compared:
            self._note_shown(ack)
        elif applied.number > self._replica.applied.number:
            self._replica.checked = False
        self._registry.acknowledge(self._consumer, self._replica, applied)

    def _note_shown(self, ack: subscribe_pb2.Ack) -> None:
        """Note what a replica has shown that it holds: nothing else than it was sent."""
        if self._replica.damaged and ack.sums:
            self._say(EventKind.REPLICA_REPAIRED, f"holds what it was sent in {', '.join(self._replica.damaged)}")
            self._replica.damaged = ()
        self._replica.checked, self._replica.unbound = bool(ack.sums), self._unbound(ack)

    def _unbound(self, ack: subscribe_pb2.Ack) -> tuple[str, ...]:
        """Names of the tables that a replica does not hold: those it names, and those of which alone it shows
        nothing, as clients do that name none.
        """
        everything = range(len(self._deliveries))
        shown = {each.slot for each in ack.sums} or everything
        slots = {*ack.unbound, *set(everything).difference(shown)}
        return tuple(self._deliveries[slot].spec.name for slot in sorted(slots))

    def _rows_of(self, wanted: tables_pb2.WantedRows) -> Ids:
        ids = np.array(wanted.ids, np.uint64)
        return distinct(ids[ids < self._deliveries[wanted.table].spec.rows]).astype(ID_TYPE)

    def _report(self, damaged: frozenset[int], rows: Mapping[int, Ids]) -> None:
        """Report a replica that holds other bits than it was sent, and have these sent again."""
        names = {slot: self._deliveries[slot].spec.name for slot in sorted(damaged)}
        self._consumer.damages += len(set(names.values()) - set(self._replica.damaged))
        self._replica.damaged = tuple(names.values())
        found = (f"{name} ({ranges(rows[slot])})" if slot in rows else name for slot, name in names.items())
        self._say(EventKind.REPLICA_DAMAGED, f"holds other rows than it was sent in {', '.join(found)}")
        self._damaged.set()

    async def _wait(self, acks: asyncio.Task[None], *events: Awaitable[object]) -> None:
        """Wait for one of the events, for a while; an ended or broken ack stream ends this stream too."""
        endings = (self._ended.wait(), self._service.draining.wait())
        await first_of(*events, *endings, seconds=self._progress_seconds, task=acks)
        if acks.done():
            acks.result()
            raise _ReplicaLeft
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

    def _check_known(self, deliveries: Sequence[Delivery]) -> None:
        """Check that the replica's client knows the types in which it would be sent rows."""
        try:
            check_known(deliveries, self._protocols)
        except DeltasyncError as error:
            self._say(EventKind.REPLICA_REFUSED, described(error))
            raise

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
        if self._service.feed(self._consumer) is not self._feed:
            raise Superseded(f"consumer {self._consumer.name!r} has a policy now; reconnect")

    def _check_current(self) -> None:
        if self._registry.consumers.get(self._consumer.name) is not self._consumer:
            raise NotFound(f"consumer {self._consumer.name!r} was deleted")
        if self._replica.stream is not self._ended:
            raise Superseded(f"a newer stream of replica {self._replica.name!r} has taken over")


def _slots(ack: subscribe_pb2.Ack) -> list[int]:
    """The slots that an ack names."""
    return [*(each.slot for each in ack.sums), *(each.table for each in ack.wanted), *ack.unbound]
