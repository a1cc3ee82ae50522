"""How long each part of a cut's way takes, from the trainer's step to the replicas."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from deltasync.base.clock import LONG_BOUNDS, Durations, steady_ns
from deltasync.core.seal import Seal

SERVICE_PARTS = ("gather", "send", "seal", "log", "apply")


KEPT_CUTS = 200


_RECENT = 500


class DeliveryDurations:
    """How long the way from the model's tables to a consumer's replicas took, since the service started.

    Attributes:
        release: seconds until a replica had been sent a version whole.
        ack: from then until it said that it holds it.
        freshness: from the end of the trainer's step until it said so; by two machines' clocks.
        recent: the last ones of freshness, the shortest first.
    """

    def __init__(self) -> None:
        self.release, self.ack = Durations(LONG_BOUNDS), Durations(LONG_BOUNDS)
        self.freshness, self.recent = Durations(LONG_BOUNDS), list[float]()
        self._in_turn = deque[float]()

    def note_freshness(self, seconds: float) -> None:
        """Note one."""
        self.freshness.add(seconds)
        self._in_turn.append(seconds)
        insort(self.recent, seconds)
        if len(self._in_turn) > _RECENT:
            del self.recent[bisect_left(self.recent, self._in_turn.popleft())]

    def within(self, share: float) -> float | None:
        """The seconds within which such a share of the last ones was fresh, at least; None if there are none."""
        return self.recent[math.ceil(share * len(self.recent)) - 1] if self.recent else None


@dataclass
class DeliveryTime:
    """That replicas of a consumer have a version: how many, and the seconds of the slowest of them."""

    replicas: int = 0
    release: float = 0.0
    ack: float = 0.0

    def note(self, release: float, ack: float) -> None:
        """Note one more."""
        self.replicas += 1
        if release + ack >= self.release + self.ack:
            self.release, self.ack = release, ack


class StopWatch:
    """Takes the time of one part after another.

    Attributes:
        seconds: those of the parts that are over, by name.
        lapped_ns: when the last of them was, by `steady_ns`.
    """

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self.seconds = dict(seconds)
        self.lapped_ns = steady_ns()

    def lap(self, name: str) -> None:
        """End a part."""
        now = steady_ns()
        self.seconds[name] = (now - self.lapped_ns) / 1e9
        self.lapped_ns = now


def way_to_service(gather_ns: int, arrived_ns: int) -> dict[str, float]:
    """The parts before the service of a cut that has arrived so long after its step's end, as two machines' clocks
    have it, of which one may be ahead.
    """
    arrived_ns = max(0, arrived_ns)
    gather_ns = min(gather_ns, arrived_ns)
    return {"gather": gather_ns / 1e9, "send": (arrived_ns - gather_ns) / 1e9}


@dataclass
class CutTimes:
    """A sealed cut, and how many seconds each part of its way took.

    Attributes:
        seal: its seal.
        durable_ns: when it became durable, by `steady_ns`.
        seconds: of the parts that are over in the service, by name.
        deliveries: what came of it, by consumer.
    """

    seal: Seal
    durable_ns: int
    seconds: dict[str, float] = field(default_factory=dict)
    deliveries: dict[str, DeliveryTime] = field(default_factory=dict)

    def copy(self) -> "CutTimes":
        """The cut as it is now, for another thread."""
        return replace(self, seconds=dict(self.seconds), deliveries=dict(self.deliveries))

    @property
    def there_ns(self) -> int:
        """When it could be sent, by `steady_ns`."""
        return self.durable_ns + int(self.seconds.get("apply", 0.0) * 1e9)


class RecentCuts:
    """The last cuts of a model. Used in the event loop; `durations` in any thread.

    Attributes:
        durations: how long each part took, of all cuts since the service started, by its name.
    """

    def __init__(self) -> None:
        self.durations: Mapping[str, Durations] = {name: Durations(LONG_BOUNDS) for name in SERVICE_PARTS}
        self._cuts = deque[CutTimes](maxlen=KEPT_CUTS)

    def newest(self, count: int = KEPT_CUTS) -> list[CutTimes]:
        """Some of the last ones, the newest first."""
        return list(islice(reversed(self._cuts), count))

    def add(self, cut: CutTimes) -> None:
        """Have a cut that is durable."""
        self._cuts.append(cut)
        for name, seconds in cut.seconds.items():
            self.durations[name].add(seconds)

    def note_applied(self, version: int) -> None:
        """Note that the tables have a version."""
        for cut in reversed(self._cuts):
            if cut.seal.version == version and "apply" not in cut.seconds:
                cut.seconds["apply"] = (steady_ns() - cut.durable_ns) / 1e9
                self.durations["apply"].add(cut.seconds["apply"])
                return

    def deliver(self, consumer: str, before: int, upto: int, sent_ns: int, begun_ns: int = 0) -> float | None:
        """Note that a replica of a consumer, which held version `before`, now holds version `upto`.

        Args:
            consumer: its name.
            before: the version that it held; those up to this one do not count.
            upto: the version that it holds.
            sent_ns: when that was sent whole, by `steady_ns`.
            begun_ns: when its stream began, likewise; versions that were durable before do not count.

        Returns:
            The seconds of release of the newest of them, as far as it is known.
        """
        now, newest = steady_ns(), None
        for cut in reversed(self._cuts):
            if cut.seal.version <= before or cut.durable_ns < begun_ns:
                break
            if cut.seal.version <= upto:
                release = max(0, sent_ns - cut.there_ns) / 1e9
                newest = release if newest is None else newest
                cut.deliveries.setdefault(consumer, DeliveryTime()).note(release, (now - sent_ns) / 1e9)
        return newest
