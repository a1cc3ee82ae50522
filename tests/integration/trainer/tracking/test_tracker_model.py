"""Random interleavings of training and all that can be done to a tracker, against a plain model of sets."""

from pathlib import Path

import pytest
from tests.support.ranks import run_ranks


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_any_interleaving(ranks: int) -> None:
    run_ranks(str(Path(__file__).with_name("tracker_model_ranks.py")), "50", ranks=ranks)
