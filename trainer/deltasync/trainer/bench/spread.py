"""How sure a median is."""

import math
import statistics
from collections.abc import Iterable, Sequence


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
