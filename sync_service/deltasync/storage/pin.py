"""What a log keeps for snapshots that are being made, though tables are flushed meanwhile."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Pin:
    """Keeps what came after a number from being dropped, while anybody holds it. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = list[int]()

    @property
    def is_held(self) -> bool:
        """Whether anybody holds it."""
        return bool(self._held)

    @contextmanager
    def held(self, number: int) -> Iterator[None]:
        """While the block runs."""
        with self._lock:
            self._held.append(number)
        try:
            yield
        finally:
            with self._lock:
                self._held.remove(number)

    def limit(self, upto: int) -> int:
        """Up to which number may be dropped what is to be, up to `upto`."""
        with self._lock:
            return min(upto, *self._held) if self._held else upto
