"""The cost of tracking."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass


@dataclass
class TrackerCost:
    """The cost of tracking so far. With a GPU, seconds are time on the host.

    Attributes:
        marking_seconds: time to record the ids of lookups, in backward.
        marking_bytes: bytes of these ids.
        compaction_seconds: time to stamp the rows of these ids.
        compaction_bytes: bytes of the written stamps.
        reading_seconds: time to find and gather changed rows, in all reading threads.
        reading_bytes: bytes of the ids and values copied for readers.
    """

    marking_seconds: float = 0.0
    marking_bytes: int = 0
    compaction_seconds: float = 0.0
    compaction_bytes: int = 0
    reading_seconds: float = 0.0
    reading_bytes: int = 0

    def __post_init__(self) -> None:
        self._reading = threading.Lock()  # Several threads may read at once; the gate protects everything else.

    @property
    def seconds(self) -> float:
        """Total time."""
        return self.marking_seconds + self.compaction_seconds + self.reading_seconds

    def as_dict(self) -> dict[str, float]:
        """The numbers by name."""
        return asdict(self)

    def add_reading(self, seconds: float = 0.0, nbytes: int = 0) -> None:
        """Add to the cost of reading."""
        with self._reading:
            self.reading_seconds += seconds
            self.reading_bytes += nbytes

    @contextmanager
    def timed_reading(self) -> Iterator[None]:
        """Add the time of the block to the cost of reading."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add_reading(seconds=time.perf_counter() - started)
