"""Releases that were sent to a replica, until it says what became of them, and whether it holds them."""

import math
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass

from deltasync.base.clock import steady_ns
from deltasync.base.errors import InvalidInput
from deltasync.base.waiting import Signal
from deltasync.consumers.consumer import Replica, ReplicaVerification, Verified
from deltasync.core.delivery import Delivery
from deltasync.core.verified import VerifiedStatus, VerifiedTable
from deltasync.model.releases import NO_TABLES, FrozenRelease, Head
from deltasync.v1 import subscribe_pb2

# Releases sent ahead of acks. What changes until the first ack comes in one release: a replica that applies slowly
# gets each row once, however often the row has changed, and falls no further behind with each release.
AHEAD = 4


@dataclass(frozen=True)
class SentRelease:
    """A release that was sent whole.

    Attributes:
        number: what a replica holds that has applied it. A release that repairs another one has its number.
        version: the model's version that its rows are of.
        checksums: of the tables as they are then, by slot.
        whole: slots of the tables that it has all rows of.
        end_bytes: bytes of ids and values that the stream has carried with it, from its beginning.
        sent_ns: when it was sent, by `steady_ns`.
    """

    number: int
    version: int
    checksums: tuple[int, ...]
    whole: frozenset[int]
    end_bytes: int
    sent_ns: int


@dataclass(frozen=True)
class Acked:
    """What an ack says of what was sent.

    Attributes:
        sent: the release that it is the first ack of; None if it repeats an earlier one.
        compared: whether what the replica holds could be compared with what it was sent.
        wrong: slots of the tables of which it holds other rows: they are sent again, whole.
    """

    sent: SentRelease | None
    compared: bool = False
    wrong: frozenset[int] = NO_TABLES


# The pause after a repair that did not help; it grows by as much with each further one.
_PAUSE_SECONDS = 5.0


class SentReleases:
    """What is under way to one replica: sent, and not acknowledged yet; and what is to be sent again.

    Attributes:
        damaged: slots of the tables that are to be sent again, whole.
    """

    def __init__(self, replica: Replica) -> None:
        self.damaged = NO_TABLES
        self._replica = replica
        self._room = Signal()
        self._sent = deque[SentRelease]()
        self._acknowledged: SentRelease | None = None  # The last one.
        self._wrong = NO_TABLES  # By the last ack that could be compared.
        self._repairs = 0
        self._repaired_at = -math.inf
        self._note_unacked()

    @property
    def full(self) -> bool:
        """Whether the replica has `AHEAD` releases to apply."""
        return len(self._sent) >= AHEAD

    def room(self) -> Awaitable[object]:
        """Await this: the replica has fewer than `AHEAD` releases to apply, from this call on."""
        return self._room.changed()

    @property
    def checksums(self) -> tuple[int, ...]:
        """The checksums of the release that was sent last, by slot."""
        last = self._sent[-1] if self._sent else self._acknowledged
        return last.checksums if last else ()

    def due(self, now: float) -> frozenset[int]:
        """Slots of the tables to send whole with the next release.

        Empty during the pause after a repair that did not help. `now` is in seconds, by any clock.
        """
        return NO_TABLES if now < self._repaired_at + _PAUSE_SECONDS * self._repairs else self.damaged

    def note(self, release: FrozenRelease, head: Head, end_bytes: int, now: float) -> None:
        """Note that a release was sent, after which the stream has carried `end_bytes`; `now` as in `due`."""
        sent = SentRelease(head.number, head.version, release.checksums, release.whole, end_bytes, steady_ns())
        self._sent.append(sent)
        self._replica.sent_number = head.number
        self._note_unacked()
        if self.damaged & release.whole:
            self.damaged -= release.whole
            self._repairs, self._repaired_at = self._repairs + 1, now

    def take(self, number: int, received_bytes: int, checksums: Mapping[int, int]) -> Acked:
        """Match an ack to the last release of that number within the bytes that were received, and compare.

        That release, and all that were sent before it, are no longer under way. A table that is on its way whole
        is not sent again for releases that were sent before. `checksums` are of the replica's tables, by slot.
        """
        taken, full = None, self.full
        while self._sent and _reaches(self._sent[0], number, received_bytes):
            taken = self._sent.popleft()
        self._note_unacked()
        if full and not self.full:
            self._room.wake()
        repairing = frozenset[int]().union(*(each.whole for each in self._sent))
        sent = expected = taken if taken and taken.number == number else None
        if sent:
            self._acknowledged = sent
        elif pending := (self.damaged | repairing) & self._wrong:
            return Acked(None, wrong=pending)
        elif checksums and not self._sent and (last := self._acknowledged) and last.number == number:
            expected = last  # The replica has read its rows again.
        if expected is None:
            return Acked(None)
        wrong = frozenset(
            slot for slot, checksum in checksums.items() if checksum != _at(expected.checksums, slot)
        )
        # A later release may have had the damaged rows.
        self.damaged = (self.damaged - frozenset(checksums) | wrong) - repairing
        self._wrong = wrong
        if checksums and not wrong:
            self._repairs = 0
        return Acked(sent, compared=True, wrong=wrong)

    def _note_unacked(self) -> None:
        self._replica.unacked = len(self._sent)
        self._replica.unacked_ns = self._sent[0].sent_ns if self._sent else 0


def _reaches(sent: SentRelease, number: int, received_bytes: int) -> bool:
    """Whether an ack of that number is of this release or of a later one."""
    return sent.number < number or (sent.number == number and sent.end_bytes <= received_bytes)


def _at(checksums: tuple[int, ...], slot: int) -> int:
    """0 for a table that was added after the release was frozen: it has no rows there."""
    return checksums[slot] if slot < len(checksums) else 0


def check_ack(ack: subscribe_pb2.Ack, deliveries: Sequence[Delivery]) -> None:
    """Check that an ack is of tables that there are, each once at most.

    Raises:
        InvalidInput: it is not.
    """
    tables = len(deliveries)
    if (most := max(len(ack.sums), len(ack.unbound))) > tables:
        raise InvalidInput(f"an ack of {most} tables, but there are only {tables}")
    slots = [*(each.slot for each in ack.sums), *ack.unbound]
    if unknown := [slot for slot in slots if slot >= tables]:
        raise InvalidInput(f"an ack of table {unknown[0]}, but there are only {tables}")


def unbound(ack: subscribe_pb2.Ack, deliveries: Sequence[Delivery]) -> tuple[str, ...]:
    """Names of the tables that a replica does not hold: those it names, and those alone without a checksum."""
    everything = range(len(deliveries))
    shown = {each.slot for each in ack.sums} or everything
    lacking = {*ack.unbound, *set(everything).difference(shown)}
    return tuple(deliveries[slot].spec.name for slot in sorted(lacking))


class ReadingAgain:
    """One stream's part in a replica's verification."""

    def __init__(self, verification: ReplicaVerification) -> None:
        self._verification = verification
        self._told = 0  # The last question that the replica was asked here.
        self._goes_on = False
        self._version, self._checksums = 0, tuple[int, ...]()
        self._differing = dict[str, VerifiedTable]()  # Found so far: by the end they may be repaired.

    @property
    def due(self) -> int:
        """The number of what the replica is to be asked now; 0 if there is nothing."""
        number = self._verification.open
        return number if self._goes_on or number > self._told else 0

    def ask(self, number: int, version: int, checksums: Sequence[int]) -> None:
        """Note that it is asked, when it has been sent a version, whose tables have these checksums by slot."""
        if number != self._told:
            self._differing = {}
        self._told, self._goes_on = number, False
        self._version, self._checksums = version, tuple(checksums)

    def take(self, ack: subscribe_pb2.Ack, deliveries: Sequence[Delivery]) -> None:
        """Take what the replica has found, if an ack says that.

        Raises:
            InvalidInput: it was not asked.
        """
        if not ack.read_again:
            return
        if ack.read_again > self._told:
            raise InvalidInput(f"an ack of read_again {ack.read_again}, which was not asked")
        if ack.read_again == self._told == self._verification.open:
            found = [self._ever(each) for each in compared(ack, deliveries, self._checksums)]
            self._goes_on = ack.rows_left > 0
            if self._goes_on:
                rows = sum(each.spec.rows for each in deliveries)
                self._verification.note(max(0, rows - ack.rows_left), rows)
            else:
                self._verification.answer(self._told, Verified(self._version, found))

    def _ever(self, now: VerifiedTable) -> VerifiedTable:
        """What was found of a table since the replica was asked."""
        if now.status is VerifiedStatus.DIFFERS:
            self._differing.setdefault(now.table, now)
        return self._differing.get(now.table, now)


def compared(
    ack: subscribe_pb2.Ack, deliveries: Sequence[Delivery], checksums: Sequence[int]
) -> list[VerifiedTable]:
    """How what a replica has found of each table compares with what it was sent.

    Args:
        ack: its sums.
        deliveries: the tables, by slot.
        checksums: what the sums should be, by slot; 0 from the end on.
    """
    sums = {each.slot: each.sum for each in ack.sums}
    expected = [*checksums, *[0] * (len(deliveries) - len(checksums))]
    return [
        _compared(delivery, expected[slot], sums.get(slot), _lacking(slot, ack, sums))
        for slot, delivery in enumerate(deliveries)
    ]


def _lacking(slot: int, ack: subscribe_pb2.Ack, sums: Mapping[int, int]) -> VerifiedStatus:
    """What is to be said of a table without a checksum."""
    return VerifiedStatus.NOT_HELD if sums or slot in ack.unbound else VerifiedStatus.NOT_SHOWN


def _compared(delivery: Delivery, checksum: int, held: int | None, lacking: VerifiedStatus) -> VerifiedTable:
    name, rows = delivery.spec.name, delivery.spec.rows
    if held is None:
        return VerifiedTable(name, 0, lacking, checksum)
    status = VerifiedStatus.EQUAL if held == checksum else VerifiedStatus.DIFFERS
    return VerifiedTable(name, rows, status, checksum, held)
