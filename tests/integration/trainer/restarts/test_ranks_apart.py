"""One rank knows of a cut or a refusal, and another does not."""

from pathlib import Path

import pytest
from tests.support.ranks import run_ranks


@pytest.mark.nightly
def test_ranks_that_are_apart_come_together_again(tmp_path: Path) -> None:
    run_ranks(str(Path(__file__).with_name("ranks_apart.py")), str(tmp_path))
