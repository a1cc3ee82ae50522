"""Row 26: reads and acknowledgements in other threads while training goes on."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from tests.integration.trainer.torchrec_defects.copies import Copy, ids_of
from tests.integration.trainer.torchrec_defects.models import BAGS, bag, bags, sharded, train
from tests.integration.trainer.torchrec_defects.scenarios import scenario
from torch import nn

from deltasync.base.errors import DeltasyncError
from deltasync.trainer.tracking import Delta, Tracker, TrackerOptions, TrackingMode

CONSUMERS = ("one", "other")
# Training goes on until every reader has had this number of deltas, or for this number of steps.
READS, MOST_STEPS = 100, 20_000
PATIENCE_SECONDS = 10.0


@contextmanager
def threads_taking_turns() -> Iterator[None]:
    """As often as Python lets them."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


class _Reader:
    """Reads and acknowledges all the time; its copy is built from that alone."""

    def __init__(self, model: nn.Module, tracker: Tracker, consumer: str) -> None:
        self._tracker, self._consumer = tracker, consumer
        self.copy = Copy(model, tracker, consumer)
        self.reads = 0

    def read_until(self, trained: threading.Event, check: Callable[[Delta], None]) -> None:
        last = False
        while not last:
            last = trained.is_set()  # Asked before the read, which then is of everything.
            delta = self._tracker.get_delta(self._consumer, timeout_seconds=PATIENCE_SECONDS)
            check(delta)
            self.copy.take(delta)
            self._tracker.acknowledge(delta)
            self.reads += bool(delta.rows)


def _train_beside_readers(
    model: nn.Module, tracker: Tracker, batches: Sequence[dict[str, list[int]]], check: Callable[[Delta], None]
) -> None:
    """Train in this thread, and see that the copies of readers in others are right in the end."""
    readers = [_Reader(model, tracker, name) for name in CONSUMERS]
    trained = threading.Event()
    with threads_taking_turns(), ThreadPoolExecutor(len(readers)) as others:
        reading = [others.submit(reader.read_until, trained, check) for reader in readers]
        try:
            for step in range(MOST_STEPS):
                train(model, **batches[step % len(batches)])
                tracker.step()
                if any(one.done() for one in reading) or min(reader.reads for reader in readers) >= READS:
                    break
        finally:
            trained.set()
        for one in reading:
            one.result()
    for reader in readers:
        assert reader.reads >= READS
        reader.copy.check(model)


@scenario(row=26)
def readers_in_other_threads_see_whole_rows_of_whole_steps() -> None:
    """Each step subtracts the same from all elements of both tables, which are in two kernels."""
    rows, wide = 64, 512
    model = sharded({"bags": bags(bag("t0", rows=rows, dim=wide)), "more": bags(bag("t1", rows=rows, dim=wide))})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    tracker = Tracker(model, TrackerOptions(consumers=CONSUMERS, mode=TrackingMode.EMBEDDING_LAST))
    everything = list(range(rows))
    _train_beside_readers(model, tracker, [{"t0": everything, "t1": everything}], _check_alike)


def _check_alike(delta: Delta) -> None:
    values = [batch.values for batch in delta.rows]
    if values:
        assert all((some == values[0][0, 0]).all() for some in values), "torn"


@scenario(row=26)
def readers_in_other_threads_miss_no_row() -> None:
    """A step changes few rows of many: what is lost once is not made up for by the next step."""
    rows = 4096
    model = sharded({"bags": bags(bag("t0", rows=rows), bag("t1", rows=rows))})
    tracker = Tracker(model, TrackerOptions(consumers=CONSUMERS, mode=TrackingMode.EMBEDDING))
    batches = [{"t0": ids, "t1": ids[::2]} for ids in torch.randperm(rows).view(-1, 16).tolist()]
    _train_beside_readers(model, tracker, batches, lambda _: None)


@scenario(row=26)
def rows_that_change_unmarked_are_not_read_half_changed() -> None:
    model = sharded({"bags": bags("t0")})
    tracker = Tracker(model)
    train(model, t0=[1])
    tracker.step()
    with tracker.pause():
        train(model, t0=[1, 2])
    with ThreadPoolExecutor(1) as other:
        with pytest.raises(DeltasyncError, match="has not ended"):
            other.submit(tracker.get_delta, timeout_seconds=0.01).result()
        tracker.step()
        assert ids_of(other.submit(tracker.get_delta).result()) == {f"{BAGS}.t0": [1]}
