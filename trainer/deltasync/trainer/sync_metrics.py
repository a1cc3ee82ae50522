"""How publishing goes, as numbers to log."""

import logging
import time
from collections.abc import Callable

from deltasync.base.events import error_text
from deltasync.base.waiting import backoff
from deltasync.trainer.run import TrainingRun
from deltasync.trainer.sync_options import SyncStats
from deltasync.trainer.tracking.tracker import Tracker

logger = logging.getLogger(__name__)
# What is refused seldom changes by itself, and each try sends all rows that have changed.
_LONGEST_SECONDS = 300.0
# What they mean: those that only grow, and the rest.
COUNTERS = {
    "cuts": "Sealed cuts of this rank.",
    "rows": "Rows of its sealed parts.",
    "bytes": "Bytes of ids and values of its sealed parts.",
    "absorbed": "Cuts that were left out because the one before was not sealed yet.",
    "refusals": "How often publishing was refused, or impossible.",
    "connections": "Connections to the service.",
    "step_seconds": "Spent in DeltaSync.step by the thread that trains.",
    "tracking_seconds": "Spent in tracking changed rows, in all threads.",
}
GAUGES = {
    "version": "The last version that this rank knows to be sealed.",
    "publish_seconds": "How long the last sealed cut took, from its rows in host memory on.",
    "unpublished_steps": "Steps since the last sealed cut.",
    "unpublished_seconds": "Since the end of the last published step; 0 where nothing is unpublished.",
    "refused_seconds": "Since the first of the refusals that last; else 0.",
    "connected": "1 while the service answers.",
    "failed_attempts": "Attempts to connect since it does not.",
    "disconnected_seconds": "Since it does not.",
}


def metrics_of(stats: SyncStats, trouble: "Trouble", run: TrainingRun, tracker: Tracker) -> dict[str, float]:
    """The numbers to log. Reads no row, and waits for nothing.

    Args:
        stats: what was published.
        trouble: what it failed with last.
        run: the rank's run.
        tracker: knows the steps, and what it costs.
    """
    connection = run.publisher.connection if run.publisher else None
    connected, unpublished = bool(connection and connection.connected), tracker.steps - stats.published_step
    return {
        "version": run.position.number,
        "cuts": stats.sealed,
        "rows": stats.rows,
        "bytes": stats.bytes,
        "absorbed": stats.absorbed,
        "publish_seconds": stats.publish_seconds,
        "unpublished_steps": unpublished,
        "unpublished_seconds": _seconds_since(stats) if unpublished else 0.0,
        "refusals": stats.refusals,
        "refused_seconds": trouble.seconds,
        "connected": float(connected),
        "connections": run.connections,
        "failed_attempts": connection.attempts if connection else 0,
        "disconnected_seconds": connection.seconds if connection and not connected else 0.0,
        "step_seconds": stats.step_seconds,
        "tracking_seconds": tracker.cost.seconds,
    }


def _seconds_since(stats: SyncStats) -> float:
    """Seconds since the end of the last published step; 0 before there is one."""
    return max(0.0, time.time() - stats.cuts[-1][2] / 1e9) if stats.cuts else 0.0


class Trouble:
    """The last error of publishing. In the thread that trains.

    Attributes:
        reason: the error in words; empty if nothing has failed since the last cut was sealed.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.reason = ""
        self._now, self._since = now, 0.0
        self._pauses, self._due = backoff(_LONGEST_SECONDS), 0.0

    @property
    def over(self) -> bool:
        """Whether publishing may be tried now: nothing has failed, or the pause is over."""
        return not self.reason or self._now() >= self._due

    @property
    def seconds(self) -> float:
        """For how long nothing could be published; 0 if nothing has failed."""
        return self._now() - self._since if self.reason else 0.0

    def note(self, error: Exception) -> None:
        """Note a failure. The log has each reason once, until it changes."""
        if (reason := error_text(error)) != self.reason:
            logger.error("nothing is published for now: %s", reason)
        self._since = self._since if self.reason else self._now()
        self.reason = reason
        self._due = self._now() + next(self._pauses)

    def try_again(self) -> None:
        """End the pause: what is published next differs from what has failed."""
        self._pauses, self._due = backoff(_LONGEST_SECONDS), 0.0

    def end(self) -> None:
        """Note that a cut was sealed."""
        if self.reason:
            logger.warning("publishing goes on, after: %s", self.reason)
            self.reason = ""
            self.try_again()
