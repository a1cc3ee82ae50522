"""Rows 15 and 20 to 22: momentum, against what the kernels themselves say."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.torchrec_defects.copies import Copy, ids_of
from tests.integration.trainer.torchrec_defects.models import (
    BAGS,
    DIM,
    ROWS,
    bag,
    bags,
    kernels_of,
    sharded,
    train,
)
from tests.integration.trainer.torchrec_defects.registry import scenario
from torch import nn
from torchrec.distributed.sharding_plan import column_wise, data_parallel

from deltasync.core.errors import InvalidInput
from deltasync.trainer.tracking.modes import TrackingMode
from deltasync.trainer.tracking.options import TrackerOptions
from deltasync.trainer.tracking.tracker import Tracker

T0, T1 = f"{BAGS}.t0", f"{BAGS}.t1"
ROWWISE, WHOLE = EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_ADAGRAD


def momenta(model: nn.Module) -> list[torch.Tensor]:
    """Copies of the state of each shard of each table, as the only kernel of the model has them."""
    (kernel,) = kernels_of(model)
    return [states[0].detach().clone().view(ROWS, -1) for states in kernel.split_optimizer_states()]


@scenario(row=15)
def two_column_shards_on_a_rank_have_their_momenta_side_by_side() -> None:
    halves = column_wise(ranks=[0, 0], compute_kernel="fused")
    for mode in (TrackingMode.MOMENTUM_DIFF, TrackingMode.ROWWISE_ADAGRAD):
        model = sharded({"bags": bags(bag("t0", dim=8))}, {"t0": halves}, optimizer=ROWWISE)
        tracker = Tracker(model, TrackerOptions(mode=mode))
        train(model, t0=[5])
        tracker.clear()
        before = torch.cat(momenta(model), dim=1)
        train(model, t0=[5, 7, 7])
        tracker.step()
        rows = tracker.get_delta().rows[T0]
        now = torch.cat(momenta(model), dim=1)
        assert rows.ids.tolist() == [5, 7]
        assert rows.columns == [(0, 4), (4, 4)]
        assert rows.values is not None
        assert rows.states is not None
        assert torch.equal(rows.values, now[[5, 7]])
        assert torch.equal(rows.states, (now - before)[[5, 7]])


@scenario(row=15)
def two_column_shards_on_a_rank_make_up_whole_rows() -> None:
    model = sharded({"bags": bags(bag("t0", dim=8))}, {"t0": column_wise(ranks=[0, 0], compute_kernel="fused")})
    for mode in (TrackingMode.EMBEDDING_LAST, TrackingMode.EMBEDDING):
        tracker = Tracker(model, TrackerOptions(mode=mode))
        copy = Copy(model, tracker)
        copy.update()
        train(model, t0=[5, 7])
        tracker.step()
        assert copy.update() == {T0: [5, 7]}
        copy.check(model)


@scenario(row=20)
def momentum_of_whole_rows_is_tracked_too() -> None:
    for mode in (TrackingMode.MOMENTUM_LAST, TrackingMode.MOMENTUM_DIFF):
        _check_two_tables(mode, WHOLE, columns=DIM)


@scenario(row=21)
def momentum_of_two_tables_in_a_kernel_is_each_its_own() -> None:
    for mode in (TrackingMode.MOMENTUM_DIFF, TrackingMode.ROWWISE_ADAGRAD):
        _check_two_tables(mode, ROWWISE, columns=1)


@scenario(row=22)
def last_momentum_is_that_of_the_last_step() -> None:
    _check_two_tables(TrackingMode.MOMENTUM_LAST, ROWWISE, columns=1)


def _check_two_tables(mode: TrackingMode, optimizer: EmbOptimType, columns: int) -> None:
    model = sharded({"bags": bags("t0", "t1")}, optimizer=optimizer)
    tracker = Tracker(model, TrackerOptions(mode=mode))
    train(model, t0=[0, 1, 2], t1=[2, 3, 3])
    tracker.clear()
    before = momenta(model)
    for ids in ([1, 3], [3, 4]):
        train(model, t0=ids, t1=[ids[0], ids[0], ids[1]])
        tracker.step()
    delta, now = tracker.get_delta(), momenta(model)
    assert ids_of(delta) == {T0: [1, 3, 4], T1: [1, 3, 4]}
    for number, fqn in enumerate((T0, T1)):
        rows = delta.rows[fqn]
        assert rows.values is not None
        assert rows.states is not None
        assert rows.values.shape == (3, columns)
        assert torch.equal(rows.values, now[number][rows.ids])
        grown = now[number] if mode is TrackingMode.MOMENTUM_LAST else now[number] - before[number]
        assert torch.equal(rows.states, grown[rows.ids])
        assert torch.equal(rows.norms(), grown[rows.ids].norm(dim=1))


@scenario(row=22)
def momentum_of_a_data_parallel_table_is_refused() -> None:
    model = sharded({"bags": bags("t0", "t1")}, {"t1": data_parallel()}, optimizer=ROWWISE)
    for mode in (TrackingMode.MOMENTUM_LAST, TrackingMode.MOMENTUM_DIFF, TrackingMode.ROWWISE_ADAGRAD):
        with pytest.raises(InvalidInput, match=f"table '{T1}' has no momentum in a fused optimizer; skip it"):
            Tracker(model, TrackerOptions(mode=mode))
        tracker = Tracker(model, TrackerOptions(mode=mode, fqns_to_skip=["t1"]))  # As the message says.
        train(model, t0=[2], t1=[3])
        tracker.step()
        assert ids_of(tracker.get_delta()) == {T0: [2]}
        tracker.close()
