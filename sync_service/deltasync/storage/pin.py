"""What a log keeps for a snapshot that is being made, though tables are flushed meanwhile."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Pin:
    """Keeps what came after a number from being dropped, while it is held. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: int | None = None

    @contextmanager
    def held(self, number: int) -> Iterator[None]:
        """While the block runs, or until it is let go."""
        with self._lock:
            self._held = number
        try:
            yield
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Keep nothing any more."""
        with self._lock:
            self._held = None

    def limit(self, upto: int) -> int:
        """Up to which number may be dropped what is to be, up to `upto`."""
        with self._lock:
            return upto if self._held is None else min(upto, self._held)
