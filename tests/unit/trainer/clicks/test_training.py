"""The training of a click model while the service is away: neither its beginning nor its last checkpoint waits."""

from typing import Any
from unittest.mock import ANY, Mock, call

import pytest

from deltasync.core.errors import InvalidInput, ServiceUnavailable
from deltasync.trainer.clicks.training import Training
from deltasync.trainer.sync import OnRefusal

AWAY = ServiceUnavailable("the service is away")


def run(flushes: list[Any], on_refusal: OnRefusal = OnRefusal.CONTINUE, *, saves: bool = True) -> list[Any]:
    """What is called in turn by a training of two steps, of which each flush ends so."""
    seen = Mock()
    seen.progress.side_effect = ["first", "second", StopIteration]
    seen.flush.side_effect = flushes
    training = Training(seen, seen, on_refusal, checkpoints=seen if saves else None)
    try:
        training.run(Mock())
    finally:
        called = [each for each in seen.mock_calls if each[0] in {"flush", "save", "finish", "progress"}]
    return called


BEGUN = [call.flush(60.0), *[call.progress(ANY)] * 3]


def test_training_begins_and_is_saved_while_the_service_is_away() -> None:
    assert run([AWAY, AWAY, None]) == [*BEGUN, call.flush(60.0), call.save(), call.flush(), call.finish()]


def test_the_last_checkpoint_is_of_the_newest_version() -> None:
    assert run([None, None, None]) == [*BEGUN, call.flush(60.0), call.flush(), call.finish()]


def test_without_checkpoints_the_end_waits_for_the_service() -> None:
    assert run([None, None], saves=False) == [*BEGUN, call.flush()]


def test_whoever_wants_errors_waits_for_the_first_version() -> None:
    with pytest.raises(InvalidInput, match="refused"):
        run([InvalidInput("refused")], OnRefusal.RAISE)
    assert run([None, None, None], OnRefusal.RAISE)[0] == call.flush(None)
