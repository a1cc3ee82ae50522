"""The demo's replica: it scores a batch before it applies what was trained on it, and a canary objects."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deltasync.client import Position, Release, RowBatch, Shard, TableSpec, Written
from deltasync.trainer.example.replica import RECENT_BATCHES, AucCheck, ScoredFirst

TABLE = TableSpec("weight", 4, 2)


def release(step: int) -> Release:
    rows = RowBatch(Shard.whole(TABLE), np.arange(4), np.full((4, 2), step, np.float32))
    return Release(
        position=Position("h", step + 1),
        step=step,
        step_end_unix_ns=1,
        resync=step == 0,
        tables=[TABLE],
        rows=[rows],
        version=step + 1,
        bytes=96,
    )


class Fed:
    """A target whose releases are applied one after the other by a thread, like that of a subscriber."""

    def __init__(self) -> None:
        self.target = ScoredFirst(torch.nn.Linear(2, 4, bias=False))
        self.thread = ThreadPoolExecutor(1)

    def apply(self, step: int) -> "Future[Written | None]":
        return self.thread.submit(self.target.apply, release(step))

    def score(self) -> float:
        """Score a batch; returns the value of all rows."""
        with self.target.reading() as reading:
            value = float(reading.module.get_parameter("weight").detach()[0, 0])
            assert value == reading.step
        self.target.count_batch()
        return value


@pytest.fixture
def fed() -> Iterator[Fed]:
    fed = Fed()
    yield fed
    fed.target.stop_waiting()
    fed.thread.shutdown()


@pytest.mark.timeout(20)
def test_release_waits_until_its_batches_are_scored(fed: Fed) -> None:
    fed.apply(0).result()
    second = fed.apply(2)
    assert [fed.score(), fed.score()] == [0, 0]
    written = second.result()
    assert written
    assert written.digests[0] is not None, "the proof is passed on"
    assert fed.score() == 2
    assert [(step, size) for step, _, size in fed.target.receipts] == [(0, 96), (2, 96)]
    np.testing.assert_array_equal(fed.target.rows()["weight"], np.full((4, 2), 2, np.float32))


@pytest.mark.timeout(20)
def test_rollback_to_an_earlier_step_does_not_wait(fed: Fed) -> None:
    fed.apply(0).result()
    fed.score()
    fed.apply(1).result()
    fed.apply(0).result()
    assert fed.score() == 0


@pytest.mark.timeout(20)
def test_releases_do_not_wait_once_the_replica_stops(fed: Fed) -> None:
    waiting = fed.apply(9)
    fed.target.stop_waiting()
    waiting.result()
    assert fed.score() == 9


def scored(*, right: bool, seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Labels, and scores that rank them rightly or the wrong way round."""
    labels = (np.random.default_rng(seed).random(100) < 0.4).astype(np.float32)
    return labels, labels if right else -labels


def test_canary_objects_when_its_auc_falls_below_a_share_of_its_best() -> None:
    check = AucCheck(0.8)
    before = [check.objection(*scored(right=True, seed=number)) for number in range(2 * RECENT_BATCHES)]
    after = [check.objection(*scored(right=False, seed=number)) for number in range(2 * RECENT_BATCHES)]
    assert not any(before)
    assert not after[0]
    assert after[-1].startswith("the AUC of the last 1,600 events is 0.0")
    assert after[-1].endswith(", its best was 1.000")


def test_canary_that_was_never_good_does_not_object() -> None:
    check = AucCheck(0.8)
    assert not any(check.objection(*scored(right=False, seed=number)) for number in range(2 * RECENT_BATCHES))
