"""Progress of long work, for the log and for status."""

import logging
import threading
import time
from weakref import WeakSet

logger = logging.getLogger(__name__)

_SOON_SECONDS = 1.0


class Progress:
    """Logs the progress of work every few seconds, and lists it in `under_way` while this object exists.

    Args:
        what: the work, such as "consumer 'top': comparing table 'user'".
        total: number of rows.
        unit: the unit, if not rows.
        every_seconds: how often to log.
    """

    def __init__(self, what: str, total: int, unit: str = "rows", every_seconds: float = 5.0) -> None:
        self._every_seconds = every_seconds
        self._what = what
        self._total = total
        self._unit = unit
        self._begun = time.monotonic()
        self._due = self._begun + every_seconds
        self._logged = False
        self._rows = 0
        with _lock:
            _all.add(self)

    def add(self, rows: int) -> None:
        """Add finished rows."""
        self.at(self._rows + rows)

    def at(self, rows: int) -> None:
        """Set the number of finished rows."""
        self._rows, now = rows, time.monotonic()
        if now >= self._due or (self._logged and rows >= self._total):
            logger.info("%s", self.description)
            self._due, self._logged = now + self._every_seconds, True

    @property
    def description(self) -> str:
        """The work and its progress."""
        return f"{self._what}: {self._rows} of {self._total} {self._unit}"

    @property
    def takes_long(self) -> bool:
        """Whether the work has taken a while and is not finished."""
        return self._rows < self._total and time.monotonic() >= self._begun + _SOON_SECONDS


_all, _lock = WeakSet[Progress](), threading.Lock()


def under_way() -> list[str]:
    """The progress of long work in this process."""
    with _lock:
        return sorted(each.description for each in _all if each.takes_long)
