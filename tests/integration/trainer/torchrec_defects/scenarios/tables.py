"""Rows 11 to 14, 16 and 23: which table, and which of its rows."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.torchrec_defects.copies import Copy, changed, ids_of, weights
from tests.integration.trainer.torchrec_defects.models import (
    BAGS,
    SEQUENCES,
    bag,
    bags,
    distributed,
    lookups,
    sequences,
    sharded,
    train,
)
from tests.integration.trainer.torchrec_defects.registry import scenario
from torchrec.distributed.sharding_plan import data_parallel, row_wise

from deltasync.core.errors import InvalidInput
from deltasync.trainer.tracking.modes import TrackingMode
from deltasync.trainer.tracking.options import TrackerOptions
from deltasync.trainer.tracking.tracker import Tracker

T0, T1, S = f"{BAGS}.t0", f"{BAGS}.t1", f"{SEQUENCES}.s"
LAST = TrackerOptions(mode=TrackingMode.EMBEDDING_LAST)


@scenario(row=11)
def a_shared_feature_counts_for_each_of_its_tables() -> None:
    model = sharded({"bags": bags(bag("t0", "f0"), bag("t1", "f0", "f1"), bag("t2", "f1"))})
    tracker = Tracker(model, LAST)
    copy = Copy(model, tracker)
    copy.update()
    before = weights(model)
    train(model, f0=[0, 1], f1=[2, 3])
    tracker.step()
    reported = copy.update()
    assert reported == {T0: [0, 1], T1: [0, 1, 2, 3], f"{BAGS}.t2": [2, 3]}
    assert reported == changed(model, before)
    copy.check(model)
    assert tracker.fqn_to_feature_names() == {T0: ["f0"], T1: ["f0", "f1"], f"{BAGS}.t2": ["f1"]}


@scenario(row=12)
def tables_of_one_name_in_two_modules_are_two() -> None:
    model = sharded({"left": bags(bag("t", "f0")), "right": bags(bag("t", "f1")), "both": sequences("t")})
    left, right, both = "left.embedding_bags.t", "right.embedding_bags.t", "both.embeddings.t"
    tracker = Tracker(model, LAST)
    copy = Copy(model, tracker)
    copy.update()
    train(model, f0=[0, 1], f1=[2], t=[3])
    tracker.step()
    assert copy.update() == {left: [0, 1], right: [2], both: [3]}
    copy.check(model)
    assert tracker.fqn_to_feature_names() == {left: ["f0"], right: ["f1"], both: ["t"]}
    assert set(tracker.get_tracked_modules()) == {"left", "right", "both"}


@scenario(row=13)
def skipped_tables_train_on_untracked() -> None:
    everything = {T0: [1], T1: [2], S: [3]}
    for skips, kept in [
        (["t1"], [T0, S]),  # a table's name
        ([T1], [T0, S]),  # its FQN
        (["embedding_bags"], [S]),  # a part of a path
        (["bags"], [S]),  # a parent
        (["bags.embedding_bags"], [S]),
        (["embedding_bags.t0", "sequences"], [T1]),
        (["bags", "sequences"], []),
    ]:
        assert _reported(skips) == {fqn: everything[fqn] for fqn in kept}


def _reported(skips: Sequence[str]) -> dict[str, list[int]]:
    model = sharded({"bags": bags("t0", "t1"), "sequences": sequences("s")})
    tracker = Tracker(model, TrackerOptions(fqns_to_skip=skips))
    before = weights(model)
    train(model, t0=[1], t1=[2], s=[3])
    tracker.step()
    assert changed(model, before) == {T0: [1], T1: [2], S: [3]}
    return ids_of(tracker.get_delta())


@scenario(row=13)
def a_skip_that_fits_nothing_is_refused() -> None:
    model = sharded({"bags": bags("t0", "t1")})
    for wrong in ("t2", "t", "bag", "bags.t0", ""):
        with pytest.raises(InvalidInput, match=rf"fqns_to_skip: '{wrong}' .*tables: {T0}, {T1}"):
            Tracker(model, TrackerOptions(fqns_to_skip=["t0", wrong]))


@scenario(row=13)
def a_parameter_outside_of_tables_can_be_skipped_too() -> None:
    model = sharded({"bags": bags("t0")}, dense=True)
    tracker = Tracker(model, TrackerOptions(dense=True, fqns_to_skip=["dense.bias"]))
    assert [table.name for table in tracker.tables] == [T0, "dense.weight"]


@scenario(row=14, ranks=2)
def ids_are_those_of_the_whole_table() -> None:
    by_rows = row_wise(compute_kernel="fused")
    model = sharded({"bags": bags("t0"), "sequences": sequences("s")}, {"t0": by_rows, "s": by_rows})
    tracker = Tracker(model, LAST)
    copy = Copy(model, tracker)
    copy.update()
    # Rows 0 to 7 are on rank 0, the others on rank 1, whoever looks them up.
    train(model, t0=[[1, 9], [2, 15]][dist.get_rank()], s=[[8], [0, 7]][dist.get_rank()])
    tracker.step()
    assert copy.update() == [{T0: [1, 2], S: [0, 7]}, {T0: [9, 15], S: [8]}][dist.get_rank()]
    copy.check(model)


@scenario(row=16, ranks=2)
def data_parallel_rows_changed_by_other_ranks_are_reported() -> None:
    model = sharded({"bags": bags("t0", "t1")}, {"t0": data_parallel()})
    replica = dict(model.named_parameters())[f"{T0}.weight"]
    tracker = Tracker(model, LAST)
    copy = Copy(model, tracker)
    copy.update()
    optimizer = torch.optim.SGD([replica], lr=0.5)
    before = weights(model)
    train(model, t0=[[0, 1], [8, 9]][dist.get_rank()], t1=[])
    optimizer.step()
    tracker.step()
    assert copy.update() == changed(model, before) == {T0: [0, 1, 8, 9]}
    copy.check(model)
    replicas = Tracker(model, TrackerOptions(replicas=False))
    assert T0 not in [table.name for table in replicas.tables]


@scenario(row=23)
def a_model_without_dense_parameters_is_tracked() -> None:
    model = sharded({"bags": bags("t0")})
    assert [name for name, _ in model.named_parameters()] == [f"{T0}.weight"]
    tracker = Tracker(model)
    train(model, t0=[5])
    tracker.step()
    assert ids_of(tracker.get_delta()) == {T0: [5]}


@scenario(row=23)
def a_model_that_is_one_collection_is_tracked() -> None:
    model = distributed(bags("t0"), {}, EmbOptimType.EXACT_SGD)
    tracker = Tracker(model)
    model(lookups(t0=[6])).values().sum().backward()
    tracker.step()
    assert ids_of(tracker.get_delta()) == {"embedding_bags.t0": [6]}
