"""The demo with --poison-at: the trainer learns flipped labels, a canary objects, the model is rolled back."""

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from deltasync.trainer.example.compare import load_arrays, replica_holdings, verdict
from deltasync.trainer.example.demo import IN_SYNC, MODEL, DemoOptions, DemoRun
from deltasync.trainer.example.processes import DemoFailed, Processes
from deltasync.trainer.example.replica import RECENT_BATCHES
from deltasync.trainer.example.report import auc, unequal_of

# The service keeps a version this often.
_KEEP_SECONDS = 1
# The canary needs about 2,500 events to object. The followers are further behind, and the operator takes his time.
_BEHIND_EVENTS, _REACTION_EVENTS = 8000, 4000
_PATIENCE_SECONDS, _POLL_SECONDS = 300.0, 0.2
_PLOT_EVERY = 256  # Events between two points of the plot.
_REFUSED = re.compile(r"run \S+ goes on from version .*|the model was rolled back to version .*")


def play_poisoned(options: DemoOptions, folder: Path, console: Console) -> dict[str, Any]:
    """Run the processes to the end of the stream; returns the report. `options` come from `checked`.

    Raises:
        DemoFailed: a process failed, or the canary did not object in time.
    """
    fleets = options.fleets
    _, canary, followers = (fleet.consumer for fleet in fleets)
    rate = options.stream.events_per_second
    with Processes(folder) as processes:
        run = DemoRun(options, fleets, folder, console, processes)
        run.start_service("--keep-every-seconds", str(_KEEP_SECONDS))
        run.start_others()
        run.wait_for(IN_SYNC)
        run.admin.keep_version(MODEL, "start")
        behind = _BEHIND_EVENTS / rate
        follows = run.admin.follow_consumer(followers, canary, behind, version="start")
        run.wait_for(IN_SYNC)
        run.say(f"consumer {followers} follows {follows}")
        run.say(f"from event {run.poisoned_from:,} on, the trainer learns from flipped labels")
        run.begin_stream()
        run.say(f"consumer {canary} {_objection(run, folder)}")
        run.say(f"the operator takes {_REACTION_EVENTS / rate:.1f} s to decide")
        time.sleep(_REACTION_EVENTS / rate)
        version = run.lags()[followers]["head"]
        run.watched.remove("trainer")  # It is refused, and ends with an error.
        begun = time.monotonic()
        newest = run.admin.roll_back(MODEL, version)
        run.wait_for(IN_SYNC)
        seconds = time.monotonic() - begun
        run.say(
            f"rolled back to version {version} as version {newest}; all fleets have its rows {seconds:.1f} s later"
        )
        refused = _refusal(processes)
        run.say(f"the trainer is refused: {refused}")
        _wait_until_scored(run, folder)
        run.end()
        run.say("comparing the rows of the three fleets")
    facts = {"version": version, "rollback_version": newest, "rollback_seconds": seconds, "refused": refused}
    return facts | build_poisoned(folder, options, run.poisoned_from or 0, newest)


def _objection(run: DemoRun, folder: Path) -> str:
    """Wait for the objection of the canary; returns it in words."""
    fleet = run.fleets[1]
    while True:
        lags = run.lags()
        if lags:
            run.show(lags[run.fleets[0].consumer])
            if objects := lags[fleet.consumer]["objects"]:
                return str(objects)
        if (folder / f"scored-{fleet.replicas[0]}").exists():
            raise DemoFailed(f"consumer {fleet.consumer} did not object before the end of the stream")
        time.sleep(_POLL_SECONDS)


def _refusal(processes: Processes) -> str:
    """Wait for the end of the trainer; returns the sentence with which the service refused it."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while processes.status("trainer") is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if found := _REFUSED.search((processes.folder / "trainer.log").read_text(errors="replace")):
        return found[0]
    raise DemoFailed(f"the trainer was not refused; the end of its log:\n{processes.tail('trainer')}")


def _wait_until_scored(run: DemoRun, folder: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not all((folder / f"scored-{name}").exists() for name in run.replicas):
        run.lags()
        if time.monotonic() > deadline:
            raise DemoFailed(f"the replicas did not score the stream within {_PATIENCE_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)


def build_poisoned(folder: Path, options: DemoOptions, poisoned: int, newest: int) -> dict[str, Any]:
    """Make the report from the results of the processes in `folder`.

    `auc` has the AUC of each fleet `before` event `poisoned`, `during` the last events before version `newest`
    arrived, and `after` it; `curve` has it over the whole stream.
    """
    first = {fleet.consumer: fleet.replicas[0] for fleet in options.fleets}
    scores = {name: load_arrays(folder / f"scores-{replica}.npz") for name, replica in first.items()}
    live, canary, followers = scores
    label, window = scores[live]["label"], RECENT_BATCHES * options.stream.batch_size
    back = int(np.searchsorted(scores[live]["version"], newest))  # Versions never fall.
    if len(label) - back < window:
        raise DemoFailed(
            "the stream ended too early after the rollback: use a smaller --poison-at, or more --events"
        )
    ends = {"before": poisoned, "during": back, "after": back + window}
    held = {name: replica_holdings(folder, name) for fleet in options.fleets for name in fleet.replicas}
    every = range(window, len(label) + 1, _PLOT_EVERY)

    def at(name: str, end: int) -> float:
        recent = slice(end - window, end)
        return auc(label[recent], scores[name]["logit"][recent])

    return {
        **verdict(held.pop(first[followers]), held),
        "auc": {when: {name: at(name, end) for name in scores} for when, end in ends.items()},
        "auc_events": window,
        "curve": {"events": list(every), **{name: [at(name, end) for end in every] for name in scores}},
        "events": len(label),
        "events_per_second": options.stream.events_per_second,
        "poisoned_from": poisoned,
        "objected_at": json.loads((folder / f"{first[canary]}.json").read_text())["objected_at"],
        "rolled_back_at": back,
    }


def print_poisoned(report: Mapping[str, Any], console: Console) -> None:
    """Print the report as text."""
    title = f"AUC of {report['auc_events']:,} events"
    table = Table(title=title, title_justify="left")
    table.add_column("consumer")
    titles = {"before": "before the labels flip", "during": "before the rollback", "after": "after it"}
    for text in titles.values():
        table.add_column(text, justify="right")
    for name in report["auc"]["before"]:
        table.add_row(name, *(f"{report['auc'][when][name]:.4f}" for when in titles))
    console.print(table)

    def line(name: str, text: str) -> None:
        console.print(f"{name:<14}{text}", highlight=False, soft_wrap=True)

    line("labels", f"flipped from event {report['poisoned_from']:,} on")
    line("objection", f"after event {report['objected_at']:,}")
    line("rollback", f"in {report['rollback_seconds']:.1f} s, before event {report['rolled_back_at']:,}")
    line("compared", f"{report['rows_compared']:,} rows of the live fleets with the followers', bit by bit")
    unequal = unequal_of(report)
    line("rows equal:", f"NO: {unequal}" if unequal else "yes")


def draw(report: Mapping[str, Any], file: Path) -> None:
    """Draw the AUC of the fleets over time into a PNG. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure, rate = Figure(figsize=(7.2, 3.2), layout="constrained"), report["events_per_second"]
    panel, curve = figure.subplots(), report["curve"]
    seconds = np.array(curve["events"]) / rate
    # The canary has the rows of the live fleet, so that their lines are one.
    for name, style in zip(report["auc"]["before"], ("-", ":", "-"), strict=True):
        panel.plot(seconds, curve[name], style, label=name)
    marks = {"labels flip": "poisoned_from", "canary objects": "objected_at", "rollback": "rolled_back_at"}
    for number, (text, key) in enumerate(marks.items()):
        at = report[key] / rate
        panel.axvline(at, color="gray", linestyle=":", linewidth=1)
        place = (at, 0.04 + 0.08 * number)
        panel.annotate(f"{text} ", place, xycoords=("data", "axes fraction"), fontsize=8, ha="right")
    panel.legend(loc="lower left", fontsize=8)
    panel.set(xlabel="seconds of the stream", ylabel=f"AUC of the last {report['auc_events']:,} events")
    figure.savefig(file, dpi=80)
