"""Rows 17 to 20: what a mode gives beside ids, and which tables it is refused for."""

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.torchrec_defects.copies import Copy, ids_of, weights
from tests.integration.trainer.torchrec_defects.models import (
    BAGS,
    SEQUENCES,
    bag,
    bags,
    sequences,
    sharded,
    train,
)
from tests.integration.trainer.torchrec_defects.registry import scenario
from torchrec.distributed.sharding_plan import row_wise

from deltasync.core.errors import InvalidInput
from deltasync.trainer.tracking.delta import Delta
from deltasync.trainer.tracking.modes import TrackingMode
from deltasync.trainer.tracking.options import TrackerOptions
from deltasync.trainer.tracking.tracker import Tracker

T0, T1, S = f"{BAGS}.t0", f"{BAGS}.t1", f"{SEQUENCES}.s"
FIRST = TrackerOptions(mode=TrackingMode.EMBEDDING)


@scenario(row=17)
def pooled_tables_have_first_and_current_rows_too() -> None:
    model = sharded({"bags": bags(bag("t0", "f0", "f1"), bag("t1", "f1"))})
    tracker = Tracker(model, FIRST)
    before = weights(model)
    train(model, f0=[1, 2, 2], f1=[2, 3])  # Pooled: a sum over ids, and over none of them alone.
    tracker.step()
    delta = tracker.get_delta()
    assert ids_of(delta) == {T0: [1, 2, 3], T1: [2, 3]}
    _check_rows(delta, before, weights(model))


def _check_rows(delta: Delta, first: Mapping[str, torch.Tensor], current: Mapping[str, torch.Tensor]) -> None:
    for fqn, rows in delta.rows.items():
        assert rows.values is not None
        assert rows.first is not None
        assert rows.states is rows.first
        assert torch.equal(rows.values, current[fqn][rows.ids])
        assert torch.equal(rows.first, first[fqn][rows.ids])
        assert not rows.values.requires_grad
        assert not rows.first.requires_grad
        assert torch.equal(rows.norms(), (rows.values - rows.first).norm(dim=1))


@scenario(row=18, ranks=2)
def a_rank_without_ids_is_no_matter() -> None:
    model = sharded({"bags": bags("t0"), "sequences": sequences("s")}, {"s": row_wise(compute_kernel="fused")})
    rank = dist.get_rank()
    tracker = Tracker(model, FIRST)
    copy = Copy(model, tracker)
    copy.update()
    # Rank 1 is asked for nothing; then rank 0 looks nothing up; then nobody does.
    looked_up: list[list[list[int]]] = [[[1, 2], [3]], [[], [4, 12]], [[], []]]
    reported: list[list[list[int]]] = [[[1, 2, 3], []], [[4], [12]], [[], []]]
    for ids, changes in zip(looked_up, reported, strict=True):
        train(model, t0=[], s=ids[rank])
        tracker.step()
        assert copy.update().get(S, []) == changes[rank]
    copy.check(model)


@scenario(row=19)
def first_and_current_rows_span_all_steps_since_the_position() -> None:
    model = sharded({"bags": bags("t0"), "sequences": sequences("s")})
    tracker = Tracker(model, FIRST)
    for _ in range(3):  # Read thrice, each time from the position of the last acknowledgement.
        first = weights(model)
        for ids in ([1, 2], [2, 3], [2]):
            train(model, t0=ids, s=ids)
            tracker.step()
        delta = tracker.get_delta()
        assert ids_of(delta) == {T0: [1, 2, 3], S: [1, 2, 3]}
        _check_rows(delta, first, weights(model))
        tracker.acknowledge(delta.token)


@scenario(row=19)
def first_rows_stay_while_reads_are_not_acknowledged() -> None:
    model = sharded({"sequences": sequences("s")})
    tracker = Tracker(model, FIRST)
    first = weights(model)
    for ids in ([1, 2], [2, 3]):
        train(model, s=ids)
        tracker.step()
        _check_rows(tracker.get_delta(), first, weights(model))


@scenario(row=19)
def top_k_ranks_by_how_much_rows_have_changed() -> None:
    model = sharded({"bags": bags("t0"), "sequences": sequences("s")})
    tracker = Tracker(model, FIRST)
    train(model, t0=[1, 1, 1, 2], s=[3, 3, 4])
    tracker.step()
    delta = tracker.top_k(k=2)
    assert ids_of(delta) == {T0: [1], S: [3]}
    tracker.acknowledge(delta.token)
    assert ids_of(tracker.get_delta()) == {T0: [2], S: [4]}  # The others stay due.


@scenario(row=20)
def modes_are_refused_at_once_where_the_optimizer_lacks_them() -> None:
    adagrad, sgd = EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_SGD
    for mode, optimizer, message in [
        (TrackingMode.ROWWISE_ADAGRAD, adagrad, "the fused optimizer of table .* is another one"),
        (TrackingMode.ROWWISE_ADAGRAD, sgd, "has no momentum"),
        (TrackingMode.MOMENTUM_LAST, sgd, "has no momentum"),
        (TrackingMode.MOMENTUM_DIFF, sgd, "has no momentum"),
    ]:
        model = sharded({"bags": bags("t0")}, optimizer=optimizer)
        message = f"mode '{mode.value}': .*{message}"
        with pytest.raises(InvalidInput, match=message) as refused:
            Tracker(model, TrackerOptions(mode=mode))
        assert T0 in str(refused.value)
        tracker = Tracker(model)  # The refused one has left nothing behind.
        with pytest.raises(InvalidInput, match=message):
            tracker.add_consumer("another", mode)
        assert tracker.consumers == ["default"]
        train(model, t0=[1])
        tracker.step()
        assert ids_of(tracker.get_delta()) == {T0: [1]}
