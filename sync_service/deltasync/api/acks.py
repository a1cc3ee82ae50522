"""Acknowledgements of a replica: bytes, releases, and checksums of its rows."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from deltasync.base.clock import steady_ns
from deltasync.base.decision import Decision
from deltasync.base.errors import InvalidInput
from deltasync.base.events import EventKind
from deltasync.base.waiting import Signal
from deltasync.consumers.consumer import (
    ComparisonStatus,
    Consumer,
    Replica,
    ReplicaVerification,
    TableComparison,
    VerificationResult,
)
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.position import Position
from deltasync.core.seal import seal_of
from deltasync.core.table_form import Mode, TableForm
from deltasync.model.feed import Feed
from deltasync.model.model import Model
from deltasync.model.releases import NO_TABLES, FrozenRelease, Head
from deltasync.service.models import Models
from deltasync.service.options import ServiceOptions
from deltasync.v1 import subscribe_pb2
from deltasync.wire.messages import position_from_message


class Credit:
    """Flow control of one stream, in bytes of ids and values, with a watch for a stalled replica.

    Attributes:
        budget: maximum number of bytes to send ahead of acks.
        sent_bytes: bytes sent on the stream.
        taken_bytes: bytes that the replica has acknowledged.
    """

    def __init__(self, budget: int, quiet_seconds: float = ServiceOptions.quiet_seconds) -> None:
        """`quiet_seconds`: see `ServiceOptions`."""
        self.budget, self._quiet_seconds = budget, quiet_seconds
        self.sent_bytes = self.taken_bytes = 0
        self._signal = Signal()
        self._moved: float | None = None

    def allows(self, size: int) -> bool:
        """Whether `size` more bytes may be sent. Without unacknowledged bytes, any message may be sent."""
        outstanding = self.sent_bytes - self.taken_bytes
        return outstanding <= 0 or outstanding + size <= self.budget

    def take_back(self, received_bytes: int) -> None:
        """Record the bytes that the replica has received since the stream began."""
        if received_bytes > self.sent_bytes:
            raise InvalidInput(f"acked {received_bytes} bytes, but only {self.sent_bytes} were sent")
        if received_bytes > self.taken_bytes:
            self.restart()
        self.taken_bytes = max(self.taken_bytes, received_bytes)
        self._signal.wake()

    def returned(self) -> Awaitable[object]:
        """An awaitable for the next ack after this call."""
        return self._signal.changed()

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Watch the replica while the block sends a release."""
        self._moved = time.monotonic()
        try:
            yield
        finally:
            self._moved = None

    def restart(self) -> None:
        """Restart the watch, because the replica received bytes, gets more, or waits for the service."""
        if self._moved is not None:
            self._moved = time.monotonic()

    @property
    def decision(self) -> Decision:
        """Whether the replica still makes progress."""
        if self._moved is None:
            return Decision(True, "nothing is being sent")
        quiet = time.monotonic() - self._moved
        if quiet > self._quiet_seconds:
            return Decision(False, f"it has received nothing of its release for {quiet:.0f} s")
        return Decision(True, "it is receiving")


# Maximum number of releases to send ahead of acks. Beyond that, the service collects all changes in one release: a
# slow replica then gets a row once, however often it changed, and does not fall further behind.
AHEAD = 4


@dataclass(frozen=True)
class SentRelease:
    """A release that was sent completely.

    Attributes:
        number: the replica's number after applying it. A repair has the number of the release that it repairs.
        version: the model's version of its rows.
        checksums: expected checksums of the tables afterwards, by slot.
        whole: slots of the tables that it contains completely.
        end_bytes: bytes of ids and values sent on the stream up to its end.
        sent_ns: time of sending, by `steady_ns`.
    """

    number: int
    version: int
    checksums: tuple[int, ...]
    whole: frozenset[int]
    end_bytes: int
    sent_ns: int


@dataclass(frozen=True)
class Acked:
    """The result of matching an ack to the releases sent.

    Attributes:
        sent: the release that it acknowledges for the first time; None if it repeats an earlier ack.
        compared: whether the replica's rows could be compared with the release.
        wrong: slots of the tables whose rows differ; the service sends these tables again, whole.
    """

    sent: SentRelease | None
    compared: bool = False
    wrong: frozenset[int] = NO_TABLES


# Pause after a failed repair; each further failure adds as much.
_PAUSE_SECONDS = 5.0


class SentReleases:
    """The unacknowledged releases of one replica, and its damaged tables."""

    def __init__(self, replica: Replica) -> None:
        self.damaged = NO_TABLES
        self._replica = replica
        self._room = Signal()
        self._sent = deque[SentRelease]()
        self._acknowledged: SentRelease | None = None  # The last one.
        self._wrong = NO_TABLES  # According to the last comparable ack.
        self._repairs = 0
        self._repaired_at = -math.inf
        self._count_unacked()

    @property
    def full(self) -> bool:
        """Whether the replica still has to apply `AHEAD` releases."""
        return len(self._sent) >= AHEAD

    def room(self) -> Awaitable[object]:
        """An awaitable for the next time that `full` becomes false."""
        return self._room.changed()

    @property
    def checksums(self) -> tuple[int, ...]:
        """The checksums of the last release, by slot."""
        last = self._sent[-1] if self._sent else self._acknowledged
        return last.checksums if last else ()

    def due(self, now: float) -> frozenset[int]:
        """Slots of the tables to send whole with the next release.

        Empty during the pause after a failed repair. `now` is in seconds, by any clock.
        """
        return NO_TABLES if now < self._repaired_at + _PAUSE_SECONDS * self._repairs else self.damaged

    def record(self, release: FrozenRelease, head: Head, end_bytes: int, now: float) -> None:
        """Record a release whose end is at `end_bytes` of the stream; `now` as in `due`."""
        sent = SentRelease(head.number, head.version, release.checksums, release.whole, end_bytes, steady_ns())
        self._sent.append(sent)
        self._replica.sent_number = head.number
        self._count_unacked()
        if self.damaged & release.whole:
            self.damaged -= release.whole
            self._repairs, self._repaired_at = self._repairs + 1, now

    def take(self, number: int, received_bytes: int, checksums: Mapping[int, int]) -> Acked:
        """Match an ack to the release that it acknowledges, and compare checksums.

        That is the last release with this number within the received bytes. The ack also acknowledges all earlier
        ones. If a table is already being sent whole, an earlier release does not cause it to be sent again.
        `checksums` are those of the replica's tables, by slot.
        """
        last_acked, full = None, self.full
        while self._sent:
            first = self._sent[0]
            if first.number > number or (first.number == number and first.end_bytes > received_bytes):
                break
            last_acked = self._sent.popleft()
        self._count_unacked()
        if full and not self.full:
            self._room.wake()
        repairing = frozenset[int]().union(*(each.whole for each in self._sent))
        sent = expected = last_acked if last_acked and last_acked.number == number else None
        if sent:
            self._acknowledged = sent
        elif pending := (self.damaged | repairing) & self._wrong:
            return Acked(None, wrong=pending)
        elif checksums and not self._sent and (last := self._acknowledged) and last.number == number:
            expected = last  # The replica read its rows again.
        if expected is None:
            return Acked(None)
        # A table that was added after the release was frozen had no rows.
        known = dict(enumerate(expected.checksums))
        wrong = frozenset(slot for slot, checksum in checksums.items() if checksum != known.get(slot, 0))
        # A later release may have repaired the rows.
        self.damaged = (self.damaged - frozenset(checksums) | wrong) - repairing
        self._wrong = wrong
        if checksums and not wrong:
            self._repairs = 0
        return Acked(sent, compared=True, wrong=wrong)

    def _count_unacked(self) -> None:
        self._replica.unacked = len(self._sent)
        self._replica.unacked_ns = self._sent[0].sent_ns if self._sent else 0


def check_ack(ack: subscribe_pb2.Ack, forms: Sequence[TableForm]) -> None:
    """Check that an ack names only existing tables, each at most once."""
    tables = len(forms)
    if (most := max(len(ack.sums), len(ack.unbound))) > tables:
        raise InvalidInput(f"an ack names {most} tables, but there are only {tables}")
    slots = [*(each.slot for each in ack.sums), *ack.unbound]
    if unknown := [slot for slot in slots if slot >= tables]:
        raise InvalidInput(f"an ack names table {unknown[0]}, but there are only {tables}")


def unbound(ack: subscribe_pb2.Ack, forms: Sequence[TableForm]) -> tuple[str, ...]:
    """Names of the tables that a replica lacks: it lists them, or sends checksums only for others."""
    everything = range(len(forms))
    shown = {each.slot for each in ack.sums} or everything
    lacking = {*ack.unbound, *set(everything).difference(shown)}
    return tuple(forms[slot].spec.name for slot in sorted(lacking))


class DeliveryTimes:
    """Delivery times of one stream, for the consumer's statistics."""

    def __init__(self, consumer: Consumer, *, guest: bool) -> None:
        self.held = 0
        self._consumer, self._guest = consumer, guest
        self._begun_ns = steady_ns()

    def record(self, sent: SentRelease, model: Model) -> None:
        """Record that the replica has applied a release."""
        if sent.version <= self.held:
            return
        before, self.held = self.held, sent.version
        sealed_ns = model.seals.succession.since_ns(self.held)
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


class RepeatedRead:
    """The verification of a replica on one stream."""

    def __init__(self, verification: ReplicaVerification) -> None:
        self._verification = verification
        self._asked = 0  # Number of the last request on this stream.
        self._continues = False
        self._version, self._checksums = 0, tuple[int, ...]()
        self._differing = dict[str, TableComparison]()  # All so far; some may be repaired by the end.

    @property
    def due(self) -> int:
        """The number of the request to send now; 0 = none."""
        number = self._verification.open
        return number if self._continues or number > self._asked else 0

    def ask(self, number: int, version: int, checksums: Sequence[int]) -> None:
        """Record a request, with the last version sent and the checksums of its tables by slot."""
        if number != self._asked:
            self._differing = {}
        self._asked, self._continues = number, False
        self._version, self._checksums = version, tuple(checksums)

    def take(self, ack: subscribe_pb2.Ack, forms: Sequence[TableForm]) -> None:
        """Process the replica's answer."""
        if ack.read_again > self._asked:
            raise InvalidInput(f"an ack has read_again {ack.read_again}, which the service did not send")
        if ack.read_again == self._asked == self._verification.open:
            tables = [self._ever(each) for each in compared(ack, forms, self._checksums)]
            self._continues = ack.rows_left > 0
            if self._continues:
                rows = sum(each.spec.rows for each in forms)
                self._verification.note(max(0, rows - ack.rows_left), rows)
            else:
                self._verification.answer(self._asked, VerificationResult(self._version, tables))

    def _ever(self, now: TableComparison) -> TableComparison:
        """The first difference of a table since the request, else the current result."""
        if now.status is ComparisonStatus.DIFFERS:
            self._differing.setdefault(now.table, now)
        return self._differing.get(now.table, now)


_REASONS = {
    ComparisonStatus.EQUAL: "",
    ComparisonStatus.DIFFERS: "its checksum differs; the rows that differ are unknown",
    ComparisonStatus.NOT_HELD: "the replica does not have this table",
    ComparisonStatus.NOT_SHOWN: "the replica's rows cannot be read back",
}


def compared(
    ack: subscribe_pb2.Ack, forms: Sequence[TableForm], checksums: Sequence[int]
) -> list[TableComparison]:
    """Compare a replica's checksums with the expected ones, table by table."""
    sums = {each.slot: each.sum for each in ack.sums}
    expected = [*checksums, *[0] * (len(forms) - len(checksums))]
    results = []
    for slot, form in enumerate(forms):
        held, checksum = sums.get(slot), expected[slot]
        if held is not None:
            status = ComparisonStatus.EQUAL if held == checksum else ComparisonStatus.DIFFERS
        else:
            status = ComparisonStatus.NOT_HELD if sums or slot in ack.unbound else ComparisonStatus.NOT_SHOWN
        wanted = f"{checksum:016x}" if checksum or held is not None else ""
        shown = f"{held:016x}" if held is not None else ""
        rows = 0 if held is None else form.spec.rows
        results.append(TableComparison(form.spec.name, rows, status, wanted, shown, _REASONS[status]))
    return results


# Number of acks to accept at once, plus two for each message sent. Beyond that, accept one ack per pause.
_FIRST_ACKS, _ACKS_OF_A_MESSAGE = 32, 2


class Acks:
    """The acks of one replica's stream. For the event loop.

    Attributes:
        feed: the source of the replica's releases, once the stream is open.
        forms: the tables of the stream, once it is open.
        sent: position of the newest release sent.
        messages: number of messages sent.
        token: newest token from the replica; 0 before the first.
        goodbye: whether the replica has said goodbye.
        stopped: the replica's own reason for stopping; empty if it has not stopped.
        damaged: wakes the stream when the replica's rows differ from those sent.
    """

    def __init__(
        self,
        consumer: Consumer,
        replica: Replica,
        registry: ConsumerRegistry,
        models: Models,
        credit: Credit,
        emit: Callable[[EventKind, str], None],
        pace_seconds: float,
    ) -> None:
        self._consumer, self._replica, self._stream = consumer, replica, replica.stream
        self._registry = registry
        self._models = models
        self._credit = credit
        self._emit, self._pace_seconds = emit, pace_seconds
        self.under_way = SentReleases(replica)
        self.repeated_read = RepeatedRead(replica.verification)
        self.times = DeliveryTimes(consumer, guest=replica.guest)
        self.feed: Feed | None = None
        self.forms: list[TableForm] = []
        self.sent = Position()
        self.messages = self.token = 0
        self.goodbye, self.stopped = False, ""
        self.damaged = Signal()

    async def run(self, requests: AsyncIterator[subscribe_pb2.SubscribeRequest]) -> None:
        """Process acks until the replica ends its side of the stream."""
        number = 0
        async for request in requests:
            if request.WhichOneof("message") != "ack":
                raise InvalidInput("expected only acks after the open message")
            self._take(request.ack)
            number += 1
            del request  # Otherwise its memory would stay in use until the next one.
            if number > _FIRST_ACKS + _ACKS_OF_A_MESSAGE * self.messages:
                await asyncio.sleep(self._pace_seconds)  # Meanwhile gRPC slows the replica down.

    def _take(self, ack: subscribe_pb2.Ack) -> None:
        self.goodbye |= ack.goodbye
        self.stopped = ack.stopped
        self._credit.take_back(ack.received_bytes)
        self.token = ack.token or self.token
        check_ack(ack, self.forms)
        if ack.read_again:
            self.repeated_read.take(ack, self.forms)
        if not ack.HasField("applied"):
            return
        applied = position_from_message(ack.applied)
        if applied.history != self.sent.history or applied.number > self.sent.number:
            raise InvalidInput(
                f"acked number {applied.number} of history {applied.history!r}, but only number "
                f"{self.sent.number} of {self.sent.history!r} was sent"
            )
        # A repeated ack changes nothing.
        if self._replica.stream is not self._stream or applied.number < self._replica.applied.number:
            return
        checksums = {each.slot: each.sum for each in ack.sums}
        acked = self.under_way.take(applied.number, self._credit.taken_bytes, checksums)
        sent = acked.sent
        if acked.wrong:
            self._report(acked.wrong, helpless=bool(sent and acked.wrong & sent.whole))
            return
        if sent and (model := self._models.get(self._consumer.model)):
            self.times.record(sent, model)
        if sent and self.feed and (ack.sums or self._consumer.policy.mode is Mode.IDS):
            self._replica.note_held(self.feed.seals.checksum_of(sent.version))
        if acked.compared:  # And nothing differs.
            if self._replica.damaged and ack.sums:
                names = ", ".join(self._replica.damaged)
                self._emit(EventKind.REPLICA_REPAIRED, f"has the correct rows again in {names}")
                self._replica.damaged = ()
            self._replica.checked, self._replica.unbound = bool(ack.sums), unbound(ack, self.forms)
        elif applied.number > self._replica.applied.number:
            self._replica.checked = False
        if applied.number:
            self._replica.rewind = None  # None of its earlier rows remain.
        # Use the seal of this history, not the replica's.
        seal = self.feed.seal_of(applied.number) if self.feed else 0
        self._registry.acknowledge(self._consumer, self._replica, replace(applied, seal=seal))

    def _report(self, damaged: frozenset[int], *, helpless: bool) -> None:
        """Schedule damaged tables to be sent again. Report each once, and again if the repair failed."""
        names = tuple(self.forms[slot].spec.name for slot in sorted(damaged))
        more = set(names) - set(self._replica.damaged)
        self._consumer.damages += len(more)
        self._replica.note_damage(names)
        if more or helpless:
            self._emit(EventKind.REPLICA_DAMAGED, f"its rows differ from those sent in {', '.join(names)}")
        self.damaged.wake()
