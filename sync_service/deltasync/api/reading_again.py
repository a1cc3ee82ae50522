"""Asking the replica of one stream to read all of its rows again, and comparing what it finds."""

from collections.abc import Mapping, Sequence

from deltasync.consumers.verification import Verification, Verified
from deltasync.core.delivery import Delivery
from deltasync.core.errors import InvalidInput
from deltasync.core.verified import VerifiedStatus, VerifiedTable
from deltasync.v1 import subscribe_pb2


class ReadingAgain:
    """One stream's part in a replica's verification."""

    def __init__(self, verification: Verification) -> None:
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
