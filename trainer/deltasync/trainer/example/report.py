"""The demo's report: quality and freshness of the replicas, and whether they equal the trainer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from deltasync.client import InvalidInput, ValueType
from deltasync.trainer.example.compare import (
    WHATS,
    Tables,
    id_map_shards,
    load_arrays,
    replica_holdings,
    trainer_holdings,
    verdict,
)
from deltasync.trainer.example.demo import DemoOptions
from deltasync.trainer.example.processes import DemoFailed

Floats = NDArray[np.floating]


def quality(folder: Path, ranks: int, synced: str, frozen: str, first: int) -> dict[str, Any]:
    """`auc` and `log_loss` of trainer, synced and frozen replica, from event `first` on.

    The replica `frozen` also scored with a frozen copy, or was frozen itself.
    """
    trainer = _in_order([load_arrays(folder / f"scores-trainer-{rank}.npz") for rank in range(ranks)])
    replica, other = (_in_order([load_arrays(folder / f"scores-{name}.npz")]) for name in (synced, frozen))
    for column in ("index", "label"):
        if not all(np.array_equal(each[column], trainer[column]) for each in (replica, other)):
            raise DemoFailed(f"trainer and replicas did not score the same events: column {column!r} differs")
    later = trainer["index"] >= first
    labels, frozen_logit = trainer["label"][later], other.get("frozen", other["logit"])
    logits = {"trainer": trainer["logit"], "synced": replica["logit"], "frozen": frozen_logit}
    return {
        "events_evaluated": len(labels),
        "auc": {name: auc(labels, values[later]) for name, values in logits.items()},
        "log_loss": {name: log_loss(labels, values[later]) for name, values in logits.items()},
    }


def _in_order(parts: Sequence[Tables]) -> Tables:
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(columns["index"])
    return {name: column[order] for name, column in columns.items()}


def auc(labels: Floats, scores: Floats) -> float:
    """The probability that a positive event scores above a negative one; ties count half."""
    positive = labels > 0.5
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        raise InvalidInput(f"AUC of {positives} positive and {negatives} negative events: both are needed")
    _, rank_of, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    wins = float(mean_rank[rank_of][positive].sum()) - positives * (positives + 1) / 2
    return wins / (positives * negatives)


def log_loss(labels: Floats, logits: Floats) -> float:
    """Mean binary cross entropy of log odds, in nats."""
    exact = logits.astype(np.float64)
    return float(np.mean(np.logaddexp(0.0, exact) - labels * exact))


def freshness(step_ends_unix_ns: Sequence[int], applied: Sequence[tuple[int, int, int]]) -> list[float]:
    """Seconds from the end of each step until a replica had its changes; 0 if the clock was set back in between.

    `applied` has version, step and Unix nanoseconds of each release that the replica applied, in order.
    """
    steps = np.array([step for _, step, _ in applied])
    first = np.searchsorted(steps, np.arange(1, len(step_ends_unix_ns) + 1))
    pairs = zip(first, step_ends_unix_ns, strict=True)
    return [max(0, applied[release][2] - end) / 1e9 for release, end in pairs if release < len(applied)]


def build_report(folder: Path, options: DemoOptions) -> dict[str, Any]:
    """Make the report from the processes' results in `folder`. Bytes only count ids and values."""
    replicas, frozen = options.fleets[0].replicas, options.fleets[-1].replicas[-1]
    ranks, stream, policy = options.ranks, options.stream, options.policy
    facts = [json.loads((folder / f"trainer-{rank}.json").read_text()) for rank in range(ranks)]
    receipts = [json.loads((folder / f"{name}.json").read_text()) for name in replicas]
    expected, events = trainer_holdings(folder, ranks, stream, options.sizes, policy), stream.events or 0
    fresh = [s for each in receipts for s in freshness(facts[0]["step_ends_unix_ns"], each["applied"])]
    tables = {
        name: rows * dim * np.dtype(dtype).itemsize for fact in facts for name, rows, dim, dtype in fact["tables"]
    }
    # Difference between the first rank's outputs and those of the gathered model: ranks add in another order.
    own, logit = load_arrays(folder / "outputs-trainer-0.npz"), expected["outputs"]["logit"]
    off = np.abs(logit[own["index"] - (events - len(logit))] - own["logit"]).max()
    shards, answers = id_map_shards(folder, ranks), receipts[0]["answers"]
    if answers:
        answers = {"count": len(answers["seconds"])} | {name: _spread(each) for name, each in answers.items()}
    return {
        **verdict(expected, {name: replica_holdings(folder, name) for name in replicas}),
        "outputs_off_trainer": float(off),
        "evictions": sum(fact["evictions"] for fact in facts),
        "rows_used": {name: [int(np.count_nonzero(part.ids)) for part in parts] for name, parts in shards.items()},
        **quality(folder, ranks, replicas[0], frozen, events // 2),
        "events": events,
        "freshness_seconds": _spread(fresh),
        "answers": answers,
        "workers": options.workers,
        "steps": facts[0]["steps"],
        "versions": facts[0]["versions"],
        "cuts_absorbed": facts[0]["absorbed"],
        "rows_published": sum(fact["rows"] for fact in facts),
        "bytes_published": sum(fact["bytes"] for fact in facts),
        "bytes_received": max(sum(each["received_bytes"]) for each in receipts),
        "policy": policy.as_dict(),
        "bytes_full_push": facts[0]["versions"] * sum(tables.values()),
    }


def all_equal(report: Mapping[str, Any]) -> bool:
    """Whether all compared rows are equal."""
    return all(report.get(f"{what}_equal") is not False for what in WHATS)


def unequal_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of rows that differ, by what was compared; empty if all are equal."""
    return {what: report[f"{what}_unequal"] for what in WHATS if report[f"{what}_equal"] is False}


def _spread(values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    return {"p50": p50, "p99": p99, "max": max(values)}


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Print the report as text."""
    answers, fresh, maps = report["answers"], report["freshness_seconds"], report["map_compared"]
    who = ("quantised predictor, synced", "quantised predictor,") if answers else ("synced replica", "replica")
    if report["workers"]:
        who = f"{report['workers']} predictor processes over one mirror", "replica"
    table = Table(title=f"second half of the stream: {report['events_evaluated']:,} events", title_justify="left")
    table.add_column("scored by")
    for column in ("AUC", "log loss"):
        table.add_column(column, justify="right")
    for name, text in {
        "trainer": "trainer, before learning from the event",
        "synced": f"{who[0]}, with its current rows",
        "frozen": f"{who[1]} frozen halfway through",
    }.items():
        table.add_row(text, f"{report['auc'][name]:.4f}", f"{report['log_loss'][name]:.4f}")
    console.print(table)
    full, sent, received = (report[f"bytes_{name}"] for name in ("full_push", "published", "received"))
    value_type = ValueType(report["policy"]["value_type"])
    form = "" if value_type is ValueType.FP32 else f" in {value_type.value}"
    compared = f"{report['rows_compared']:,} rows"
    if maps:
        compared += f", {maps:,} map entries and {report['buffers_compared']} buffers"
    unequal = unequal_of(report)

    def line(name: str, text: str) -> None:
        console.print(f"{name:<14}{text}", highlight=False, soft_wrap=True)

    def tail(its: Mapping[str, float]) -> str:
        return f"p50 {its['p50']:.3f} s   p99 {its['p99']:.3f} s"

    releases = ", of released rows" if report["policy"]["top_k"] else ""
    line("freshness", f"{tail(fresh)}   max {fresh['max']:.3f} s{releases}")
    if answers:
        by = "the workers" if report["workers"] else "the synced predictor"
        line("answers", f"{answers['count']:,} over HTTP by {by}, {tail(answers['seconds'])}")
        line("age", f"{tail(answers['age_seconds'])}, of the newest event that the answer's version has seen")
    line("versions", f"{report['versions']:,} of {report['steps']:,} steps, {report['rows_published']:,} rows")
    pushes = f"full pushes: {full / 1e6:.1f} MB, {full / sent:.1f} times as much"
    line("bytes", f"{sent / 1e6:.1f} MB published; {pushes}")
    share = f"{100 * received / sent:.0f} % of what was published, 1/{full / received:.0f} of full pushes"
    line("received", f"{received / 1e6:.1f} MB by a replica, {share}")
    if report["rows_used"]:
        used = (f"{name} {' + '.join(f'{rows:,}' for rows in its)}" for name, its in report["rows_used"].items())
        line("evictions", f"{report['evictions']:,} rows moved from one raw id to another")
        line("rows used", f"by rank: {', '.join(used)}")
    anew = ", quantised again" if value_type.tbe_bits else form
    line("compared", f"{compared} of the replicas with the trainer's{anew}, bit by bit")
    line("outputs", f"{report['outputs_compared']:,} of the replicas with those of the trainer's gathered model")
    line("rows equal:", f"NO: {unequal}" if unequal else "yes")
