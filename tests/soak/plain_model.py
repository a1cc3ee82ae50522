"""The plain trainer of a model, as the soak starts it: run after run, each from a checkpoint of the one before."""

import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from tests.soak.crew import Crew
from tests.soak.journal import read_journal, replace_file
from tests.soak.lineage import TrainingRun, stretches, write_runs
from tests.soak.rank import journal_file, runs_file, stop_file
from tests.soak.training import FIRST_TABLES

from deltasync.core.position import Position

Change: TypeAlias = Callable[[Mapping[str, int]], Mapping[str, int]]

_MORE_STEPS = 5


class PlainModel:
    """Starts the ranks of its runs. Threads of several faults use it."""

    def __init__(self, crew: Crew, name: str, service: str, ranks: int) -> None:
        """Begin the first run, whose ranks reach the service at HOST:PORT."""
        self.name, self._crew, self._service = name, crew, service
        self._lock = threading.Lock()
        self.runs: list[TrainingRun] = []
        self._begin(
            TrainingRun(
                number=0,
                id=f"{name}-0",
                started_unix_ns=time.time_ns(),
                first_step=1,
                ranks=ranks,
                tables=FIRST_TABLES,
            )
        )

    @property
    def ranks(self) -> list[str]:
        """The names of the newest run's processes."""
        return [self._process(rank) for rank in range(self.runs[-1].ranks)]

    def restart(
        self, *, behind: int = 0, ranks: int = 0, tables: Change = lambda tables: tables, beside: bool = False
    ) -> None:
        """Begin another run from a checkpoint.

        Args:
            behind: how many acknowledged steps before the last one the checkpoint is.
            ranks: of how many processes; 0 = as many as before.
            tables: rows by table, as a function of those of the run before.
            beside: the ranks of the run before live on, until they are refused.
        """
        with self._lock:
            if not beside:
                self._crew.dismiss(self.ranks, signal.SIGKILL)
            before = self.runs[-1]
            step = max(0, self._acknowledged() - behind)
            self._begin_at(step, replace(before, ranks=ranks or before.ranks, tables=tables(before.tables)))

    def roll_back(self, run: int, version: int, do: Callable[[], object]) -> bool:
        """Have another run begin at an earlier version of this one, after `do` has rolled the model back to it.

        Whether it was done: it is not if run `run` is no longer the newest, or no rank was told of the version.
        """
        with self._lock:
            before = self.runs[-1]
            told = (line for rank in range(before.ranks) for line in self._versions(before, rank))
            steps = [each["step"] for each in told if each["version"] == version]
            if before.number != run or not steps:
                return False
            self._crew.dismiss(self.ranks, signal.SIGKILL)
            do()
            self._begin_at(max(steps), before)
            return True

    def end(self) -> None:
        """Have the ranks end some steps from now, all after the same one."""
        with self._lock:
            lines = [self._versions(self.runs[-1], rank)[-1:] for rank in range(self.runs[-1].ranks)]
            last = max([line["step"] for each in lines for line in each], default=self.runs[-1].first_step)
            replace_file(stop_file(self._crew.folder, self.name), str(last + _MORE_STEPS))

    def _begin_at(self, step: int, like: TrainingRun) -> None:
        """Begin the next run, like another one, from a checkpoint after a step."""
        number = like.number + 1
        self._begin(
            replace(
                like,
                number=number,
                id=f"{self.name}-{number}",
                started_unix_ns=time.time_ns(),
                first_step=step + 1,
                held=self._position_of(step),
            )
        )

    def _begin(self, run: TrainingRun) -> None:
        self.runs.append(run)
        write_runs(runs_file(self._crew.folder, self.name), self.runs)
        for rank in range(run.ranks):
            self._crew.start(self._process(rank), self._command(run, rank))

    def _process(self, rank: int) -> str:
        return f"{self.name}-{self.runs[-1].number}-{rank}"

    def _command(self, run: TrainingRun, rank: int) -> list[str]:
        fuse = str(fuse_file(self._crew.folder, self._process(rank)))
        which = ["--model", self.name, "--run", str(run.number), "--rank", str(rank)]
        where = ["--service", self._service, "--folder", str(self._crew.folder)]
        return ["tests.soak.fuse", fuse, "tests.soak.rank", *which, *where]

    def _acknowledged(self) -> int:
        """The last step that all ranks know to be sealed."""
        run = self.runs[-1]
        last = [self._versions(run, rank)[-1:] for rank in range(run.ranks)]
        return min([lines[0]["step"] if lines else run.first_step - 1 for lines in last])

    def _position_of(self, step: int) -> Position:
        """Of which some rank was told: another may have gone on without."""
        of_step = (run for run, steps in stretches(self.runs, step) if step in steps)
        told = (line for run in of_step for rank in range(run.ranks) for line in self._versions(run, rank))
        found = (Position(each["history"], each["version"], each["seal"]) for each in told if each["step"] == step)
        return next(found, Position())

    def _versions(self, run: TrainingRun, rank: int) -> list[Mapping[str, Any]]:
        lines = read_journal(journal_file(self._crew.folder, self.name, run.number, rank))
        return [line for line in lines if "version" in line]


def fuse_file(folder: Path, process: str) -> Path:
    return folder / f"{process}.fuse"
