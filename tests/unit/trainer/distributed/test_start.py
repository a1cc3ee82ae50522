"""A start of a single rank, which compares its options with nobody's. See `agreement_ranks.py` for several."""

import pytest

from deltasync.trainer.distributed.ranks import begun_together


def test_an_error_of_a_lone_rank_is_raised_as_it_is() -> None:
    error = KeyError("missing")
    with pytest.raises(KeyError) as raised, begun_together("Tracker", {"mode": 1}):
        raise error
    assert raised.value is error


def test_a_lone_rank_begins() -> None:
    with begun_together("Tracker", {"mode": 1}):
        begun = True
    assert begun
