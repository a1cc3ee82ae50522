"""Deletes: what is said of them, what is refused, and what dense optimizers and caches keep of rows."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.embeddings import embedding
from torch import nn

from deltasync.base.errors import InvalidInput, NotFound
from deltasync.core.tables import Shard, TableSpec
from deltasync.trainer.tracking import Delta, Tracker, TrackerOptions, TrackingMode
from deltasync.trainer.tracking.shards import TrackedShard, TrackedTable, reset_rows


def ids(delta: Delta) -> tuple[list[int], list[int]]:
    """Of rows and of deletes."""
    rows, deletes = delta.ids.get("t"), delta.deletes.get("t")
    return [] if rows is None else rows.tolist(), [] if deletes is None else deletes.tolist()


@pytest.fixture
def model() -> Any:
    return nn.ModuleDict({"t": embedding(torch.arange(1.0, 9.0).view(4, 2))})


@pytest.fixture
def tracker(model: Any) -> Iterator[Tracker]:
    tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING, dense=True))
    yield tracker
    tracker.close()


def test_a_delete_is_offered_until_it_is_acknowledged(model: Any, tracker: Tracker) -> None:
    tracker.delete("t", torch.tensor([3, 1, 3], dtype=torch.int32))
    assert model.t.weight.tolist() == [[1.0, 2.0], [0.0, 0.0], [5.0, 6.0], [0.0, 0.0]]
    delta = tracker.get_delta()
    assert ids(delta) == ids(tracker.get_delta()) == ids(tracker.get_delta_ids()) == ([], [1, 3])
    (batch,) = delta.rows
    assert (batch.deleted, batch.ids.tolist(), batch.shard.table.name) == (True, [1, 3], "t")
    assert delta.nbytes == 16
    tracker.acknowledge(delta)
    assert ids(tracker.get_delta()) == ([], [])


def test_a_row_that_is_to_be_sent_again_stays_deleted(tracker: Tracker) -> None:
    tracker.acknowledge(tracker.get_delta())
    tracker.delete("t", torch.tensor([1]))
    tracker.acknowledge(tracker.get_delta())
    changes = tracker.changes
    tracker.offer_again("t", torch.tensor([1]))
    assert tracker.changes > changes
    assert ids(tracker.get_delta()) == ([], [1])
    tracker.offer_again("t", torch.tensor([0, 1]))
    assert ids(tracker.get_delta()) == ([0], [1])


@pytest.mark.parametrize(
    ("table", "wrong", "error", "message"),
    [
        ("u", torch.tensor([1]), NotFound, "no table 'u' is tracked on this rank; there are: t"),
        ("t", torch.tensor([4]), InvalidInput, "table 't': ids from 4 to 4, but it has rows 0 to 3"),
        ("t", torch.tensor([-1, 2]), InvalidInput, "ids from -1 to 2"),
        ("t", torch.tensor([1.0]), InvalidInput, "expected integers"),
        ("t", torch.tensor([True, False]), InvalidInput, "type torch.bool, expected integers"),
        ("t", torch.tensor([1j]), InvalidInput, "type torch.complex64, expected integers"),
        ("t", torch.tensor([1], dtype=torch.uint64), InvalidInput, "type torch.uint64, expected integers"),
        ("t", torch.tensor([[1]]), InvalidInput, "expected integers"),
        ("t", [3, 4], TypeError, r"ids is of type list, expected Tensor: torch.tensor\(ids\)"),
    ],
)
def test_what_cannot_be_deleted(
    model: Any, tracker: Tracker, table: str, wrong: torch.Tensor, error: type[Exception], message: str
) -> None:
    before = model.t.weight.detach().clone()
    with pytest.raises(error, match=message):
        tracker.delete(table, wrong)
    assert torch.equal(model.t.weight, before)
    assert ids(tracker.get_delta()) == ([], [])


def test_copies_that_another_rank_reports_are_reset_too(model: Any) -> None:
    tracker = Tracker(model, TrackerOptions(dense=True, replicas=False))
    tracker.delete("t", torch.tensor([2]))
    assert not model.t.weight[2].any()
    assert tracker.get_delta().deletes == {}
    assert tracker.changes == 0


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.25),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_dense_optimizer_forgets_a_deleted_row(
    model: Any, tracker: Tracker, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    """Otherwise momentum would bring it back."""
    optimizer = make(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        (model.t.weight**2).sum().backward()
        optimizer.step()
    tracker.acknowledge(tracker.get_delta())
    tracker.delete("t", torch.tensor([1]))
    optimizer.zero_grad()
    (model.t.weight**2).sum().backward()
    optimizer.step()
    assert ids(tracker.get_delta()) == ([0, 2, 3], [1])
    fresh = make([nn.Parameter(torch.zeros(1, 2))])
    (parameter,) = fresh.param_groups[0]["params"]
    parameter.grad = torch.zeros(1, 2)
    fresh.step()
    for key, state in optimizer.state[model.t.weight].items():
        if state.numel() == model.t.weight.numel():
            assert torch.equal(state[1:2], fresh.state[parameter][key]), key


def test_rows_in_a_cache_are_reset_there_too() -> None:
    """The cache calls rows by numbers of its own; what is prefetched keeps its place."""
    table = TableSpec("t", 6, 2, np.dtype("<f4"))
    state = torch.tensor([[12, -1], [10, 15], [3, 13]])
    cache = SimpleNamespace(lxu_cache_state=state, lxu_cache_weights=torch.ones(6, 2))
    weight, momentum = torch.ones(6, 2), torch.ones(6, 1)
    shard = TrackedShard(
        Shard.whole(table), weight, [momentum], cached_in=SimpleNamespace(emb_module=cache), cache_offset=10
    )
    reset_rows(TrackedTable(table, [shard], [], fused=True, replicated=False), torch.tensor([0, 3, 4]))
    assert weight[:, 0].tolist() == momentum[:, 0].tolist() == [0.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    assert cache.lxu_cache_weights[:, 0].tolist() == [1.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    assert torch.equal(cache.lxu_cache_state, state)
