"""How far something has come that takes long, in the log."""

import logging
import time

logger = logging.getLogger(__name__)

_EVERY_SECONDS = 5.0


class Progress:
    """Tells every few seconds how far something has come; nothing of what is through before.

    Args:
        what: what is done to the rows, as in "consumer 'top': comparing table 'user'".
        total: how many there are.
        unit: what they are, if not rows.
    """

    def __init__(self, what: str, total: int, unit: str = "rows") -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._due = time.monotonic() + _EVERY_SECONDS
        self._told = False
        self._rows = 0

    def add(self, rows: int) -> None:
        """So many more rows are through."""
        self.at(self._rows + rows)

    def at(self, rows: int) -> None:
        """So many rows are through."""
        self._rows, now = rows, time.monotonic()
        if now >= self._due or (self._told and rows >= self._total):
            logger.info("%s: %d of %d %s", self._what, rows, self._total, self._unit)
            self._due, self._told = now + _EVERY_SECONDS, True
