"""T2: tables that move to other ranks, to lookups that did not exist when the tracker attached."""

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.rewrites.replica import NAME, Replica
from tests.integration.trainer.rewrites.resharded import by_columns, on_rank, reshard
from tests.integration.trainer.rewrites.scenarios import SCENARIOS
from tests.integration.trainer.torchrec_defects.models import ROWS, bag, bags, sharded, train
from tests.support.deltas import first_of
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise

from deltasync.trainer.tracking import TrackingMode

EVERY_ROW = set(range(ROWS))
MOVED, OTHERS = "bags.embedding_bags", "more.embedding_bags"


def model_of_two_collections() -> DistributedModelParallel:
    tables = {
        "whole": on_rank(0),
        "columns": by_columns(0, 1),
        "stays": on_rank(1),
        "rows": row_wise(compute_kernel="fused"),
        "other": on_rank(1),
    }
    first = bags(*(bag(name, "f", dim=8) for name in tables if name != "other"))
    collections = {"bags": first, "more": bags(bag("other", "g"))}
    return sharded(collections, tables, dense=True, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD)


def move(model: DistributedModelParallel) -> None:
    reshard(model, "bags", whole=on_rank(1), columns=by_columns(1, 0))


@SCENARIOS.scenario("resharding", ranks=2)
def tables_that_have_moved_are_followed_where_they_are_now() -> None:
    model = model_of_two_collections()
    replica = Replica(model)
    train(model, f=[1], g=[2])
    replica.tracker.step()
    replica.catch_up()
    move(model)
    train(model, f=[3], g=[4])
    replica.tracker.step()
    taken = replica.catch_up()
    assert taken.pop(f"{OTHERS}.other") == {4}, "its collection has stayed as it was"
    assert taken == dict.fromkeys([f"{MOVED}.{name}" for name in ("whole", "columns", "stays", "rows")], EVERY_ROW)
    assert not replica.stale
    for step in range(3):
        train(model, f=[step], g=[5])
        replica.tracker.step()
        assert set(map(frozenset, replica.catch_up().values())) == {frozenset([step]), frozenset([5])}
        assert not replica.stale


@SCENARIOS.scenario("resharding", ranks=2)
def what_was_due_before_is_due_afterwards() -> None:
    """Also of a table that is not resharded, and where what was read before is acknowledged only now."""
    model = model_of_two_collections()
    replica = Replica(model)
    train(model, f=[1], g=[2])
    replica.tracker.step()
    delta = replica.tracker.get_delta(NAME)
    train(model, f=[1], g=[3])
    replica.tracker.step()
    move(model)
    replica.tracker.step()
    assert not replica.tracker.acknowledge(delta)
    assert replica.catch_up()[f"{OTHERS}.other"] == {2, 3}
    assert not replica.stale


@SCENARIOS.scenario("resharding", ranks=2)
def first_values_of_rows_that_stay_are_kept() -> None:
    model = model_of_two_collections()
    replica = Replica(model)
    replica.tracker.add_consumer("firsts", TrackingMode.EMBEDDING)
    before = {table.name: table.shards[0].weight.clone() for table in replica.tracker.tables}
    train(model, f=[1], g=[2])
    move(model)
    train(model, f=[3], g=[4])
    replica.tracker.step()
    delta = replica.tracker.get_delta("firsts")
    for name in f"{MOVED}.rows", f"{MOVED}.stays":
        if name in before:
            assert torch.equal(first_of(delta, name), before[name])
    whole = f"{MOVED}.whole"
    assert (whole in delta.ids) == (dist.get_rank() == 1)
    if whole in delta.ids:
        assert first_of(delta, whole).isnan().all(), "this rank has not had them"


@SCENARIOS.scenario("resharding", ranks=2)
def a_table_that_moves_where_it_cannot_be_tracked_is_an_error_at_each_step() -> None:
    model = model_of_two_collections()
    replica = Replica(model)
    move(model)
    for lookup in model.module.bags._lookups:
        for kernel in lookup._emb_modules:
            kernel.emb_module.weight_decay_mode = 77
    for _ in range(2):
        with pytest.raises(Exception, match=r"module 'bags', tables .*: this weight decay is unknown"):
            replica.tracker.step()
