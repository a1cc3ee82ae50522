"""Whether a replica holds what it was sent: its checksums beside the service's."""

import math
from collections.abc import Mapping

from deltasync.api.sent_releases import SentRelease, SentReleases
from deltasync.feeds.frozen_release import NO_TABLES

# The pause after a repair that did not help; it grows by as much with each further one.
_PAUSE_SECONDS = 5.0


class ReplicaAudit:
    """What a replica says that it holds after each release that it was sent on one stream.

    Attributes:
        damaged: slots of the tables that are to be sent again, whole.
        compared: whether the last ack was of a release that it could be compared with.
    """

    def __init__(self, under_way: SentReleases) -> None:
        self.damaged = NO_TABLES
        self.compared = False
        self._under_way = under_way
        self._wrong = NO_TABLES  # By the last ack that could be compared.
        self._repairs = 0
        self._repaired_at = -math.inf

    def due(self, now: float) -> frozenset[int]:
        """Slots of the tables to send whole with the next release: they are due until they were sent.

        None during the pause after a repair that did not help. `now` is in seconds, by any clock.
        """
        return NO_TABLES if now < self._repaired_at + _PAUSE_SECONDS * self._repairs else self.damaged

    def note_sent(self, whole: frozenset[int], now: float) -> None:
        """Note that tables were sent whole. `now` is of the same clock."""
        if self.damaged & whole:
            self.damaged -= whole
            self._repairs, self._repaired_at = self._repairs + 1, now

    def check(self, applied: int, sent: SentRelease | None, checksums: Mapping[int, int]) -> frozenset[int]:
        """Slots of the tables that differ in a replica that has applied up to the number `applied`.

        A table that is on its way whole is not sent again for releases that were sent before. `sent` is what the
        ack is of, None if that was acknowledged before.
        """
        repairing = self._under_way.whole
        if sent is None:
            if pending := (self.damaged | repairing) & self._wrong:
                return pending
            sent = self._again(applied) if checksums and not self._under_way else None
        self.compared = sent is not None
        if sent is None:
            return NO_TABLES
        wrong = frozenset(slot for slot, checksum in checksums.items() if checksum != _at(sent.checksums, slot))
        # A later release may have had the damaged rows.
        self.damaged = (self.damaged - frozenset(checksums) | wrong) - repairing
        self._wrong = wrong
        if checksums and not wrong:
            self._repairs = 0
        return wrong

    def _again(self, applied: int) -> SentRelease | None:
        """The last release acknowledged, if it is of that number: the replica has looked at its rows again."""
        last = self._under_way.acknowledged
        return last if last and last.number == applied else None


def _at(checksums: tuple[int, ...], slot: int) -> int:
    """0 for a table that was added after the release was frozen: it has no rows there."""
    return checksums[slot] if slot < len(checksums) else 0
