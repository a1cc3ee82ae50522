"""Quality against bytes: how well replicas with different policies score a stream, and what they are sent for it.

One trainer, one service, and one replica for each policy, as processes. Every event is scored before the trainer
learns from it; AUC is that of the second half. Bytes are those of ids and values that a replica is sent once it
holds the first model; full pushes would send all tables at every version.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from deltasync.client import Policy, ValueType
from deltasync.trainer.example.demo import checked, play
from deltasync.trainer.example.options import StreamOptions
from deltasync.trainer.example.report import quality
from deltasync.trainer.example.results import trainer_facts
from deltasync.trainer.example.run import CURRENT, DemoOptions, Fleet

TITLES = {
    "full-fp32": "full fp32",
    "full-int8": "full int8",
    "top-10": "top 10 %",
    "top-10-int8": "top 10 % int8",
    "top-1-int8": "top 1 % int8",
}
_POLICIES = {
    "full-fp32": Policy(),
    "full-int8": Policy(value_type=ValueType.INT8),
    "top-10": Policy(top_k=0.1),
    "top-10-int8": Policy(top_k=0.1, value_type=ValueType.INT8),
    "top-1-int8": Policy(top_k=0.01, value_type=ValueType.INT8),
}
FLEETS = [Fleet(name, (f"replica-{name}",), policy) for name, policy in _POLICIES.items()]
# QuickUpdate (NSDI 2024) reports 13 times fewer bytes at comparable accuracy.
_AIM_TIMES, _AIM_LOSS = 13, 0.002


OPTIONS = (
    click.option(
        "--ratings",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Also on this file of ratings, in MovieLens' format.",
    ),
    click.option("--events", type=click.IntRange(1), default=75_000, help="Events of a stream, at most."),
    click.option(
        "--events-per-second",
        type=click.FloatRange(0, min_open=True),
        default=800.0,
        help="How fast they arrive: slow enough for this machine.",
    ),
    click.option("--publish-every", type=click.IntRange(1), default=2, help="Steps between cuts."),
    click.option(
        "--plot",
        type=click.Path(dir_okay=False, path_type=Path),
        default=Path("quality.png"),
        help="Draw AUC over bytes into this PNG.",
    ),
)


def run(console: Console, *, ratings: Path | None, plot: Path, **settings: Any) -> dict[str, Any]:
    streams = {"synthetic": _measure(console, "synthetic", **settings)}
    if ratings:
        streams["ratings"] = _measure(console, f"ratings:{ratings}", **settings)
    for name, figures in streams.items():
        _print(console, name, figures)
    draw(streams, plot)
    console.print(f"  plot: {plot}")
    return streams


def _measure(
    console: Console, data: str, *, events: int, events_per_second: float, publish_every: int
) -> dict[str, Any]:
    stream = StreamOptions(data=data, events=events, events_per_second=events_per_second)
    options = checked(DemoOptions(stream=stream, ranks=1, publish_every=publish_every))
    with tempfile.TemporaryDirectory(prefix="deltasync-bench-") as folder:
        play(options, FLEETS, Path(folder), console, until=CURRENT)
        return _figures(Path(folder), options.events // 2)


def _figures(folder: Path, first: int) -> dict[str, Any]:
    """What is found of a stream, evaluated from event `first` on."""
    (facts,) = trainer_facts(folder, 1)
    full_push = facts["versions"] * sum(
        rows * dim * np.dtype(dtype).itemsize for _, rows, dim, dtype in facts["tables"]
    )
    scored = {fleet.consumer: quality(folder, 1, fleet.replicas[0], first) for fleet in FLEETS}
    lines = [
        _line(fleet, scored[fleet.consumer]["auc"]["synced"], _sent(folder, fleet), full_push) for fleet in FLEETS
    ]
    others = scored[FLEETS[0].consumer]["auc"]
    best = [line for line in lines if line["auc"] >= lines[0]["auc"] - _AIM_LOSS]
    return {
        "lines": lines,
        "trainer_auc": others["trainer"],
        "frozen_auc": others["frozen"],
        "full_push_bytes": full_push,
        "versions": facts["versions"],
        "events_evaluated": scored[FLEETS[0].consumer]["events_evaluated"],
        "times_fewer_bytes": max(line["times_fewer_than_full_pushes"] for line in best),
    }


def _sent(folder: Path, fleet: Fleet) -> int:
    """Bytes that a replica was sent after the first release, which is the whole model."""
    receipts = json.loads((folder / f"{fleet.replicas[0]}.json").read_text())
    return sum(int(size) for _, _, size in receipts[1:])


def _line(fleet: Fleet, auc: float, sent: int, full_push: int) -> dict[str, Any]:
    return {
        "policy": TITLES[fleet.consumer],
        "auc": auc,
        "bytes": sent,
        "times_fewer_than_full_pushes": full_push / sent,
    }


def _print(console: Console, name: str, figures: dict[str, Any]) -> None:
    title = f"quality: {name}, AUC of {figures['events_evaluated']:,} events, {figures['versions']} versions"
    table = Table(title=title, title_justify="left")
    for column in ("replica's policy", "AUC", "below full fp32", "MB sent", "times fewer than full pushes"):
        left = column == "replica's policy"
        table.add_column(column, justify="left" if left else "right", no_wrap=left)
    synced = figures["lines"][0]["auc"]
    for line in figures["lines"]:
        times = f"{line['times_fewer_than_full_pushes']:.0f}"
        table.add_row(
            line["policy"],
            f"{line['auc']:.4f}",
            f"{synced - line['auc']:.4f}",
            f"{line['bytes'] / 1e6:.2f}",
            times,
        )
    table.add_row(
        "frozen at half time", f"{figures['frozen_auc']:.4f}", f"{synced - figures['frozen_auc']:.4f}", "0", ""
    )
    table.add_row("(the trainer itself)", f"{figures['trainer_auc']:.4f}", "", "", "")
    console.print(table)
    console.print(
        f"  at most {_AIM_LOSS} AUC below full fp32: {figures['times_fewer_bytes']:.0f} times fewer bytes than "
        f"full pushes (aim: {_AIM_TIMES})"
    )


def draw(streams: dict[str, dict[str, Any]], file: Path) -> None:
    """Draw AUC over bytes sent, a panel for each stream, into a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * len(streams), 4.5), layout="constrained")
    panels = figure.subplots(1, len(streams), squeeze=False)[0]
    for panel, (name, figures) in zip(panels, streams.items(), strict=True):
        _panel(panel, name, figures)
    figure.savefig(file, dpi=120)


def _panel(panel: Any, name: str, figures: dict[str, Any]) -> None:
    for line in figures["lines"]:
        panel.plot(line["bytes"] / 1e6, line["auc"], "o", label=line["policy"])
    panel.axvline(figures["full_push_bytes"] / 1e6, linestyle=":", color="gray", label="bytes of full pushes")
    for key, text in {"trainer_auc": "trainer", "frozen_auc": "frozen at half time"}.items():
        panel.axhline(figures[key], linestyle="--", color="gray", linewidth=1)
        panel.text(0.01, figures[key], text, transform=panel.get_yaxis_transform(), va="bottom", fontsize=9)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.legend(loc="center", fontsize=9)
    panel.set(title=f"{name}: quality against bytes", xlabel="MB sent to a replica", ylabel="AUC")
