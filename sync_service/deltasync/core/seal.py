"""The seal of a cut, which makes it a version of a history, and how long the parts of its way took."""

import hashlib
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from numbers import Integral
from typing import Any

from deltasync.base.clock import LONG_BOUNDS, Durations, steady_ns
from deltasync.base.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class Seal:
    """What is known of a sealed cut. Times are nanoseconds since 1970.

    `bytes` are those of ids and values, `log_bytes` those of the records the log holds of it. `resync` says that
    its run does not continue the published history: it has every row. `whole` are the tables of a full cut: rows
    that it does not name are deleted. `event_time_unix_ns` is the time of the newest event that the run had been
    trained on; None if no rank has said one. `checksum` is of the seal and of the one before it, and so of all
    that came before: two histories that part have different ones from there on.
    """

    version: int
    step: int
    run: str
    run_started_unix_ns: int
    world_size: int
    rows: int
    bytes: int
    log_bytes: int
    step_end_unix_ns: int
    sealed_unix_ns: int
    resync: bool = False
    whole: tuple[str, ...] = ()
    event_time_unix_ns: int | None = None
    checksum: int = 0

    def after(self, before: "Seal | None") -> "Seal":
        """This seal with the checksum that it has after another one; None is before the first cut."""
        chained = before.checksum if before else 0
        said = f"{chained} {self.version} {self.step} {self.run} {self.rows} {self.bytes} {self.sealed_unix_ns}"
        return replace(self, checksum=_checksum(said))


class SealHistory(deque[Seal]):
    """The seals of a model's last cuts, oldest first."""

    _frozen: tuple[Seal, ...] = ()

    @property
    def newest(self) -> Seal | None:
        """The last seal; None before the first cut."""
        return self[-1] if self else None

    @property
    def newest_version(self) -> int:
        """The last version; 0 before the first cut."""
        return self[-1].version if self else 0

    def frozen(self) -> tuple[Seal, ...]:
        """All of them as they are now; the same tuple until the next one comes."""
        if not self._frozen or self._frozen[-1] is not self.newest:
            self._frozen = tuple(self)
        return self._frozen

    def checksum_of(self, version: int) -> int:
        """The checksum of a version's seal; 0 where it is not known."""
        return checksum_of(self, version)

    def after(self, version: int) -> list[Seal]:
        """The seals of later versions, oldest first."""
        newest_first = takewhile(lambda seal: seal.version > version, reversed(self))
        return list(newest_first)[::-1]


def release_checksum(before: int | str, number: int, of: Seal, made_unix_ns: int) -> int:
    """The checksum of a release's seal, which is chained as those of versions are.

    Args:
        before: that of the release before it; of the first one, the id of the history that it begins.
        number: its number.
        of: the seal of the version that it is made of.
        made_unix_ns: when it was made: of two that one version has led to, one may be of a discarded past.
    """
    return _checksum(f"{before} {number} {of.version} {of.checksum} {made_unix_ns}")


def _checksum(said: str) -> int:
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest()) or 1


def seconds_since_sealed(version: int, seals: Sequence[Seal], now_unix_ns: int) -> float:
    """Seconds since a version was sealed; 0 if it is not sealed yet."""
    if not seals or version > seals[-1].version:
        return 0.0
    return round(max(0, now_unix_ns - seal_of(version, seals).sealed_unix_ns) / 1e9, 3)


def seal_of(version: int, seals: Sequence[Seal]) -> Seal:
    """The seal of a version, or the nearest one where that is no longer kept or not there yet."""
    return seals[min(max(0, version - seals[0].version), len(seals) - 1)]


def checksum_of(seals: Sequence[Seal], version: int) -> int:
    """The checksum of a version's seal; 0 where it is not known."""
    known = seals and seals[0].version <= version <= seals[-1].version
    return seal_of(version, seals).checksum if known else 0


def event_time_of(version: int, seals: Sequence[Seal]) -> int | None:
    """The time of the newest event that the model had been trained on at a version, nanoseconds since 1970.

    None where it is not known: nobody has said it, or the version's seal is no longer kept.
    """
    if not seals or not seals[0].version <= version <= seals[-1].version:
        return None
    return seal_of(version, seals).event_time_unix_ns


_LAST = 2**63 - 1


def newest_event_time(times: Iterable[int | None]) -> int | None:
    """The newest of some times, nanoseconds since 1970; None if none is known."""
    return max((time for time in times if time is not None), default=None)


def check_event_time(event_time_unix_ns: Any) -> None:
    """See that the time of an event is one, or None.

    Raises:
        InvalidInput: it is no whole number of nanoseconds since 1970.
    """
    if event_time_unix_ns is None:
        return
    whole = isinstance(event_time_unix_ns, Integral) and not isinstance(event_time_unix_ns, bool)
    if not whole or not 1 <= int(event_time_unix_ns) <= _LAST:
        raise InvalidInput(
            f"event_time_unix_ns: {event_time_unix_ns!r}, expected whole nanoseconds since 1970, or None"
        )


def seconds_behind(event_time_unix_ns: int | None, now_unix_ns: int) -> float | None:
    """For how many seconds an event is past; 0 if a clock that is ahead dates it in the future."""
    return None if event_time_unix_ns is None else round(max(0, now_unix_ns - event_time_unix_ns) / 1e9, 3)


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
class Delivery:
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
    deliveries: dict[str, Delivery] = field(default_factory=dict)

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
                cut.deliveries.setdefault(consumer, Delivery()).note(release, (now - sent_ns) / 1e9)
        return newest
