"""Why nothing can be published, and when it is tried again."""

import logging
import time
from collections.abc import Callable

from deltasync.core.backoff import backoff
from deltasync.core.events import described

logger = logging.getLogger(__name__)

# What is refused seldom changes by itself, and each try sends all rows that have changed.
_LONGEST_SECONDS = 300.0


class Trouble:
    """What publishing failed with last. In the thread that trains.

    Attributes:
        reason: in words; empty where nothing has failed since the last cut was sealed.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.reason = ""
        self._now, self._since = now, 0.0
        self._pauses, self._due = backoff(_LONGEST_SECONDS), 0.0

    @property
    def over(self) -> bool:
        """Whether it is time to try again, if anything has failed."""
        return not self.reason or self._now() >= self._due

    @property
    def seconds(self) -> float:
        """For how long nothing could be published; 0 where nothing has failed."""
        return self._now() - self._since if self.reason else 0.0

    def note(self, error: Exception) -> None:
        """Note that it has failed again. The log says so once, until the reason is another."""
        if (reason := described(error)) != self.reason:
            logger.error("nothing is published for now: %s", reason)
        self._since = self._since if self.reason else self._now()
        self.reason = reason
        self._due = self._now() + next(self._pauses)

    def try_again(self) -> None:
        """Note that what is published next is another than what has failed: it is time to try."""
        self._pauses, self._due = backoff(_LONGEST_SECONDS), 0.0

    def end(self) -> None:
        """Note that a cut was sealed."""
        if self.reason:
            logger.warning("publishing goes on, after: %s", self.reason)
            self.reason = ""
            self.try_again()
