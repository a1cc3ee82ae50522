"""How publishing goes, as numbers to log."""

import time

from deltasync.trainer.run import TrainingRun
from deltasync.trainer.sync_options import SyncStats
from deltasync.trainer.tracking.tracker import Tracker
from deltasync.trainer.trouble import Trouble


def metrics_of(stats: SyncStats, trouble: Trouble, run: TrainingRun, tracker: Tracker) -> dict[str, float]:
    """They are numbers that are known already: no row is looked at, and nothing is waited for.

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
    """Since the end of the last step that is published; 0 before there is one."""
    return max(0.0, time.time() - stats.cuts[-1][2] / 1e9) if stats.cuts else 0.0
