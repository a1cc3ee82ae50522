"""The demo's predictors: when they take a release, when they wait for one, and the check of a canary."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deltasync.client import Position, Release, RowBatch, Shard, TableSpec, Written
from deltasync.trainer.example.features import Features
from deltasync.trainer.example.replica import RECENT_BATCHES, AucCheck, HeldTarget

TABLE = TableSpec("weight", 4, 2)


def release(step: int) -> Release:
    values = np.full((4, 2), step, np.float32)
    rows = RowBatch(Shard.whole(TABLE), np.arange(4), values)
    return Release(
        position=Position("h", step + 1),
        step=step,
        step_end_unix_ns=1,
        resync=step == 0,
        tables=[TABLE],
        rows=[rows],
        version=step + 1,
    )


class Fed:
    """A target whose releases are applied one after the other in a thread of their own."""

    def __init__(self, last_step: float, most_behind: float) -> None:
        self.target = HeldTarget(torch.nn.Linear(2, 4, bias=False), last_step=last_step, most_behind=most_behind)
        self._thread = ThreadPoolExecutor(1)

    def feed(self, step: int) -> "Future[Written | None]":
        return self._thread.submit(self.target.apply, release(step))

    def score(self) -> int:
        """Read as a request does; the step of the version that is read."""
        with self.target.reading() as reading:
            assert reading.module.weight[0, 0] == reading.step
            assert isinstance(reading.step, int)
            return reading.step


@contextmanager
def fed(last_step: float = np.inf, most_behind: float = np.inf) -> Iterator[Fed]:
    each = Fed(last_step, most_behind)
    try:
        yield each
    finally:
        each.target.stop()
        each._thread.shutdown()


@pytest.mark.timeout(20)
def test_a_release_waits_until_its_batches_are_scored() -> None:
    with fed() as each:
        each.feed(0).result()
        second = each.feed(2)
        assert each.score() == 0
        assert each.score() == 0, "what was trained on the second batch did not come before it was scored"
        written = second.result()
        assert written
        assert written.digests[0] is not None, "the proof is handed on"
        assert each.score() == 2


@pytest.mark.timeout(20)
def test_a_frozen_one_takes_nothing_of_a_later_step() -> None:
    with fed(last_step=1) as each:
        each.feed(0).result()
        assert each.score() == 0
        each.feed(1).result()
        later = each.feed(2)
        assert [each.score() for _ in range(5)] == [1] * 5
        assert not later.done()


@pytest.mark.timeout(20)
def test_nothing_is_held_back_once_it_stops() -> None:
    with fed() as each:
        waiting = threading.Thread(target=each.target.apply, args=(release(9),))
        waiting.start()
        each.target.stop()
        waiting.join()
        assert each.score() == 9


@pytest.mark.timeout(20)
def test_a_batch_waits_for_a_slow_trainer_until_the_model_is_rolled_back() -> None:
    with fed(most_behind=1) as each, ThreadPoolExecutor(1) as reader:
        each.feed(0).result()
        assert [each.score(), each.score()] == [0, 0]
        third = reader.submit(each.score)
        assert not wait([third], 0.1).done
        each.feed(2).result()  # Both batches are scored.
        third.result()
        assert each.score() == 2
        waiting = reader.submit(each.score)
        assert not wait([waiting], 0.1).done
        each.feed(1).result()
        waiting.result()
        assert [each.score() for _ in range(5)] == [1] * 5, "its trainer does not go on"


def scored(*, right: bool, seed: int) -> tuple[Features, NDArray[np.float32]]:
    """A batch of events, and scores that rank them rightly or the wrong way round."""
    label = (np.random.default_rng(seed).random(100) < 0.4).astype(np.float32)
    features = Features(
        index=np.arange(seed * 100, (seed + 1) * 100),
        label=label,
        dense=np.zeros((100, 4), np.float32),
        ids={},
        history=np.zeros(0, np.int64),
        history_lengths=np.zeros(100, np.int32),
    )
    return features, label if right else -label


def test_a_canary_objects_once_when_its_auc_falls_below_a_share_of_its_best() -> None:
    reasons = list[str]()
    check = AucCheck(reasons.append, 0.8)
    for number in range(2 * RECENT_BATCHES):
        check.add(*scored(right=True, seed=number))
    assert (reasons, check.objected_at) == ([], None)
    for number in range(2 * RECENT_BATCHES, 4 * RECENT_BATCHES):
        check.add(*scored(right=False, seed=number))
    (reason,) = reasons
    assert reason.startswith("the AUC of the last 1,600 events is 0.")
    assert reason.endswith(", its best was 1.000")
    assert check.objected_at
    assert 3200 < check.objected_at < 4800


def test_a_canary_that_was_never_good_does_not_object() -> None:
    check = AucCheck(pytest.fail, 0.8)
    for number in range(2 * RECENT_BATCHES):
        check.add(*scored(right=False, seed=number))
    assert check.objected_at is None
