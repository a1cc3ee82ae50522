"""Whether a replica holds what it was sent: its checksums beside the service's."""

import math
from collections.abc import Mapping
from types import MappingProxyType

from deltasync.api.sent_releases import SentRelease, SentReleases
from deltasync.core.rows import Ids
from deltasync.feeds.repair import NO_REPAIR, Repair

_NO_SLOTS: frozenset[int] = frozenset()

# The pause after a repair that did not help; it grows by as much with each further one.
_PAUSE_SECONDS = 5.0


class ReplicaAudit:
    """What a replica says that it holds after each release that it was sent on one stream.

    Attributes:
        damaged: slots of the tables that are to be repaired.
        compared: whether the last ack was of a release that it could be compared with.
    """

    def __init__(self, under_way: SentReleases) -> None:
        self.damaged = _NO_SLOTS
        self.compared = False
        self._under_way = under_way
        self._rows: Mapping[int, Ids] = {}  # Of damaged tables, the damaged rows, where these are known.
        self._by_rows = _NO_SLOTS  # Of which the damaged rows were sent again.
        self._wrong = _NO_SLOTS  # By the last ack that could be compared.
        self._repairs = 0
        self._repaired_at = -math.inf

    def due_repair(self, now: float) -> Repair:
        """What to send again with the next release: it is due until it was sent.

        Nothing during the pause after a repair that did not help. `now` is in seconds, by any clock.
        """
        if not self.damaged or now < self._repaired_at + _PAUSE_SECONDS * self._repairs:
            return NO_REPAIR
        by_rows = self.damaged & self._rows.keys() - self._by_rows  # If that does not help, the whole table.
        return Repair(self.damaged - by_rows, {slot: self._rows[slot] for slot in by_rows})

    def note_repair(self, repair: Repair, now: float) -> None:
        """Note that a repair was sent. `now` is of the same clock."""
        if repair.slots:
            self.damaged, self._by_rows = self.damaged - repair.slots, self._by_rows | repair.rows.keys()
            self._repairs, self._repaired_at = self._repairs + 1, now

    def check(
        self,
        applied: int,
        sent: SentRelease | None,
        checksums: Mapping[int, int],
        rows: Mapping[int, Ids] = MappingProxyType({}),
    ) -> frozenset[int]:
        """Slots of the tables that differ in a replica that has applied up to the number `applied`.

        A table that is being repaired is not repaired again for releases that were sent before. `sent` is what the
        ack is of, None if that was acknowledged before; `rows` are those that the replica knows to be damaged, by
        slot.
        """
        repairing = self._under_way.repaired
        if sent is None:
            if pending := (self.damaged | repairing) & self._wrong:
                return pending
            sent = self._again(applied) if checksums and not self._under_way else None
        self.compared = sent is not None
        if sent is None:
            return _NO_SLOTS
        wrong = frozenset(slot for slot, checksum in checksums.items() if checksum != _at(sent.checksums, slot))
        # A later release may have had the damaged rows.
        self.damaged, self._rows = (self.damaged - frozenset(checksums) | wrong) - repairing, rows
        self._wrong = wrong
        if checksums and not wrong:
            self._repairs, self._by_rows = 0, _NO_SLOTS
        return wrong

    def _again(self, applied: int) -> SentRelease | None:
        """The last release acknowledged, if it is of that number: the replica has looked at its rows again."""
        last = self._under_way.acknowledged
        return last if last and last.number == applied else None


def _at(checksums: tuple[int, ...], slot: int) -> int:
    """0 for a table that was added after the release was frozen: it has no rows there."""
    return checksums[slot] if slot < len(checksums) else 0
