"""What the demo found out, as a dictionary and as a table."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from deltasync.core.policy import Policy
from deltasync.trainer.demo.compare import as_released, freshness, quality, trainer_tables, unequal_rows


def build_report(
    folder: Path, *, ranks: int, replicas: Sequence[str], events: int, restarts: int, policy: Policy
) -> dict[str, Any]:
    """Compare what the processes have left in `folder`. Bytes are those of ids and values.

    Raises:
        DemoFailed: the processes' results contradict each other.
    """
    facts = [json.loads((folder / f"trainer-{rank}.json").read_text()) for rank in range(ranks)]
    trainer = trainer_tables(folder, ranks)
    expected = as_released(trainer, policy)
    unequal = {name: _unequal(folder, expected, name) for name in replicas}
    received = [sum(_facts(folder, name)["received_bytes"]) for name in replicas]
    found = quality(folder, ranks, replicas[0], replicas[-1], events // 2)
    fresh = np.array(
        [
            second
            for name in replicas
            for second in freshness(facts[0]["step_ends_unix_ns"], _facts(folder, name)["applied"])
        ]
    )
    return {
        "rows_equal": not any(unequal.values()),
        "rows_unequal": unequal,
        "rows_compared": sum(len(rows) for rows in trainer.values()) * len(replicas),
        "auc": found.auc,
        "log_loss": found.log_loss,
        "events": events,
        "events_evaluated": found.events,
        "freshness_seconds": {
            "p50": float(np.percentile(fresh, 50)),
            "p99": float(np.percentile(fresh, 99)),
            "max": float(fresh.max()),
        },
        "steps": facts[0]["steps"],
        "versions": facts[0]["versions"],
        "cuts_absorbed": facts[0]["absorbed"],
        "rows_published": sum(fact["rows"] for fact in facts),
        "bytes_published": sum(fact["bytes"] for fact in facts),
        "bytes_received": max(received),
        "policy": policy.as_dict(),
        "bytes_full_push": facts[0]["versions"] * sum(rows.nbytes for rows in trainer.values()),
        "service_restarts": restarts,
    }


def _unequal(folder: Path, trainer: dict[str, Any], name: str) -> dict[str, int]:
    with np.load(folder / f"tables-{name}.npz") as arrays:
        return unequal_rows(trainer, dict(arrays))


def _facts(folder: Path, name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return facts


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print the report for a person."""
    table = Table(title=f"second half of the stream: {report['events_evaluated']:,} events", title_justify="left")
    table.add_column("scored by")
    table.add_column("AUC", justify="right")
    table.add_column("log loss", justify="right")
    for name, text in {
        "trainer": "trainer, before learning from the event",
        "synced": "synced replica, with what it held then",
        "frozen": "replica frozen at half time",
    }.items():
        table.add_row(text, f"{report['auc'][name]:.4f}", f"{report['log_loss'][name]:.4f}")
    console.print(table)
    for name, text in _lines(report):
        console.print(f"{name:<14}{text}", highlight=False, soft_wrap=True)


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    fresh = report["freshness_seconds"]
    full, sent, received = report["bytes_full_push"], report["bytes_published"], report["bytes_received"]
    value_type, top_k = report["policy"]["value_type"], report["policy"]["top_k"]
    form = "" if value_type == "fp32" else f" in {value_type}"
    of_releases = ", of what is released" if top_k else ""
    equal = "yes" if report["rows_equal"] else f"NO: {report['rows_unequal']}"
    return [
        (
            "freshness",
            f"p50 {fresh['p50']:.3f} s   p99 {fresh['p99']:.3f} s   max {fresh['max']:.3f} s{of_releases}",
        ),
        ("versions", f"{report['versions']:,} of {report['steps']:,} steps, {report['rows_published']:,} rows"),
        (
            "bytes",
            f"{sent / 1e6:.1f} MB published; full pushes: {full / 1e6:.1f} MB, {full / sent:.1f} times as much",
        ),
        (
            "received",
            f"{received / 1e6:.1f} MB by a replica, {100 * received / sent:.0f} % of what was published, "
            f"1/{full / received:.0f} of full pushes",
        ),
        ("restarts", f"{report['service_restarts']} of the service"),
        ("compared", f"{report['rows_compared']:,} rows of the replicas with the trainer's{form}, bit by bit"),
        ("rows equal:", equal),
    ]
