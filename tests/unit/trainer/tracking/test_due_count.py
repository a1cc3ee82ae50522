"""How many rows are due, known before they are read, and reads that are launched."""

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tests.support.deltas import values_of
from tests.support.embeddings import embedding
from torch import nn

from deltasync.core.digests import row_digests
from deltasync.core.rows import RowBatch
from deltasync.core.tables import TableSpec
from deltasync.trainer.tracking import Delta, Tracker, TrackerOptions, TrackingMode
from deltasync.trainer.tracking.delta import due_ids
from deltasync.trainer.tracking.shards import TrackedTable

ROWS = 6


@pytest.fixture
def model() -> Any:
    return nn.ModuleDict({"t": embedding(torch.arange(ROWS * 2.0).view(ROWS, 2))})


def tracker(model: Any, mode: TrackingMode = TrackingMode.EMBEDDING_LAST) -> Tracker:
    return Tracker(model, TrackerOptions(dense=True, mode=mode))


def test_more_rows_than_expected_are_an_error() -> None:
    ids, count = due_ids(torch.tensor([1, 1, 1], dtype=torch.int32), 0, 2)
    rows = RowBatch.of_table(TableSpec("t", 3, 1), ids.numpy(), np.zeros((2, 1), np.float32))
    with pytest.raises(RuntimeError, match="3 rows are due, at most 2 were expected"):
        _ = Delta("c", 1, [rows], {}, None, counts={"t": count}).result


def test_what_was_counted_ahead_is_not_waited_for(model: Any) -> None:
    tracking = tracker(model)
    model.t.weight.data[1] = 9
    tracking.step()
    tracking.count_ahead()
    model.t.weight.data[4] = 8
    tracking.step()
    pending = tracking.begin_delta()
    assert pending.counts, "launched"
    delta = pending.result
    assert delta.ids["t"].tolist() == [1, 4]
    assert torch.equal(values_of(delta, "t"), model.t.weight.data[[1, 4]])
    assert tracking.acknowledge(delta)
    assert not tracking.get_delta().rows


def test_a_launched_read_has_the_digests_that_are_made_on_a_device(model: Any) -> None:
    tracking = tracker(model)
    tracking.count_ahead()
    model.t.weight.data[[2, 3]] = 5
    with mock.patch.object(TrackedTable, "device", torch.device("cuda")):
        (batch,) = tracking.begin_delta().result.rows
    assert batch.digests is not None
    assert batch.digests.tolist() == row_digests(batch.values).tolist()


def test_a_launched_read_has_the_rows_as_they_were_then(model: Any) -> None:
    tracking = tracker(model)
    tracking.count_ahead()
    model.t.weight.data[2] = 5
    pending = tracking.begin_delta()
    model.t.weight.data[2] = 6
    model.t.weight.data[3] = 7
    delta = pending.result
    assert (delta.ids["t"].tolist(), values_of(delta, "t").tolist()) == ([2], [[5, 5]])
    tracking.acknowledge(delta)
    assert tracking.get_delta().ids["t"].tolist() == [2, 3]


@pytest.mark.parametrize("why", ["not counted", "no rows", "first values", "large"])
def test_other_reads_are_complete_at_once(model: Any, why: str) -> None:
    if why == "large":
        model = nn.ModuleDict({"t": embedding(torch.zeros(1 << 17, 129))})  # 65 MiB
    tracking = tracker(model, TrackingMode.EMBEDDING if why == "first values" else TrackingMode.EMBEDDING_LAST)
    if why == "no rows":
        tracking.resync()
    if why != "not counted":
        tracking.count_ahead()
    model.t.weight.data[[1, 2]] = 9
    delta = tracking.begin_delta()
    assert not delta.counts
    assert delta.arrived
    assert delta.ids["t"].tolist() == (list(range(ROWS)) if why == "no rows" else [1, 2])


@dataclass
class Arrival:
    """Stands in for an event of a GPU."""

    over: bool = False
    waited: list[str] = field(default_factory=list)

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.waited.append("host waits")


def test_only_the_result_waits_for_the_gpu(model: Any) -> None:
    tracking, counted, read = tracker(model), Arrival(), Arrival()
    arrivals = iter([counted, read])
    tracking._gate.arrival = lambda: next(arrivals)  # type: ignore[method-assign,assignment,return-value]
    tracking.count_ahead()
    assert not counted.waited
    model.t.weight.data[2] = 5
    with mock.patch.object(tracking._gate, "hold_changes", wraps=tracking._gate.hold_changes) as hold:
        pending = tracking.begin_delta()
    assert hold.called, "what is launched next comes after it on the GPU"
    assert counted.waited == ["host waits"], "for the step before"
    assert not pending.arrived
    assert not read.waited
    read.over = True
    assert pending.arrived
    assert pending.result.ids["t"].tolist() == [2]
    assert pending.result is pending.result
    assert read.waited == ["host waits"]
