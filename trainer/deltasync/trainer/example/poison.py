"""11. The demo with --poison-at: the trainer learns flipped labels, a canary objects, the model is rolled back."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from deltasync.trainer.example.processes import DemoFailed, Processes
from deltasync.trainer.example.report import differences, print_lines
from deltasync.trainer.example.results import auc, load_arrays
from deltasync.trainer.example.run import IN_SYNC, MODEL, DemoOptions, DemoRun, Fleet

LEAST_EVENTS = 12_000
"""Events before and after the labels flip: enough to learn, and for AUC to fall and come back."""
CANARY, FOLLOWER = "replica-canary", "replica-follower"
# The canary objects about 2,500 events after the flip, so the follower must be further behind.
_BEHIND_EVENTS, _WINDOW_EVENTS = 8000, 2048
_OBJECT_BELOW = 0.85  # Share of the best AUC.
_PATIENCE_SECONDS, _POLL_SECONDS = 300.0, 0.2
_REFUSED = re.compile(r"run \S+ goes on from version .*|the model was rolled back to version .*")


@dataclass(frozen=True, kw_only=True)
class PoisonReport:
    """The results of a run with flipped labels. `unequal` has the rows in which canary and follower differ."""

    unequal: Mapping[str, Mapping[str, int]]
    auc: Mapping[str, tuple[float, ...]]
    version: int
    newest: int
    refused: str

    def show(self, console: Console) -> None:
        """Print the report."""
        table = Table(title=f"AUC of {_WINDOW_EVENTS:,} events", title_justify="left")
        for title in ("consumer", "before the labels flip", "before the rollback", "after it"):
            table.add_column(title)
        for name, values in self.auc.items():
            table.add_row(name, *(f"{value:.4f}" for value in values))
        console.print(table)
        lines = {
            "rollback": f"to version {self.version}, whose rows are the newest version {self.newest}",
            "trainer": f"refused: {self.refused}",
            "rows equal:": f"NO: {self.unequal}" if self.unequal else "yes",
        }
        print_lines(console, lines)


def play_poisoned(options: DemoOptions, processes: Processes, console: Console) -> PoisonReport:
    """Run the processes until the rollback has shown its effect; DemoFailed if the canary does not object."""
    canary = Fleet("canary", (CANARY,), arguments=(f"--object-below={_OBJECT_BELOW}",))
    follower = Fleet("followers", (FOLLOWER,))
    rate, poison_at = options.stream.events_per_second, int((options.poison_at or 0) * options.events)
    run = DemoRun(options, [canary, follower], processes, console)
    run.start(service=["--keep-every-seconds=1"], trainer=[f"--poison-at={poison_at}"])
    run.admin.keep_version(MODEL, "start")
    behind = _BEHIND_EVENTS / rate
    follows = run.admin.follow_consumer(follower.consumer, canary.consumer, behind, version="start")
    run.say(f"consumer {follower.consumer} follows {follows}")
    run.say(f"from event {poison_at:,} on, the trainer learns from flipped labels")
    run.begin_stream()
    while not (objection := run.lags()[canary.consumer]["objects"]):
        if not processes.running("trainer"):
            raise DemoFailed(f"consumer {canary.consumer} did not object before the end of the stream")
        time.sleep(_POLL_SECONDS)
    run.say(f"consumer {canary.consumer} {objection}")
    version = run.lags()[follower.consumer]["head"]
    run.watched.remove("trainer")  # It is refused, and ends with an error.
    newest = run.admin.roll_back(MODEL, version)
    run.wait_for(IN_SYNC)
    run.say(f"rolled back to version {version}; waiting for the effect on the AUC")
    refused = _refusal(processes)
    time.sleep(_WINDOW_EVENTS / rate + 2)
    run.end()
    unequal = differences(load_arrays(processes.folder, f"tables-{FOLLOWER}"), processes.folder, [CANARY])
    found = _auc(processes.folder, (CANARY, FOLLOWER), poison_at, newest)
    return PoisonReport(unequal=unequal, auc=found, version=version, newest=newest, refused=refused)


def _refusal(processes: Processes) -> str:
    """Wait for the end of the trainer; returns the sentence with which the service refused it."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while processes.status("trainer") is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if found := _REFUSED.search((processes.folder / "trainer.log").read_text(errors="replace")):
        return found[0]
    raise DemoFailed(f"the trainer was not refused; the end of its log:\n{processes.tail('trainer')}")


def _auc(folder: Path, replicas: Sequence[str], poison_at: int, newest: int) -> dict[str, tuple[float, ...]]:
    """AUC of each replica before event `poison_at`, before version `newest`, and at the end."""
    scores = {name: load_arrays(folder, f"scores-{name}") for name in replicas}
    back = int(np.searchsorted(scores[replicas[0]]["version"], newest))  # Versions never fall.
    last = min(len(each["label"]) for each in scores.values())
    if last - back < _WINDOW_EVENTS:
        raise DemoFailed("too few events after the rollback: use a smaller --poison-at, or more --events")
    windows = [slice(end - _WINDOW_EVENTS, end) for end in (poison_at, back, last)]
    return {name: tuple(auc(of["label"][at], of["logit"][at]) for at in windows) for name, of in scores.items()}
