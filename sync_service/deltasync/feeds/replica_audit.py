"""Whether a replica holds what it was sent: its checksums beside the service's."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from deltasync.core.rows import Ids
from deltasync.feeds.frozen_release import FrozenRelease
from deltasync.feeds.repair import NO_REPAIR, Repair

_NO_SLOTS: frozenset[int] = frozenset()

# Acknowledgements of releases older than these are not compared any more.
_KEPT_RELEASES = 1024
# The pause after a repair that did not help; it grows by as much with each further one.
_PAUSE_SECONDS = 5.0


@dataclass(frozen=True)
class _Sent:
    """A release that was sent, and not acknowledged yet."""

    number: int
    checksums: tuple[int, ...]
    repaired: frozenset[int]
    end_bytes: int


class ReplicaAudit:
    """The releases sent on one stream, and what the replica says that it holds after each.

    Attributes:
        damaged: slots of the tables that are to be repaired.
        compared: whether the last ack was of a release that it could be compared with.
    """

    def __init__(self) -> None:
        self.damaged = _NO_SLOTS
        self.compared = False
        self._rows: Mapping[int, Ids] = {}  # Of damaged tables, the damaged rows, where these are known.
        self._by_rows = _NO_SLOTS  # Of which the damaged rows were sent again.
        self._sent: deque[_Sent] = deque(maxlen=_KEPT_RELEASES)
        self._acknowledged: _Sent | None = None  # The last of them.
        self._repairs = 0
        self._repaired_at = -math.inf

    def expect(self, release: FrozenRelease, end_bytes: int, now: float) -> None:
        """Note that a release was sent, and with it what it repairs.

        `end_bytes` is what the stream has carried with it, from its beginning; `now` is in seconds, by any clock.
        """
        repair = release.repair
        if release.head:
            self._sent.append(_Sent(release.head.number, release.checksums, repair.slots, end_bytes))
        if repair.slots:
            self.damaged, self._by_rows = self.damaged - repair.slots, self._by_rows | repair.rows.keys()
            self._repairs, self._repaired_at = self._repairs + 1, now

    @property
    def expected(self) -> tuple[int, ...]:
        """The checksums, by slot, of what was sent last."""
        last = self._sent[-1] if self._sent else self._acknowledged
        return last.checksums if last else ()

    def due_repair(self, now: float) -> Repair:
        """What to send again with the next release: it is due until it was sent.

        Nothing during the pause after a repair that did not help. `now` is of the same clock.
        """
        if not self.damaged or now < self._repaired_at + _PAUSE_SECONDS * self._repairs:
            return NO_REPAIR
        by_rows = self.damaged & self._rows.keys() - self._by_rows  # If that does not help, the whole table.
        return Repair(self.damaged - by_rows, {slot: self._rows[slot] for slot in by_rows})

    def check(
        self,
        applied: int,
        checksums: Mapping[int, int],
        received_bytes: int,
        rows: Mapping[int, Ids] = MappingProxyType({}),
    ) -> frozenset[int]:
        """Slots of the tables that differ in a replica that has applied up to the number `applied`.

        A table that is being repaired is not repaired again for releases that were sent before. A repair has the
        number of the release that it repairs; `received_bytes` tells which of the two an ack is of. `rows` are
        those that the replica knows to be damaged, by slot.
        """
        sent = self._take(applied, received_bytes)
        repairing = _NO_SLOTS.union(*(each.repaired for each in self._sent))
        if sent is None:
            if pending := self.damaged | repairing:
                return pending
            sent = self._again(applied) if checksums and not self._sent else None
        self.compared = sent is not None
        if sent is None:
            return _NO_SLOTS
        wrong = frozenset(slot for slot, checksum in checksums.items() if checksum != _at(sent.checksums, slot))
        self.damaged, self._rows = self.damaged | wrong - repairing, rows
        if not wrong:
            self._repairs, self._by_rows = 0, _NO_SLOTS
        return wrong

    def _take(self, applied: int, received_bytes: int) -> _Sent | None:
        """The oldest of the releases of that number; those before it are not acknowledged any more."""
        while self._sent and self._sent[0].number < applied:
            self._sent.popleft()
        first = self._sent[0] if self._sent else None
        if not first or first.number != applied or first.end_bytes > received_bytes:
            return None
        self._acknowledged = self._sent.popleft()
        return self._acknowledged

    def _again(self, applied: int) -> _Sent | None:
        """The last release acknowledged, if it is of that number: the replica has looked at its rows again."""
        last = self._acknowledged
        return last if last and last.number == applied else None


def _at(checksums: tuple[int, ...], slot: int) -> int:
    """0 for a table that was added after the release was frozen: it has no rows there."""
    return checksums[slot] if slot < len(checksums) else 0
