"""A data directory with everything that survives a process, and its expected content after a restart."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.fleet import USER, WAIT, Trainer, admin_of, follow, wait_for_lag
from tests.support.process import ServiceProcess

from deltasync.client import Mode, NumpyTarget, Policy, Position, ValueType

Rows = dict[str, Any]  # NumPy arrays.
TOKEN = "secret"  # noqa: S105
POLICIES = {
    "ranked": Policy(top_k=7, value_type=ValueType.INT8, min_interval_seconds=0.05),
    "counted": Policy(mode=Mode.IDS, tables=("user",)),
}


@dataclass(frozen=True)
class Content:
    """The expected content of a data directory."""

    model: Rows
    held: dict[str, Position]
    rows: Rows


def write(folder: Path) -> Content:
    """Write a directory: a checkpoint of a version, later versions in the log, and replicas at both."""
    service = ServiceProcess(folder, "--consumer", "plain=clicks")
    with service, Trainer(service.grpc) as trainer:
        for name, policy in POLICIES.items():
            admin_of(service).create_consumer(name, "clicks", policy)
        trainer.publish_all()
        held, rows = _follow(service, "early", trainer, service.terminate, checkpoint=True)
        service.start()
        later, later_rows = _follow(service, "late", trainer, service.kill)
        model = {name: values.copy() for name, values in trainer.rows.items()}
    return Content(model, held | later, rows | later_rows)


def _follow(
    service: ServiceProcess,
    replica: str,
    trainer: Trainer,
    stop: Callable[[], object],
    *,
    checkpoint: bool = False,
) -> tuple[dict[str, Position], Rows]:
    """Publish some cuts to replicas of all consumers, and stop the service before the replicas say goodbye.

    After a goodbye, the service would forget them.
    """
    targets = {name: NumpyTarget() for name in ("plain", "ranked")}
    followers = {name: follow(service, name, replica, target) for name, target in targets.items()}
    followers["counted"] = follow(service, "counted", replica, _Ids())
    for step in range(3):
        head = trainer.delete(USER, [3, 5, 8]) if step == 1 else trainer.change(12)
        for each in followers.values():
            each.wait_for(head, WAIT)
    for name in followers:  # Of acknowledgements that the service has taken, the log has all but the last few.
        wait_for_lag(service, name, lambda lag: _has_acknowledged(lag, replica))
    if checkpoint:
        admin_of(service).make_checkpoint("clicks")
    stop()
    for each in followers.values():
        each.close()
    held = {f"{name}/{replica}": each.held for name, each in followers.items()}
    rows = {
        f"{name}/{replica}/{table}": values for name, t in targets.items() for table, values in t.tables.items()
    }
    return held, rows


def _has_acknowledged(lag: dict[str, Any], replica: str) -> bool:
    return any(each["replica"] == replica and not each["lag"]["versions"] for each in lag["replicas"])


class _Ids:
    def apply(self, release: object) -> None:
        """Record ids."""
