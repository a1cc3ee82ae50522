"""What the log of a rank says that waits for others."""

import logging

import pytest

from deltasync.trainer.distributed.ranks import named, wait_aloud


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
