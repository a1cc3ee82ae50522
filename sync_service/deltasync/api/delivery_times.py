"""How long releases take to one replica.

A version counts if it was sealed while the replica was connected. What somebody who comes later lacks is lag: an
old version that a new replica is given says nothing of how long the way is. Guests only look.
"""

import time

from deltasync.api.sent_releases import SentRelease
from deltasync.consumers.consumer import Consumer
from deltasync.core.seal import seal_of
from deltasync.core.steady_clock import steady_ns
from deltasync.feeds.model import Model


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
