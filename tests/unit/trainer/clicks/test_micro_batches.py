"""The times of batches, told as they are trained on, although a pipeline takes some of them ahead."""

import pytest

from deltasync.trainer.clicks.micro_batches import TimedBatches


def test_times_are_told_in_the_order_of_the_batches_that_were_taken_ahead() -> None:
    batches = TimedBatches(iter([("a", 1), ("b", 2), ("c", 5)]))
    assert [next(batches), next(batches)] == ["a", "b"]
    assert batches.trained() == 1
    assert next(batches) == "c"
    assert [batches.trained(), batches.trained()] == [2, 5]
    with pytest.raises(StopIteration):
        next(batches)
