"""The demo's predictors take a release once its events are scored, and frozen ones nothing more."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from deltasync.client import Position, Release, RowBatch, Shard, TableSpec, Written
from deltasync.trainer.example.replica import HeldTarget

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

    def __init__(self, last_step: float) -> None:
        self.target = HeldTarget(torch.nn.Linear(2, 4, bias=False), last_step=last_step)
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
def fed(last_step: float = np.inf) -> Iterator[Fed]:
    each = Fed(last_step)
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
