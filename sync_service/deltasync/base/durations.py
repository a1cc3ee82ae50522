"""How long something took, again and again: counted by bounds, as a histogram has it."""

import threading
from bisect import bisect_left
from collections.abc import Sequence

# Seconds.
BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
# Of what may take as long as a policy lets it, or an outage.
LONG_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Durations:
    """Counts of durations. Any thread.

    Attributes:
        bounds: seconds, ascending.
    """

    def __init__(self, bounds: Sequence[float] = BOUNDS) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._seconds = 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        """Count one."""
        with self._lock:
            self._counts[bisect_left(self.bounds, seconds)] += 1
            self._seconds += seconds

    def read(self) -> tuple[Sequence[int], float]:
        """How many took as long as each bound and longer than the one before; last, those longer than all of them.
        And how many seconds all of them took.
        """
        with self._lock:
            return tuple(self._counts), self._seconds
