"""10. The demo's report: quality and freshness of the replicas, and whether they equal the trainer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from deltasync.client import Policy
from deltasync.trainer.example.processes import DemoFailed
from deltasync.trainer.example.results import (
    Tables,
    as_released,
    auc,
    load_arrays,
    trainer_facts,
    trainer_tables,
    unequal_rows,
)
from deltasync.trainer.example.run import DemoOptions


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of a run. `unequal` has numbers of rows that differ, by replica and table."""

    unequal: Mapping[str, Mapping[str, int]]
    rows_compared: int
    auc: Mapping[str, float]
    events_evaluated: int
    freshness_seconds: Sequence[float]
    steps: int
    versions: int
    rows_published: int
    bytes_published: int
    bytes_received: int
    bytes_full_push: int
    policy: Policy

    def show(self, console: Console) -> None:
        """Print the report."""
        table = Table(title=f"second half of the stream: {self.events_evaluated:,} events", title_justify="left")
        table.add_column("scored by")
        table.add_column("AUC", justify="right")
        for name, text in {
            "trainer": "trainer, before learning from the event",
            "synced": "synced replica, with its current rows",
            "frozen": "replica frozen halfway through",
        }.items():
            table.add_row(text, f"{self.auc[name]:.4f}")
        console.print(table)
        full, sent, received = self.bytes_full_push, self.bytes_published, self.bytes_received
        p50, p99 = np.percentile(self.freshness_seconds, (50, 99))
        pushes = f"full pushes: {full / 1e6:.1f} MB, {full / sent:.1f} times as much"
        share = f"{100 * received / sent:.0f} % of what was published, 1/{full / received:.0f} of full pushes"
        form = "" if self.policy == Policy() else f", as {self.policy.value_type.value}"
        print_lines(
            console,
            {
                "freshness": f"p50 {p50:.3f} s   p99 {p99:.3f} s   max {max(self.freshness_seconds):.3f} s",
                "versions": f"{self.versions:,} of {self.steps:,} steps, {self.rows_published:,} rows",
                "bytes": f"{sent / 1e6:.1f} MB published; {pushes}",
                "received": f"{received / 1e6:.1f} MB by a replica, {share}",
                "compared": f"{self.rows_compared:,} rows of the replicas with the trainer's{form}, bit by bit",
                "rows equal:": f"NO: {self.unequal}" if self.unequal else "yes",
            },
        )


def build_report(folder: Path, replicas: Sequence[str], options: DemoOptions) -> Report:
    """Make the report from the processes' results in `folder`."""
    ranks, policy = options.ranks, options.policy
    facts, tables = trainer_facts(folder, ranks), trainer_tables(folder, ranks)
    expected = as_released(tables, policy, [name for each in facts for name in each["parameters"]])
    receipts = {name: json.loads((folder / f"{name}.json").read_text()) for name in replicas}
    versions = facts[0]["versions"]
    return Report(
        unequal=differences(expected, folder, replicas),
        rows_compared=len(replicas) * sum(map(len, expected.values())),
        **quality(folder, ranks, replicas[0], options.events // 2),
        freshness_seconds=[seconds for each in receipts.values() for step, seconds, _ in each if step],
        steps=facts[0]["steps"],
        versions=versions,
        rows_published=sum(each["rows"] for each in facts),
        bytes_published=sum(each["bytes"] for each in facts),
        bytes_received=max(sum(size for _, _, size in each) for each in receipts.values()),
        bytes_full_push=versions * sum(rows.nbytes for rows in tables.values()),
        policy=policy,
    )


def differences(expected: Tables, folder: Path, replicas: Sequence[str]) -> dict[str, dict[str, int]]:
    """The numbers of rows that differ from those expected, by replica and table; empty if all are equal."""
    found = {name: unequal_rows(expected, load_arrays(folder, f"tables-{name}")) for name in replicas}
    return {name: unequal for name, unequal in found.items() if unequal}


def quality(folder: Path, ranks: int, replica: str, first: int) -> dict[str, Any]:
    """`auc` of the trainer, of a replica and of its frozen copy, from event `first` on."""
    parts = [load_arrays(folder, f"scores-trainer-{rank}") for rank in range(ranks)]
    trainer = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order, scored = np.argsort(trainer["index"]), load_arrays(folder, f"scores-{replica}")
    if not all(np.array_equal(trainer[name][order], scored[name]) for name in ("index", "label")):
        raise DemoFailed(f"trainer and {replica} did not score the same events")
    later = scored["index"] >= first
    labels = scored["label"][later]
    logits = {"trainer": trainer["logit"][order], "synced": scored["logit"], "frozen": scored["frozen"]}
    return {
        "events_evaluated": len(labels),
        "auc": {name: auc(labels, values[later]) for name, values in logits.items()},
    }


def print_lines(console: Console, lines: Mapping[str, str]) -> None:
    """Print lines with a title each."""
    for title, text in lines.items():
        console.print(f"{title:<14}{text}", highlight=False, soft_wrap=True)
