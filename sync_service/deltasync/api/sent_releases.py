"""Releases that were sent on a replica's stream, until the replica says what became of them."""

from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass

from deltasync.consumers.consumer import Replica
from deltasync.core.signals import Signal
from deltasync.core.steady_clock import steady_ns
from deltasync.feeds.frozen_release import FrozenRelease, Head

# So many are sent ahead. What changes until the first is acknowledged comes in one: a replica that applies slowly
# is sent each row once, however often that has changed, and is not further behind with each release.
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


class SentReleases:
    """What is under way to one replica: sent, and not acknowledged yet.

    Attributes:
        acknowledged: the last that was acknowledged; None before the first.
    """

    def __init__(self, replica: Replica) -> None:
        self.acknowledged: SentRelease | None = None
        self._replica = replica
        self._room = Signal()
        self._sent = deque[SentRelease]()
        self._note_unacked()

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def full(self) -> bool:
        """Whether the replica has as many to apply as are sent ahead."""
        return len(self._sent) >= AHEAD

    def room(self) -> Awaitable[object]:
        """To be awaited: that it has not as many any more, from this call on."""
        return self._room.changed()

    @property
    def whole(self) -> frozenset[int]:
        """Slots of the tables of which all rows are under way."""
        return frozenset[int]().union(*(each.whole for each in self._sent))

    @property
    def checksums(self) -> tuple[int, ...]:
        """Those of what was sent last, by slot."""
        last = self._sent[-1] if self._sent else self.acknowledged
        return last.checksums if last else ()

    def note(self, release: FrozenRelease, head: Head, end_bytes: int) -> None:
        """Note that a release was sent, with which the stream has carried so many bytes."""
        sent = SentRelease(head.number, head.version, release.checksums, release.whole, end_bytes, steady_ns())
        self._sent.append(sent)
        self._replica.sent_number = head.number
        self._note_unacked()

    def take(self, number: int, received_bytes: int) -> SentRelease | None:
        """Match an ack to the last release of that number within the bytes that were received.

        That release, and all that were sent before it, are no longer under way.

        Returns:
            The release; None if it was acknowledged before.
        """
        taken, full = None, self.full
        while self._sent and _reaches(self._sent[0], number, received_bytes):
            taken = self._sent.popleft()
        self._note_unacked()
        if full and not self.full:
            self._room.wake()
        if taken is None or taken.number != number:
            return None
        self.acknowledged = taken
        return taken

    def _note_unacked(self) -> None:
        self._replica.unacked = len(self._sent)
        self._replica.unacked_ns = self._sent[0].sent_ns if self._sent else 0


def _reaches(sent: SentRelease, number: int, received_bytes: int) -> bool:
    """Whether an ack of that number is of this release or of a later one."""
    return sent.number < number or (sent.number == number and sent.end_bytes <= received_bytes)
