"""A clock that nobody sets, and how long ago something was by it."""

import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

# Longer ago than anybody knows.
FOREVER_NS = 2**62

# Of so many newest numbers, or more, it is known when they were the newest.
_REMEMBERED = 10_000

# Goes on while the machine sleeps, where there is such a clock.
_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def steady_ns() -> int:
    """Nanoseconds since some time in the past that is another on every machine."""
    return time.monotonic_ns() if _CLOCK is None else time.clock_gettime_ns(_CLOCK)


@dataclass(frozen=True)
class Moment:
    """A time by two clocks: nanoseconds since 1970, which may be set, and by `steady_ns`, None if that was before
    this process began.
    """

    unix_ns: int
    steady_ns: int | None = None

    @classmethod
    def now(cls) -> "Moment":
        """This one."""
        return cls(time.time_ns(), steady_ns())

    def after_ns(self, earlier: "Moment") -> int:
        """For how long it comes after another one, whatever was set in between, if both are of this process."""
        if self.steady_ns is None or earlier.steady_ns is None:
            return self.unix_ns - earlier.unix_ns
        return self.steady_ns - earlier.steady_ns


class Succession:
    """When each number of a history became its newest. Added to by one call at a time, read on any thread."""

    def __init__(self) -> None:
        # Only appended to, or replaced: who has it may search it meanwhile.
        self._times: list[tuple[int, int]] = []
        self._found: int | None = None

    def find(self, number: int, at_ns: int) -> None:
        """Note which number is the newest to begin with: it has been for longer than `at_ns` says."""
        self._found = number
        self.add(number, at_ns)

    def add(self, number: int, at_ns: int) -> None:
        """Note when a number became the newest, by `steady_ns`. Repeating it changes nothing."""
        if self._times and self._times[-1][0] >= number:
            return
        if len(self._times) == 2 * _REMEMBERED:
            self._times = self._times[-_REMEMBERED:]
        self._times.append((number, at_ns))

    def since_ns(self, number: int) -> int | None:
        """When a number became the newest, by `steady_ns`; None if that is not known."""
        times = self._times
        upto = bisect_left(times, number, key=_number)
        known = upto < len(times) and times[upto][0] == number != self._found
        return times[upto][1] if known and times[upto][1] > -FOREVER_NS else None

    def age_ns(self, number: int, now_ns: int) -> int:
        """How long ago a number became the newest; `FOREVER_NS` if that is not known."""
        times = self._times
        upto = bisect_right(times, number, key=_number)
        return now_ns - times[upto - 1][1] if upto and times[upto - 1][0] == number else FOREVER_NS

    def seconds_since(self, number: int, now_ns: int) -> float | None:
        """How long ago a number became the newest, 0 if that is later than `now_ns`; None if it is not known."""
        since_ns = self.since_ns(number)
        return None if since_ns is None else round(max(0, now_ns - since_ns) / 1e9, 3)

    def behind_ns(self, number: int, now_ns: int) -> int:
        """For how long a number has not been the newest any more: 0 if it is, `FOREVER_NS` where nobody knows."""
        times = self._times
        upto = bisect_right(times, number, key=_number)
        if upto == len(times):
            return 0
        # Before the first that is known there may have been others that were later than this one.
        return now_ns - times[upto][1] if upto else FOREVER_NS


def _number(entry: tuple[int, int]) -> int:
    return entry[0]
