"""How publishing goes, as numbers to log."""

from deltasync.trainer.run import TrainingRun
from deltasync.trainer.sync_options import SyncStats
from deltasync.trainer.trouble import Trouble


def metrics_of(stats: SyncStats, trouble: Trouble, run: TrainingRun, steps: int) -> dict[str, float]:
    """They are numbers that are known already: no row is looked at, and nothing is waited for.

    Args:
        stats: what was published.
        trouble: what it failed with last.
        run: the rank's run.
        steps: that are trained.
    """
    connection = run.publisher.connection if run.publisher else None
    connected = bool(connection and connection.connected)
    return {
        "version": run.position.number,
        "cuts": stats.sealed,
        "rows": stats.rows,
        "bytes": stats.bytes,
        "absorbed": stats.absorbed,
        "unpublished_steps": steps - stats.published_step,
        "refusals": stats.refusals,
        "refused_seconds": trouble.seconds,
        "connected": float(connected),
        "connections": run.connections,
        "failed_attempts": connection.attempts if connection else 0,
        "disconnected_seconds": connection.seconds if connection and not connected else 0.0,
        "step_seconds": stats.step_seconds,
    }
