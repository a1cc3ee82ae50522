"""Checkpoints of a run of two ranks, written in the background."""

from pathlib import Path

from tests.support.ranks import run_ranks


def test_checkpoints_are_whole_or_not_there(tmp_path: Path) -> None:
    run_ranks(str(Path(__file__).with_name("checkpoint_ranks.py")), str(tmp_path))
