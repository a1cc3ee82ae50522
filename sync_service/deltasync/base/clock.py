"""Times and durations: a monotonic clock, ages, and histograms of durations."""

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

# Stands for an unknown age.
FOREVER_NS = 2**62

# A `Succession` remembers the times of this many newest numbers, or more.
_REMEMBERED = 10_000

# Prefer a clock that also runs while the machine sleeps.
_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def steady_ns() -> int:
    """Nanoseconds since a time in the past that differs between machines."""
    return time.monotonic_ns() if _CLOCK is None else time.clock_gettime_ns(_CLOCK)


@dataclass(frozen=True)
class Moment:
    """A time by two clocks: the wall clock, which may be set, and `steady_ns`.

    The second is None for times before the process started.
    """

    unix_ns: int
    steady_ns: int | None = None

    @classmethod
    def now(cls) -> "Moment":
        """The current moment."""
        return cls(time.time_ns(), steady_ns())

    def plus(self, seconds: float) -> "Moment":
        """The moment after some seconds."""
        ns = int(seconds * 1e9)
        return Moment(self.unix_ns + ns, None if self.steady_ns is None else self.steady_ns + ns)

    def after_ns(self, earlier: "Moment") -> int:
        """Nanoseconds since an earlier moment, independent of the wall clock if both are from this process."""
        if self.steady_ns is None or earlier.steady_ns is None:
            return self.unix_ns - earlier.unix_ns
        return self.steady_ns - earlier.steady_ns


class Succession:
    """When each number of a history became the newest. One call at a time may add; any thread may read."""

    def __init__(self) -> None:
        # Only appended to or replaced, because other threads may search it meanwhile.
        self._times: list[tuple[int, int]] = []
        self._first: int | None = None

    def find(self, number: int, at_ns: int) -> None:
        """Set the newest number at the start, which became the newest at an unknown time before `at_ns`."""
        self._first = number
        self.add(number, at_ns)

    def add(self, number: int, at_ns: int) -> None:
        """Note when a number became the newest, by `steady_ns`. Repeating it changes nothing."""
        if self._times and self._times[-1][0] >= number:
            return
        if len(self._times) == 2 * _REMEMBERED:
            self._times = self._times[-_REMEMBERED:]
        self._times.append((number, at_ns))

    def since_ns(self, number: int) -> int | None:
        """When a number became the newest, by `steady_ns`; None if unknown."""
        times = self._times
        upto = bisect_left(times, number, key=_number)
        remembered = upto < len(times) and times[upto][0] == number != self._first
        return times[upto][1] if remembered and times[upto][1] > -FOREVER_NS else None

    def age_ns(self, number: int, now_ns: int) -> int:
        """Nanoseconds since a number became the newest; `FOREVER_NS` if unknown."""
        times = self._times
        upto = bisect_right(times, number, key=_number)
        return now_ns - times[upto - 1][1] if upto and times[upto - 1][0] == number else FOREVER_NS

    def seconds_since(self, number: int, now_ns: int) -> float | None:
        """Seconds since a number became the newest, at least 0; None if unknown."""
        since_ns = self.since_ns(number)
        return None if since_ns is None else round(max(0, now_ns - since_ns) / 1e9, 3)

    def behind_ns(self, number: int, now_ns: int) -> int:
        """Nanoseconds since a later number became the newest; 0 if there is none, `FOREVER_NS` if unknown."""
        times = self._times
        upto = bisect_right(times, number, key=_number)
        if upto == len(times):
            return 0
        # Other numbers may have followed this one before the first remembered number.
        return now_ns - times[upto][1] if upto else FOREVER_NS


def _number(entry: tuple[int, int]) -> int:
    return entry[0]


# Bounds of histograms, in seconds.
BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
# For durations that a policy or an outage may extend.
LONG_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Durations:
    """Histogram of durations, with ascending bounds in seconds. Safe to use from any thread."""

    def __init__(self, bounds: Sequence[float] = BOUNDS) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._seconds = 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        """Count one duration."""
        with self._lock:
            self._counts[bisect_left(self.bounds, seconds)] += 1
            self._seconds += seconds

    def read(self) -> tuple[Sequence[int], float]:
        """Return the count of each bucket, the last of them unbounded, and the sum of all durations in seconds."""
        with self._lock:
            return tuple(self._counts), self._seconds
