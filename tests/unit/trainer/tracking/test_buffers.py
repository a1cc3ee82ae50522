"""Buffers, and parameters that are replaced: published as they are, or refused by name."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from deltasync.base.errors import DeltasyncError, InvalidInput
from deltasync.core.tables import TableKind
from deltasync.trainer.distributed.agreement import Agreement
from deltasync.trainer.sync import BufferDifferences
from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode
from deltasync.trainer.tracking.tracked_model import published_tables

FLOATS = (torch.float32, torch.float16, torch.float64)
TYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)
STATISTICS = {"0.running_mean", "0.running_var", "0.num_batches_tracked"}


class Holder(nn.Module):
    """A module with one buffer, `held`."""

    held: Any

    def __init__(self, held: torch.Tensor | None, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("held", held, persistent=persistent)


def tracker(model: nn.Module, mode: TrackingMode = TrackingMode.EMBEDDING_LAST) -> Tracker:
    return Tracker(model, TrackerOptions(mode=mode, dense=True))


def changed(tracked: Tracker) -> dict[str, NDArray[Any]]:
    """What has changed since the last call, and is no longer due."""
    delta = tracked.get_delta()
    tracked.acknowledge(delta)
    return {batch.table.name: batch.values for batch in delta.rows}


def norms(*sizes: int) -> Any:
    return nn.Sequential(*(nn.BatchNorm1d(size) for size in sizes))


def test_statistics_are_tables() -> None:
    model = norms(3, 2)
    found = {table.name: table for table in published_tables(model, dense=True)}
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert list(found) == [f"{number}.{name}" for number in (0, 1) for name in names]
    assert (found["0.running_mean"].rows, found["0.running_mean"].dim) == (1, 3)
    counted = found["1.num_batches_tracked"]
    assert (counted.rows, counted.dim, counted.dtype, counted.kind) == (1, 1, np.dtype("<i8"), TableKind.BUFFER)
    assert found["0.weight"].kind is TableKind.PARAMETER
    assert not published_tables(model, dense=False)


def test_statistics_change_in_forward() -> None:
    model = norms(3)
    tracked = tracker(model)
    assert not changed(tracked)
    model(torch.randn(4, 3))
    tracked.step()
    found = changed(tracked)
    assert set(found) == STATISTICS
    for name, buffer in model.named_buffers():
        np.testing.assert_array_equal(found[name].ravel(), buffer.numpy().ravel())
    model.eval()(torch.randn(4, 3))
    tracked.step()
    assert not changed(tracked)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_bit_by_bit(dtype: torch.dtype) -> None:
    model = Holder(torch.zeros(3, 2, 2, dtype=dtype))
    tracked = tracker(model)
    model.held[1, 1, 0] = 1
    assert changed(tracked)["held"].tolist() == [[0, 0, 1, 0]]
    assert not changed(tracked)
    if dtype in FLOATS:
        model.held[1, 1, 0] = float("nan")
        assert np.isnan(changed(tracked)["held"][0, 2])
        assert not changed(tracked)
        model.held[2, 0, 0] = -0.0
        assert np.signbit(changed(tracked)["held"][0, 0])


@pytest.mark.parametrize("shape", [(), (5,), (0,), (3, 0), (2, 3), (2, 3, 4), (70_000,), (2, 70_000)])
def test_every_shape(shape: tuple[int, ...]) -> None:
    model = Holder(torch.zeros(shape))
    tracked = tracker(model)
    tracked.resync()
    found = changed(tracked)
    assert [rows.size for rows in found.values()] == ([model.held.numel()] if model.held.numel() else [])


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (
            torch.zeros(2, dtype=torch.bfloat16),
            r"buffer 'odd.held' is of type torch.bfloat16, expected one of float32,",
        ),
        (torch.zeros(2, dtype=torch.complex64), "buffer 'odd.held' is of type torch.complex64"),
        (torch.zeros(2, 3).t(), "buffer 'odd.held' does not lie in memory row by row: make it contiguous"),
        (torch.zeros(2, 3).to_sparse(), "buffer 'odd.held' does not lie in memory row by row"),
        (torch.zeros(1).expand(3), "buffer 'odd.held' does not lie in memory row by row"),
    ],
)
def test_what_cannot_be_published_is_refused_by_name(buffer: torch.Tensor, message: str) -> None:
    model = nn.ModuleDict({"odd": Holder(buffer), "plain": nn.Linear(1, 1)})
    for attach in (tracker, partial(published_tables, dense=True)):
        with pytest.raises(InvalidInput, match=message):
            attach(model)
    assert len(Tracker(model, TrackerOptions(dense=True, fqns_to_skip=["odd.held"])).tables) == 2
    assert len(published_tables(model, dense=True, fqns_to_skip=["odd.held"])) == 2


def test_what_another_rank_tracks_can_be_left_out_here_too() -> None:
    """`DeltaSync` has the first rank alone track what every rank holds alike, and gives all ranks its options."""
    skipping = TrackerOptions(dense=False, replicas=False, fqns_to_skip=["plain"])
    model = nn.ModuleDict({"plain": nn.Linear(1, 1)})
    assert Tracker(model, skipping).tables == []
    with pytest.raises(InvalidInput, match=r"'plain' matches no table; tables: other.weight"):
        Tracker(nn.ModuleDict({"other": nn.Linear(1, 1, bias=False)}), skipping)


def test_buffers_and_parameters_that_are_replaced_are_followed() -> None:
    model = norms(2)
    tracked = tracker(model)
    model[0].running_mean = torch.tensor([1.0, 2.0])
    model[0].weight.data = torch.tensor([3.0, 4.0])
    model[0].bias = nn.Parameter(torch.tensor([5.0, 6.0]))
    found = {name: rows.tolist() for name, rows in changed(tracked).items()}
    assert found == {"0.running_mean": [[1, 2]], "0.weight": [[3, 4]], "0.bias": [[5, 6]]}
    with torch.no_grad():
        for tensor in (model[0].running_mean, model[0].weight, model[0].bias):
            tensor.add_(1)
    found = {name: rows.tolist() for name, rows in changed(tracked).items()}
    assert found == {"0.running_mean": [[2, 3]], "0.weight": [[4, 5]], "0.bias": [[6, 7]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda its: its.held.resize_(4),
            r"'held' is \[4\] of torch.float32 now, and was \[2, 2\] of torch.float32",
        ),
        (
            lambda its: its._buffers.update(held=torch.zeros(2, 2, dtype=torch.int64)),
            r"'held' is \[2, 2\] of torch.int64 now, and was \[2, 2\] of torch.float32",
        ),
        (
            lambda its: its.register_buffer("held", torch.zeros(3, 2)),
            r"'held' is \[3, 2\] of torch.float32 now, and was \[2, 2\]",
        ),
        (lambda its: its._buffers.update(held=None), r"'held' is gone, and was \[2, 2\] of torch.float32"),
    ],
)
def test_another_shape_or_type_is_refused(change: Callable[[Holder], object], message: str) -> None:
    model = Holder(torch.zeros(2, 2))
    tracked = tracker(model)
    change(model)
    with pytest.raises(InvalidInput, match=message):
        tracked.get_delta()


def test_one_tensor_in_two_places_is_one_table() -> None:
    shared = torch.zeros(2)
    model: Any = nn.ModuleDict({"a": Holder(shared), "b": Holder(shared)})
    assert [table.name for table in published_tables(model, dense=True)] == ["a.held"]
    tracked = tracker(model)
    model["b"].held += 1
    assert changed(tracked)["a.held"].tolist() == [[1, 1]]
    model["b"].held = torch.zeros(2)
    with pytest.raises(InvalidInput, match=r"'b.held' was the same tensor as 'a.held', and is another one now"):
        tracked.get_delta()


def test_what_is_not_in_the_state_dict_may_not_change() -> None:
    model: Any = nn.ModuleDict({"mask": Holder(torch.tensor([1.0, float("nan")]), persistent=False)})
    tracked = tracker(model)
    model["mask"].held = model["mask"].held.clone()
    assert not changed(tracked)
    model["mask"].held[0] = -1.0
    with pytest.raises(InvalidInput, match=r"buffer 'mask.held' has changed but is not in the state_dict"):
        tracked.get_delta()
    model["mask"].held[0] = 1.0
    assert not changed(tracked)


@pytest.mark.parametrize(
    "held", [torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex64).conj(), torch.eye(3)[:, 1:]]
)
def test_what_is_no_plain_array_may_not_change_either(held: torch.Tensor) -> None:
    model: Any = nn.ModuleDict({"graph": Holder(held.clone(), persistent=False), "linear": nn.Linear(1, 1)})
    tracked = tracker(model)
    assert not changed(tracked)
    model["graph"].held.sub_(held + held)
    with pytest.raises(InvalidInput, match=r"buffer 'graph.held' has changed"):
        tracked.get_delta()


def test_what_is_registered_later_is_refused() -> None:
    model: Any = nn.ModuleDict({"late": Holder(None)})
    tracked = tracker(model)
    model["late"].held = torch.zeros(2)
    with pytest.raises(InvalidInput, match="module 'late' now has 'held', which is not published"):
        tracked.get_delta()


class _WithExtraState(nn.Linear):
    def get_extra_state(self) -> object:
        return {"scale": 1.0}

    def set_extra_state(self, state: object) -> None: ...


def test_extra_state_is_refused_where_it_would_be_published() -> None:
    model = nn.Sequential(_WithExtraState(2, 2))
    for attach in (tracker, partial(published_tables, dense=True)):
        with pytest.raises(InvalidInput, match="module '0', a _WithExtraState, has extra state"):
            attach(model)
    Tracker(model)
    Tracker(model, TrackerOptions(dense=True, fqns_to_skip=["0"]))
    assert not published_tables(model, dense=True, fqns_to_skip=["0"])


def test_others_do_not_read_in_a_forward_of_training() -> None:
    model = norms(3)
    tracked = tracker(model)
    with ThreadPoolExecutor() as other:

        def read() -> set[str]:
            return set(other.submit(tracked.get_delta, timeout_seconds=0.01).result().ids)

        model.eval()(torch.randn(4, 3))
        assert read() == set()
        model.train()(torch.randn(4, 3))
        with pytest.raises(DeltasyncError, match="has not ended"):
            read()
        tracked.step()
        assert read() == STATISTICS


class Scripted(nn.Module):
    """A part of it is scripted: PyTorch lets nobody listen to that one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm: Any = torch.jit.script(nn.BatchNorm1d(2))

    def forward(self, batch: torch.Tensor) -> Any:
        return self.norm(batch)


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")
def test_scripted_modules_are_followed() -> None:
    model = Scripted()
    tracked = tracker(model)
    model(torch.randn(4, 2))
    with ThreadPoolExecutor() as other, pytest.raises(DeltasyncError, match="has not ended"):
        other.submit(tracked.get_delta, timeout_seconds=0).result()
    tracked.step()
    assert sorted(changed(tracked)) == ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
    changed(tracker(torch.jit.script(nn.BatchNorm1d(2))))


def test_a_copy_of_the_model_is_not_tracked() -> None:
    model = norms(3)
    tracked = tracker(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        other(torch.randn(4, 3))
    assert not tracked._gate.updating
    tracked.close()
    model(torch.randn(4, 3))
    assert not tracked._gate.updating


def test_a_compiled_model_is_not_broken_up() -> None:
    model = norms(3)
    tracked = tracker(model)
    torch.compile(model, backend="eager", fullgraph=True)(torch.randn(4, 3))  # type: ignore[no-untyped-call]
    tracked.step()
    assert set(changed(tracked)) == STATISTICS


class AllDiffer:
    """Stands in for the agreement of two ranks that have other values of every buffer."""

    rank, world_size = 0, 2

    def differing(self, digests: dict[str, int]) -> list[str]:
        return sorted(digests)


def test_buffers_that_are_left_out_may_differ_between_ranks() -> None:
    differences = BufferDifferences(norms(2), cast("Agreement", AllDiffer()), ["running_var"])
    differences.note_cut()
    assert differences.names == STATISTICS - {"0.running_var"}
