"""How long turns of a benchmark took, and how sure their median is."""

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self


class Duration(NamedTuple):
    """Seconds by the clock, and seconds in which a core worked for this process, and for this thread of it."""

    seconds: float
    cpu_seconds: float
    thread_seconds: float

    @classmethod
    def now(cls) -> Self:
        """By all clocks, to be given to `since`."""
        return cls(time.perf_counter(), time.process_time(), time.thread_time())

    @classmethod
    def since(cls, started: "Duration") -> Self:
        """What has passed by now."""
        return cls(*(now - then for now, then in zip(cls.now(), started, strict=True)))


def interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with a probability of 95 %, whatever the distribution."""
    reach = math.ceil(0.98 * math.sqrt(len(ordered)))
    below = max(0, len(ordered) // 2 - reach)
    return ordered[below], ordered[-1 - below]


def spread_of(name: str, values: Iterable[float]) -> dict[str, float]:
    """The median as figure `name`, and that interval as NAME_low and NAME_high."""
    ordered = sorted(values)
    low, high = interval(ordered)
    return {name: statistics.median(ordered), f"{name}_low": low, f"{name}_high": high}


def ratio_of(figures: Mapping[str, Any], name: str) -> str:
    """A ratio and its uncertainty, to print."""
    return f"ratio {figures[name]:.3f} ({figures[f'{name}_low']:.3f} to {figures[f'{name}_high']:.3f})"
