"""The runs of a model that is trained again and again, each from some step of the one before."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.soak.journal import replace_file

from deltasync.core.position import Position


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One run of a plain trainer.

    Attributes:
        number: from 0, of the runs of its model.
        id: what the service knows it by.
        started_unix_ns: when it began, nanoseconds since 1970.
        first_step: it begins with what the run before held after the step before this one: its checkpoint.
        ranks: of how many processes.
        tables: rows by table.
        held: the position of its checkpoint.
    """

    number: int
    id: str
    started_unix_ns: int
    first_step: int
    ranks: int
    tables: Mapping[str, int]
    held: Position = field(default_factory=Position)


def write_runs(file: Path, runs: Sequence[TrainingRun]) -> None:
    replace_file(file, json.dumps([asdict(run) for run in runs]))


def read_runs(file: Path) -> list[TrainingRun]:
    return [TrainingRun(**each | {"held": Position(**each["held"])}) for each in json.loads(file.read_text())]


def stretches(runs: Sequence[TrainingRun], last_step: int) -> Iterator[tuple[TrainingRun, range]]:
    """The steps that have made what the last of some runs holds after a step, oldest first.

    What an earlier run did after the checkpoint of a later one is no more.
    """
    end, found = last_step + 1, list[tuple[TrainingRun, range]]()
    for run in reversed(runs):
        if run.first_step < end:
            found.append((run, range(run.first_step, end)))
            end = run.first_step
    return reversed(found)
