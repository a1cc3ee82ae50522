"""What ranks are and share: where each trains, what a wait says, and a start of a single rank.

See `agreement_ranks.py` for a start of several.
"""

import logging

import pytest

from deltasync.trainer.distributed.ranks import begun_together, choose_device, named, wait_aloud


@pytest.mark.parametrize(
    ("gpus", "local_ranks", "cuda_kernels", "kind", "reason"),
    [
        (0, 2, True, "cpu", "no GPU"),
        (8, 2, False, "cpu", "make install CUDA=1"),
        (1, 2, True, "cpu", "2 ranks need a GPU each, but there are only 1"),
        (2, 2, True, "cuda", "a GPU each"),
    ],
)
def test_a_gpu_each_or_none(gpus: int, local_ranks: int, cuda_kernels: bool, kind: str, reason: str) -> None:
    chosen, why = choose_device(gpus, local_ranks, cuda_kernels)
    assert chosen == kind
    assert reason in why


def test_a_wait_is_logged_after_ten_seconds_and_every_minute_from_then_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    waits, steps = [], iter(range(117, 200))

    def arrived(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) == 4

    with caplog.at_level(logging.WARNING):
        wait_aloud(arrived, lambda: f"rank 1 (last seen at step {next(steps)})")
    assert waits == [10, 60, 60, 60]
    assert caplog.messages == [
        "rank 0 has waited 10 s for rank 1 (last seen at step 117)",
        "rank 0 has waited 70 s for rank 1 (last seen at step 118)",
        "rank 0 has waited 130 s for rank 1 (last seen at step 119)",
    ]


def test_a_short_wait_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    wait_aloud(lambda _: True, lambda: pytest.fail("nobody asks"))
    assert not caplog.messages


def test_of_many_ranks_the_first_are_named() -> None:
    assert named([3]) == "rank 3"
    assert named(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert named(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 others"


def test_an_error_of_a_lone_rank_is_raised_as_it_is() -> None:
    error = KeyError("missing")
    with pytest.raises(KeyError) as raised, begun_together("Tracker", {"mode": 1}):
        raise error
    assert raised.value is error


def test_a_lone_rank_begins() -> None:
    with begun_together("Tracker", {"mode": 1}):
        begun = True
    assert begun
