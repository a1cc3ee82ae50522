"""Releases that were sent to one replica, until it says what became of them: how many, and how long they take.

A version counts if it was sealed while the replica was connected. What somebody who comes later lacks is lag: an
old version that a new replica is given says nothing of how long the way is. Guests only look.
"""

import time
from collections import deque
from collections.abc import Awaitable

from deltasync.consumers.consumer import Consumer, Replica
from deltasync.core.seal import seal_of
from deltasync.core.signals import Signal
from deltasync.core.steady_clock import steady_ns
from deltasync.feeds.model import Model

# So many are sent ahead. What changes until the first is acknowledged comes in one: a replica that applies slowly
# is sent each row once, however often that has changed, and is not further behind with each release.
AHEAD = 4


class SentReleases:
    """When each release was sent whole on a stream, until its replica acknowledges it.

    Attributes:
        held: the version that the replica holds.
    """

    def __init__(self, consumer: Consumer, replica: Replica) -> None:
        self.held = 0
        self._consumer, self._replica = consumer, replica
        self._begun_ns = steady_ns()
        self._room = Signal()
        self._sent = deque[tuple[int, int, int]]()  # Number and version, and when by `steady_ns`.
        self._note_unacked()

    @property
    def full(self) -> bool:
        """Whether the replica has as many to apply as are sent ahead."""
        return len(self._sent) >= AHEAD

    def room(self) -> Awaitable[object]:
        """To be awaited: that it has not as many any more, from this call on."""
        return self._room.changed()

    def note_sent(self, number: int, version: int) -> None:
        """Note that a release of a version was sent."""
        self._sent.append((number, version, steady_ns()))
        self._note_unacked()

    def note_ack(self, number: int, model: Model | None, *, held: bool) -> None:
        """Note that the replica has applied a release, and whether it then holds what it was sent."""
        full, newest = self.full, None
        while self._sent and self._sent[0][0] <= number:
            newest = self._sent.popleft()
        if newest is None:
            return
        self._note_unacked()
        if full:
            self._room.wake()
        if held and model and newest[1] > self.held:
            before, (_, self.held, sent_ns) = self.held, newest
            sealed_ns = model.succession.since_ns(self.held)
            if not self._replica.guest and sealed_ns is not None and sealed_ns >= self._begun_ns:
                self._count(model, before, sent_ns)

    def _note_unacked(self) -> None:
        self._replica.unacked = len(self._sent)
        self._replica.unacked_ns = self._sent[0][2] if self._sent else 0

    def _count(self, model: Model, before: int, sent_ns: int) -> None:
        durations, now_ns = self._consumer.durations, steady_ns()
        release = model.recent.deliver(self._consumer.name, before, self.held, sent_ns, self._begun_ns)
        if release is not None:
            durations.release.add(release)
        durations.ack.add((now_ns - sent_ns) / 1e9)
        if model.seals and model.seals[0].version <= self.held:
            ended = seal_of(self.held, model.seals).step_end_unix_ns
            durations.note_freshness(max(0, time.time_ns() - ended) / 1e9)
