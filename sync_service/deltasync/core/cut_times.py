"""Durations of a cut's stages, from the trainer's step to the replicas."""

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
    """Durations from the model's tables to a consumer's replicas, since the service started.

    Attributes:
        release: seconds until a replica had been sent a complete version.
        ack: seconds from then until its acknowledgement.
        freshness: seconds from the end of the trainer's step until the acknowledgement, by two machines' clocks.
        recent: the latest values of `freshness`, sorted.
    """

    def __init__(self) -> None:
        self.release, self.ack = Durations(LONG_BOUNDS), Durations(LONG_BOUNDS)
        self.freshness, self.recent = Durations(LONG_BOUNDS), list[float]()
        self._in_turn = deque[float]()

    def note_freshness(self, seconds: float) -> None:
        """Add a freshness in seconds."""
        self.freshness.add(seconds)
        self._in_turn.append(seconds)
        insort(self.recent, seconds)
        if len(self._in_turn) > _RECENT:
            del self.recent[bisect_left(self.recent, self._in_turn.popleft())]

    def within(self, share: float) -> float | None:
        """The seconds within which this share of the recent versions arrived; None if there are none."""
        return self.recent[math.ceil(share * len(self.recent)) - 1] if self.recent else None


@dataclass
class DeliveryTime:
    """The delivery of a version to a consumer: number of replicas, and the seconds of the slowest."""

    replicas: int = 0
    release: float = 0.0
    ack: float = 0.0

    def note(self, release: float, ack: float) -> None:
        """Add one replica."""
        self.replicas += 1
        if release + ack >= self.release + self.ack:
            self.release, self.ack = release, ack


class StopWatch:
    """Measures one stage after another.

    Attributes:
        seconds: durations of the finished stages, by name.
        lapped_ns: when the last stage ended, by `steady_ns`.
    """

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self.seconds = dict(seconds)
        self.lapped_ns = steady_ns()

    def lap(self, name: str) -> None:
        """End a stage."""
        now = steady_ns()
        self.seconds[name] = (now - self.lapped_ns) / 1e9
        self.lapped_ns = now


def way_to_service(gather_ns: int, arrived_ns: int) -> dict[str, float]:
    """Split the time before a cut's arrival into stages. The arrival time since the step's end comes from two
    machines' clocks, so it may be wrong or negative.
    """
    arrived_ns = max(0, arrived_ns)
    gather_ns = min(gather_ns, arrived_ns)
    return {"gather": gather_ns / 1e9, "send": (arrived_ns - gather_ns) / 1e9}


@dataclass
class CutTimes:
    """A sealed cut, and the seconds of each of its stages.

    Attributes:
        durable_ns: when it became durable, by `steady_ns`.
        seconds: seconds of the finished stages in the service, by name.
        deliveries: its deliveries, by consumer.
    """

    seal: Seal
    durable_ns: int
    seconds: dict[str, float] = field(default_factory=dict)
    deliveries: dict[str, DeliveryTime] = field(default_factory=dict)

    def copy(self) -> "CutTimes":
        """Return a copy for another thread."""
        return replace(self, seconds=dict(self.seconds), deliveries=dict(self.deliveries))


class RecentCuts:
    """The recent cuts of a model. Used in the event loop; any thread may use `durations`.

    Attributes:
        durations: durations of each stage since the service started, by name.
    """

    def __init__(self) -> None:
        self.durations: Mapping[str, Durations] = {name: Durations(LONG_BOUNDS) for name in SERVICE_PARTS}
        self._cuts = deque[CutTimes](maxlen=KEPT_CUTS)

    def newest(self, count: int = KEPT_CUTS) -> list[CutTimes]:
        """The last `count` cuts, newest first."""
        return list(islice(reversed(self._cuts), count))

    def add(self, cut: CutTimes) -> None:
        """Add a durable cut."""
        self._cuts.append(cut)
        for name, seconds in cut.seconds.items():
            self.durations[name].add(seconds)

    def note_applied(self, version: int) -> None:
        """Note that the tables have reached a version."""
        for cut in reversed(self._cuts):
            if cut.seal.version == version and "apply" not in cut.seconds:
                cut.seconds["apply"] = (steady_ns() - cut.durable_ns) / 1e9
                self.durations["apply"].add(cut.seconds["apply"])
                return

    def deliver(self, consumer: str, before: int, upto: int, sent_ns: int, begun_ns: int = 0) -> float | None:
        """Note that a replica of a consumer moved from version `before` to version `upto`, which it had been sent
        at `sent_ns` (by `steady_ns`). Cuts that were durable before its stream began at `begun_ns` do not
        count. Return the `release` seconds of the newest counted cut; None if there is none.
        """
        now, newest = steady_ns(), None
        for cut in reversed(self._cuts):
            if cut.seal.version <= before or cut.durable_ns < begun_ns:
                break
            if cut.seal.version <= upto:
                applied_ns = cut.durable_ns + int(cut.seconds.get("apply", 0.0) * 1e9)
                release = max(0, sent_ns - applied_ns) / 1e9
                newest = release if newest is None else newest
                cut.deliveries.setdefault(consumer, DeliveryTime()).note(release, (now - sent_ns) / 1e9)
        return newest
