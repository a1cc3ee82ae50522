"""The trainer's times of batches, and its beginning and end while the service is away."""

from typing import Any
from unittest.mock import Mock, call

import pytest

from deltasync.base.errors import InvalidInput, ServiceUnavailable
from deltasync.trainer.example.train import TimedBatches, finish, publish_first
from deltasync.trainer.sync import OnRefusal

AWAY = ServiceUnavailable("the service is away")


def test_times_are_told_in_the_order_of_the_batches_that_were_taken_ahead() -> None:
    batches = TimedBatches(iter([("a", 1), ("b", 2), ("c", 5)]))
    assert [next(batches), next(batches)] == ["a", "b"]
    assert batches.trained() == 1
    assert next(batches) == "c"
    assert [batches.trained(), batches.trained()] == [2, 5]
    with pytest.raises(StopIteration):
        next(batches)


def flushing(*ends: Any) -> Mock:
    """What is a sync and checkpoints, and whose flushes end so."""
    seen = Mock()
    seen.flush.side_effect = ends
    return seen


def test_training_begins_though_the_service_is_away() -> None:
    seen = flushing(AWAY)
    publish_first(seen, OnRefusal.CONTINUE)
    assert seen.mock_calls == [call.flush(60.0)]


def test_a_trainer_that_raises_waits_for_the_first_version() -> None:
    seen = flushing(InvalidInput("refused"))
    with pytest.raises(InvalidInput, match="refused"):
        publish_first(seen, OnRefusal.RAISE)
    assert seen.mock_calls == [call.flush()]


def test_the_last_checkpoint_is_of_the_newest_version() -> None:
    seen = flushing(None, None)
    finish(seen, seen)
    assert seen.mock_calls == [call.flush(60.0), call.flush(), call.finish()]


def test_a_checkpoint_is_saved_while_the_service_is_away() -> None:
    seen = flushing(AWAY, None)
    finish(seen, seen)
    assert seen.mock_calls == [call.flush(60.0), call.save(), call.flush(), call.finish()]


def test_what_cannot_be_published_is_in_the_last_checkpoint() -> None:
    seen = flushing(InvalidInput("refused"))
    with pytest.raises(InvalidInput, match="refused"):
        finish(seen, seen)
    assert seen.mock_calls == [call.flush(60.0), call.finish()]


def test_without_checkpoints_the_end_waits_for_the_service() -> None:
    seen = flushing(None)
    finish(seen, None)
    assert seen.mock_calls == [call.flush()]
