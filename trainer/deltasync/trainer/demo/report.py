"""What the demo found out, as a dictionary and as a table."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from deltasync.core.policy import Policy
from deltasync.core.value_types import ValueType
from deltasync.trainer.clicks.stream_options import StreamOptions
from deltasync.trainer.demo.compare import freshness, quality
from deltasync.trainer.demo.verdict import (
    WHATS,
    id_map_shards,
    off_trainer,
    replica_holdings,
    rows_used,
    trainer_holdings,
    verdict,
)

_SCORED_BY = {
    "trainer": "trainer, before learning from the event",
    "synced": "synced replica, with what it held then",
    "frozen": "replica frozen at half time",
}
_SCORED_BY_PREDICTORS = {
    **_SCORED_BY,
    "synced": "quantised predictor, synced, with what it held then",
    "frozen": "quantised predictor, frozen at half time",
}


def build_report(
    folder: Path,
    *,
    ranks: int,
    replicas: Sequence[str],
    frozen: str,
    stream: StreamOptions,
    restarts: int,
    policy: Policy,
) -> dict[str, Any]:
    """Compare what the processes have left in `folder`. Bytes are those of ids and values.

    `replicas` are those that should hold what the trainer holds; `frozen` has a frozen copy, or is frozen.

    Raises:
        DemoFailed: the processes' results contradict each other.
    """
    facts = [json.loads((folder / f"trainer-{rank}.json").read_text()) for rank in range(ranks)]
    expected, events = trainer_holdings(folder, ranks, stream, policy), stream.events or 0
    received = [sum(_facts(folder, name)["received_bytes"]) for name in replicas]
    found = quality(folder, ranks, replicas[0], frozen, events // 2)
    fresh = [
        second
        for name in replicas
        for second in freshness(facts[0]["step_ends_unix_ns"], _facts(folder, name)["applied"])
    ]
    return {
        **verdict(expected, {name: replica_holdings(folder, name) for name in replicas}),
        "outputs_off_trainer": off_trainer(folder, expected, stream),
        "evictions": sum(fact["evictions"] for fact in facts),
        "rows_used": rows_used(id_map_shards(folder, ranks)),
        "auc": found.auc,
        "log_loss": found.log_loss,
        "events": events,
        "events_evaluated": found.events,
        "freshness_seconds": _spread(fresh),
        "answers": _answers(folder, replicas[0]) if policy.value_type.tbe_bits else None,
        "steps": facts[0]["steps"],
        "versions": facts[0]["versions"],
        "cuts_absorbed": facts[0]["absorbed"],
        "rows_published": sum(fact["rows"] for fact in facts),
        "bytes_published": sum(fact["bytes"] for fact in facts),
        "bytes_received": max(received),
        "policy": policy.as_dict(),
        "bytes_full_push": facts[0]["versions"] * _bytes(facts),
        "service_restarts": restarts,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    return {"p50": p50, "p99": p99, "max": max(values)}


def _answers(folder: Path, name: str) -> dict[str, Any]:
    """How many answers over HTTP a predictor has given, how long they took, and how old their versions were."""
    found = _facts(folder, f"answers-{name}")
    return {"count": len(found["seconds"]), **{each: _spread(values) for each, values in found.items()}}


def _bytes(facts: Sequence[dict[str, Any]]) -> int:
    """Of all tables, as the trainer's ranks have them."""
    tables = {name: (rows, dim, dtype) for fact in facts for name, rows, dim, dtype in fact["tables"]}
    return sum(rows * dim * np.dtype(dtype).itemsize for rows, dim, dtype in tables.values())


def _facts(folder: Path, name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return facts


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print the report for a person."""
    table = Table(title=f"second half of the stream: {report['events_evaluated']:,} events", title_justify="left")
    table.add_column("scored by")
    table.add_column("AUC", justify="right")
    table.add_column("log loss", justify="right")
    for name, text in (_SCORED_BY_PREDICTORS if report["answers"] else _SCORED_BY).items():
        table.add_row(text, f"{report['auc'][name]:.4f}", f"{report['log_loss'][name]:.4f}")
    console.print(table)
    for name, text in _lines(report):
        console.print(f"{name:<14}{text}", highlight=False, soft_wrap=True)


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    fresh = report["freshness_seconds"]
    full, sent, received = report["bytes_full_push"], report["bytes_published"], report["bytes_received"]
    value_type, top_k = ValueType(report["policy"]["value_type"]), report["policy"]["top_k"]
    form = "" if value_type is ValueType.FP32 else f" in {value_type.value}"
    form = ", quantised anew" if value_type.tbe_bits else form
    of_releases = ", of what is released" if top_k else ""
    return [
        (
            "freshness",
            f"p50 {fresh['p50']:.3f} s   p99 {fresh['p99']:.3f} s   max {fresh['max']:.3f} s{of_releases}",
        ),
        *_answer_lines(report),
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
        *_managed_lines(report),
        ("compared", f"{_compared(report)} of the replicas with the trainer's{form}, bit by bit"),
        ("outputs", f"{report['outputs_compared']:,} of the replicas with those of the trainer's model, gathered"),
        ("rows equal:", _equal(report)),
    ]


def _answer_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    if not (answers := report["answers"]):
        return []
    took, age = (
        f"p50 {its['p50']:.3f} s   p99 {its['p99']:.3f} s" for its in (answers["seconds"], answers["age_seconds"])
    )
    return [
        ("answers", f"{answers['count']:,} over HTTP by the synced predictor, {took}"),
        ("age", f"{age}: of the newest event that an answer's version was trained on"),
    ]


def _managed_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    if not report["rows_used"]:
        return []
    used = (f"{name} {' + '.join(f'{rows:,}' for rows in ranks)}" for name, ranks in report["rows_used"].items())
    return [
        ("evictions", f"{report['evictions']:,} rows changed hands, from one raw id to another"),
        ("rows used", f"by rank: {', '.join(used)}"),
    ]


def _compared(report: dict[str, Any]) -> str:
    rows = f"{report['rows_compared']:,} rows"
    if not report["map_compared"]:
        return rows
    return f"{rows}, {report['map_compared']:,} entries of maps and {report['buffers_compared']} buffers"


def _equal(report: dict[str, Any]) -> str:
    """Of everything that was compared."""
    unequal = {what: report[f"{what}_unequal"] for what in WHATS if report[f"{what}_equal"] is False}
    return f"NO: {unequal}" if unequal else "yes"
