"""Ranks that are refused together all say why, whichever of them ends first."""

from pathlib import Path

import pytest
from tests.integration.trainer.distributed.refused_ranks import PLAYS
from tests.support.process import ServiceProcess
from tests.support.ranks import run_ranks

BY_DAY = ("a_rank_closes_a_step_early",)


@pytest.mark.parametrize(
    "play",
    [
        pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly)
        for name in (play.__name__ for play in PLAYS)
    ],
)
def test_all_ranks_raise_the_same_sentence(service: ServiceProcess, tmp_path: Path, play: str) -> None:
    script = str(Path(__file__).with_name("refused_ranks.py"))
    run_ranks(script, play, service.grpc, str(tmp_path), ranks=3)
