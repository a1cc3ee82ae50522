"""Runs that begin from a checkpoint."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.soak.journal import Journal
from tests.soak.plain_model import PlainModel
from tests.soak.rank import journal_file

from deltasync.core.position import Position


def test_a_checkpoint_may_be_of_a_step_of_which_one_rank_was_told_nothing(tmp_path: Path) -> None:
    """It has gone on with the others, as the service was put back."""
    crew: Any = SimpleNamespace(folder=tmp_path, start=lambda *_: None, dismiss=lambda *_: None)
    model = PlainModel(crew, "pair", "service:1", ranks=2)
    for rank, steps in enumerate([(1, 3), (1, 2, 3)]):
        journal = Journal(journal_file(tmp_path, "pair", 0, rank))
        for step in steps:
            journal.append(step=step, version=step + 10, history="h", seal=step)
        journal.close()
    model.restart(behind=1)
    assert (model.runs[-1].first_step, model.runs[-1].held) == (3, Position("h", 12, 2))
    assert model.runs[-1].held.seal == 2
