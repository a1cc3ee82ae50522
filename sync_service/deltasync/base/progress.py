"""How far something has come that takes long, in the log and for whoever asks."""

import logging
import threading
import time
from weakref import WeakSet

logger = logging.getLogger(__name__)

_EVERY_SECONDS = 5.0
_SOON_SECONDS = 1.0


class Progress:
    """Tells every few seconds how far something has come; nothing of what is through before. As long as somebody
    has it, `under_way` knows of it.

    Args:
        what: what is done to the rows, as in "consumer 'top': comparing table 'user'".
        total: how many there are.
        unit: what they are, if not rows.
    """

    def __init__(self, what: str, total: int, unit: str = "rows") -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._begun = time.monotonic()
        self._due = self._begun + _EVERY_SECONDS
        self._told = False
        self._rows = 0
        _under_way.add(self)

    def add(self, rows: int) -> None:
        """So many more rows are through."""
        self.at(self._rows + rows)

    def at(self, rows: int) -> None:
        """So many rows are through."""
        self._rows, now = rows, time.monotonic()
        if now >= self._due or (self._told and rows >= self._total):
            logger.info("%s", self.words)
            self._due, self._told = now + _EVERY_SECONDS, True

    @property
    def words(self) -> str:
        """How far it is."""
        return f"{self._what}: {self._rows} of {self._total} {self._unit}"

    @property
    def takes_long(self) -> bool:
        """Whether it goes on, and has for a while."""
        return self._rows < self._total and time.monotonic() >= self._begun + _SOON_SECONDS


class _UnderWay:
    """All that there is in this process, in any thread."""

    def __init__(self) -> None:
        self._all, self._lock = WeakSet[Progress](), threading.Lock()

    def add(self, progress: Progress) -> None:
        with self._lock:
            self._all.add(progress)

    def long(self) -> list[Progress]:
        with self._lock:
            return [each for each in self._all if each.takes_long]


_under_way = _UnderWay()


def under_way() -> list[str]:
    """What takes long in this process just now, and how far it is."""
    return sorted(each.words for each in _under_way.long())
