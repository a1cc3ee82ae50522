"""Ranks that wait for a part of another one, which may never come to its end."""

import time
from collections.abc import Callable

# An answer takes as long at most, of a service that both ranks reach.
_PATIENCE_SECONDS = 60.0


class Standstill:
    """Whether this rank knows how its cut has ended, and another one has long not. In the thread that trains.

    The service answers a part of a sealed cut again, but not if it has lost that cut meanwhile: it waits for the
    parts of the ranks that have their answer.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since: float | None = None

    @property
    def long(self) -> bool:
        """Whether it has gone on for so long that ranks had better begin anew."""
        return self._since is not None and self._now() - self._since >= _PATIENCE_SECONDS

    def note(self, *, waits: bool) -> None:
        """Note whether this rank has no part under way, and waits for another one."""
        if not waits:
            self._since = None
        elif self._since is None:
            self._since = self._now()
