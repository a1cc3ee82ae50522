"""How sure a median is."""

import math
from collections.abc import Sequence


def interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with a probability of 95 %, whatever the distribution."""
    reach = math.ceil(0.98 * math.sqrt(len(ordered)))
    below = max(0, len(ordered) // 2 - reach)
    return ordered[below], ordered[-1 - below]
