"""How far something has come that may take minutes: said in the log now and then."""

import logging
import time

logger = logging.getLogger(__name__)

_EVERY_SECONDS = 5.0


class Progress:
    """Says every few seconds how far something has come; nothing of what is done before. One thread at a time."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._done = 0
        self._said = time.monotonic()

    def add(self, count: int) -> None:
        """Note that so many more are done."""
        self._done += count
        now = time.monotonic()
        if now >= self._said + _EVERY_SECONDS:
            self._said = now
            share = 100 * self._done // max(1, self._total)
            logger.info(
                "%s: %s of %s %s (%d %%)", self._what, f"{self._done:,}", f"{self._total:,}", self._unit, share
            )
