"""What the tracker costs."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass


@dataclass
class TrackerCost:
    """What tracking has cost so far, as numbers to log. On a GPU, seconds are those of the host.

    Attributes:
        marking_seconds: spent in noting the ids of lookups and updates, in the thread that trains.
        marking_bytes: of the ids noted.
        compaction_seconds: spent in stamping the rows noted.
        compaction_bytes: of the stamps written.
        reading_seconds: spent in finding changed rows and gathering them, in the threads that read.
        reading_bytes: of the ids and values handed out.
    """

    marking_seconds: float = 0.0
    marking_bytes: int = 0
    compaction_seconds: float = 0.0
    compaction_bytes: int = 0
    reading_seconds: float = 0.0
    reading_bytes: int = 0

    def __post_init__(self) -> None:
        self._reading = threading.Lock()  # Several threads may read at once; all else is done within the gate.

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.marking_seconds + self.compaction_seconds + self.reading_seconds

    def as_dict(self) -> dict[str, float]:
        """By name."""
        return asdict(self)

    def add_reading(self, seconds: float = 0.0, nbytes: int = 0) -> None:
        """Add to what reading has cost."""
        with self._reading:
            self.reading_seconds += seconds
            self.reading_bytes += nbytes

    @contextmanager
    def timed_reading(self) -> Iterator[None]:
        """Add the time spent within."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add_reading(seconds=time.perf_counter() - started)
