"""What tracking costs: bytes that are read, no compiler in the middle of a step, and every row that is touched."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.embeddings import embedding
from torch import nn

from deltasync.kernels import digests, tracking
from deltasync.kernels.compiled import Kernel
from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode

NAMES = {f"{what}_{unit}" for what in ("marking", "compaction", "reading") for unit in ("seconds", "bytes")}


def test_bytes_read_are_those_of_ids_and_values() -> None:
    model = nn.Linear(8, 4)
    tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST, dense=True))
    tracker.add_consumer("first", TrackingMode.EMBEDDING)
    assert set(tracker.cost.as_dict()) == NAMES
    before = tracker.cost.as_dict()
    assert not any(value for name, value in before.items() if name != "reading_seconds")
    with torch.no_grad():
        model.weight[1:3] += 1.0
    two_rows, read = 2 * 8 * 4, 0
    for get_delta, consumer, nbytes in (
        (tracker.get_delta, "default", 16 + two_rows),
        (tracker.get_delta, "first", 16 + 2 * two_rows),
        (tracker.get_delta_ids, "default", 16),
    ):
        get_delta(consumer)
        read += nbytes
        assert tracker.cost.reading_bytes == read
    assert tracker.cost.seconds >= tracker.cost.reading_seconds > before["reading_seconds"]


def refuse(kernel: object) -> None:
    raise AssertionError(f"{kernel} is compiled in the middle of a step")


def test_no_step_and_no_read_waits_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (digests, tracking):
        for kernel in vars(room).values():
            if isinstance(kernel, Kernel):
                monkeypatch.setattr(kernel, "_compiled", None)
    model: Any = nn.ModuleDict({"t": embedding(torch.ones(4, 2))})
    tracker = Tracker(model, TrackerOptions(dense=True))
    monkeypatch.setattr(Kernel, "compile", refuse)
    model.t.weight.data[1] = 2
    tracker.delete("t", torch.tensor([2]))
    tracker.step()
    delta = tracker.get_delta()
    assert (delta.ids["t"].tolist(), delta.deletes["t"].tolist()) == ([1], [2])
    assert tracker.acknowledge(delta)
    tracker.mark_all()
    assert tracker.get_delta().ids["t"].tolist() == [0, 1, 2, 3]


def test_more_than_two_million_touched_rows_are_all_offered() -> None:
    rows = 2_097_152 + 3
    tracker = Tracker(
        nn.ModuleDict({"t": embedding(torch.zeros(rows, 1))}),
        TrackerOptions(mode=TrackingMode.EMBEDDING, dense=True),
    )
    tracker.acknowledge(tracker.get_delta())
    tracker.mark("t", torch.arange(rows))
    for _ in range(2):  # Until it is acknowledged.
        assert np.array_equal(tracker.get_delta().ids["t"], np.arange(rows))
    tracker.acknowledge(tracker.get_delta())
    assert not tracker.get_delta().rows
    tracker.close()
