"""The tracker on ranks: every sharding type and variety of models, under TorchRec's pipelines."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.integration.trainer.tracking.cases import CASES
from tests.integration.trainer.tracking.pipelines import TRAININGS
from tests.support.deltas import values_of
from tests.support.ranks import run_ranks
from torch import nn

from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode

# One model with every kind of sharding, under every pipeline; by day under one of each kind.
EVERY_SHARDING = [f"{training}/every-sharding" for training in TRAININGS]
KINDS = ("Base", "Online-float16", "Online-tables-too", "SemiSync", "Fused", "micro-batches")
BY_DAY = [f"{training}/every-sharding" for training in KINDS]


def _can_wait(case: str) -> bool:
    """Whether its tables can be updated once per optimizer step."""
    return not (CASES[case].raw_ids or CASES[case].variable or case == "processed")


def groups() -> Iterator[list[str]]:
    """What the same ranks run, one after the other: "pipeline/case"."""
    two, four = ([name for name, case in CASES.items() if case.ranks == ranks] for ranks in (2, 4))
    two.remove("every-sharding")
    yield BY_DAY
    yield [name for name in EVERY_SHARDING if name not in BY_DAY]
    # Lookups come in the step of their update, before the model's forward, and a step earlier.
    yield [f"SparseDist/{case}" for case in two]
    yield [f"{training}/{case}" for training in ("Fused", "SemiSync") for case in two]
    yield [f"Online-tables-too/{case}" for case in two if _can_wait(case)]
    yield [f"{training}/{case}" for training in ("SparseDist", "SemiSync") for case in four]


GROUPS = {name: names for names in groups() for name in names}


class Ranks:
    """Runs a group when the first of it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._problems: dict[str, list[str]] = {}

    def problems(self, name: str) -> list[str]:
        if name not in self._problems:
            self._problems |= self._run(self._folder / name.replace("/", "-"), GROUPS[name])
        return self._problems[name]

    def _run(self, folder: Path, names: list[str]) -> dict[str, list[str]]:
        folder.mkdir()
        ranks, output = CASES[names[0].split("/")[1]].ranks, ""
        try:
            run_ranks(str(Path(__file__).with_name("tracking_ranks.py")), str(folder), *names, ranks=ranks)
        except AssertionError as error:
            output = str(error)
        by_rank = [problems_of_rank(folder / f"{rank}.jsonl") for rank in range(ranks)]
        unfinished = [name for name in names if any(name not in found for found in by_rank)]
        if output and not unfinished:
            unfinished = names[-1:]
        problems = {name: [problem for found in by_rank for problem in found.get(name, [])] for name in names}
        problems |= {name: [f"not run: the ranks ended in {unfinished[0]}"] for name in unfinished}
        return problems | {name: [output] for name in unfinished[:1]}


def problems_of_rank(file: Path) -> dict[str, list[str]]:
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {name: [f"rank {file.stem}, {problem}" for problem in problems] for name, problems in found}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in GROUPS],
)
def test_a_copy_built_from_deltas_alone_equals_the_model(ranks: Ranks, name: str) -> None:
    problems = ranks.problems(name)
    assert not problems, "\n".join(problems[:5])


def test_what_was_read_stays_as_it_was() -> None:
    model = nn.Linear(3, 2)
    tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST, dense=True))
    tracker.mark_all()
    values = values_of(tracker.get_delta(), "weight")
    with torch.no_grad():
        model.weight.zero_()
    assert values.abs().sum() > 0
