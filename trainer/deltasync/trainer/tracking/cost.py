"""The cost of tracking."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass


@dataclass
class TrackerCost:
    """The cost of tracking so far, as numbers to log. On a GPU, seconds are those of the host.

    Attributes:
        marking_seconds: for noting the ids of lookups, in backward.
        marking_bytes: of these ids.
        compaction_seconds: for stamping the rows of these ids.
        compaction_bytes: of the stamps written.
        reading_seconds: for finding and gathering changed rows, in the threads that read.
        reading_bytes: of the ids and values copied for readers.
    """

    marking_seconds: float = 0.0
    marking_bytes: int = 0
    compaction_seconds: float = 0.0
    compaction_bytes: int = 0
    reading_seconds: float = 0.0
    reading_bytes: int = 0

    def __post_init__(self) -> None:
        self._reading = threading.Lock()  # Several threads may read at once; all else happens within the gate.

    @property
    def seconds(self) -> float:
        """All seconds together."""
        return self.marking_seconds + self.compaction_seconds + self.reading_seconds

    def as_dict(self) -> dict[str, float]:
        """The figures by name."""
        return asdict(self)

    def add_reading(self, seconds: float = 0.0, nbytes: int = 0) -> None:
        """Add to the cost of reading."""
        with self._reading:
            self.reading_seconds += seconds
            self.reading_bytes += nbytes

    @contextmanager
    def timed_reading(self) -> Iterator[None]:
        """Add the time spent within to the cost of reading."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add_reading(seconds=time.perf_counter() - started)
