"""What kernels hold of rows that are reset: by evictions of managed collision on a CPU, or by deletes."""

from collections.abc import Iterator
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.rewrites.scenarios import SCENARIOS
from tests.integration.trainer.torchrec_defects.copies import followed
from tests.integration.trainer.torchrec_defects.models import (
    ROWS,
    bag,
    bags,
    collided,
    kernels_of,
    lookups,
    sequence,
    sharded,
    train,
)
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, row_wise, table_wise
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, LFU_EvictionPolicy, LRU_EvictionPolicy

from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode
from deltasync.trainer.tracking.shards import evict_on_cpu

# With two ranks, ids from here on have their rows on the second one.
OTHERS_FROM = 2**62
BAGS, SEQUENCES = "collided._embedding_module.embedding_bags.t", "collided._embedding_module.embeddings.t"
FIRST_VALUE = 7.0


def _first_values(rows: torch.Tensor) -> torch.Tensor:
    return nn.init.constant_(rows, FIRST_VALUE)


POLICIES = (LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy)


def _models(optimizer: EmbOptimType, policies: Any = POLICIES) -> Iterator[tuple[str, DistributedModelParallel]]:
    for policy in policies:
        for fqn, table in (BAGS, bag), (SEQUENCES, sequence):
            module = collided(table("t", init_fn=_first_values), policy=policy)
            model = sharded({"collided": module}, {"t": row_wise(compute_kernel="fused")}, optimizer=optimizer)
            evict_on_cpu(model)
            yield fqn, model


def _fill(model: DistributedModelParallel) -> None:
    """Fill the slots with trained rows."""
    for number in range(3):
        train(model, t=_ids(100 * number, times=number + 1))


def _evict(model: DistributedModelParallel) -> None:
    """Without a backward: what is evicted stays as it is reset."""
    for number in range(3, 9):
        model(lookups(t=_ids(1000 * number, times=9)))


def _ids(first: int, *, times: int = 2) -> list[int]:
    """Six for each rank. A policy that counts gives those that come more often the rows of others."""
    return [half + first + one for one in range(6) for half in (0, OTHERS_FROM)] * times


@SCENARIOS.scenario("evictions", ranks=2)
def rows_and_momentum_of_evicted_slots_are_reset() -> None:
    for fqn, model in _models(EmbOptimType.EXACT_ROWWISE_ADAGRAD, POLICIES[:1]):
        tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST))
        _fill(model)
        tracker.step()
        tracker.acknowledge(tracker.get_delta())
        (kernel,) = kernels_of(model)
        weights, momentum = kernel.split_embedding_weights()[0], kernel.split_optimizer_states()[0][0]
        assert momentum.count_nonzero() >= ROWS // 2 - 1
        before = weights.clone()
        _evict(model)
        tracker.step()
        evicted = torch.from_numpy(tracker.get_delta().ids[fqn]) - tracker.tables[0].row_offset
        assert len(evicted)
        assert torch.equal(weights[evicted], torch.full_like(weights[evicted], FIRST_VALUE))
        assert not momentum[evicted].any()
        kept = torch.ones(len(weights), dtype=torch.bool).index_fill_(0, evicted, False)
        assert torch.equal(weights[kept], before[kept])


@SCENARIOS.scenario("evictions", ranks=2)
def a_copy_follows_evictions() -> None:
    for optimizer in (EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_SGD):
        for _, model in _models(optimizer):
            tracker, copy = followed(model)
            for number in range(6):
                train(model, t=_ids(100 * number, times=number + 1))
                tracker.step()
                copy.update()
                copy.check(model)


@SCENARIOS.scenario("evictions", ranks=2)
def other_optimizers_keep_their_state_as_on_a_gpu() -> None:
    for _, model in _models(EmbOptimType.EXACT_ADAGRAD):
        _fill(model)
        (kernel,) = kernels_of(model)
        before = [state.clone() for state in kernel.split_optimizer_states()[0]]
        _evict(model)
        assert all(map(torch.equal, kernel.split_optimizer_states()[0], before))
        assert (kernel.split_embedding_weights()[0] == FIRST_VALUE).all(dim=1).any()


@SCENARIOS.scenario("evictions", ranks=2)
def a_table_is_told_from_others_of_its_kernel() -> None:
    model = sharded({"bags": bags("t0", "t1")}, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    evict_on_cpu(model)
    evict_on_cpu(model)
    train(model, t0=list(range(ROWS)), t1=list(range(ROWS)))
    for kernel in kernels_of(model):
        before = [weights.clone() for weights in kernel.split_embedding_weights()]
        kernel.reset_embedding_weight_momentum(
            pruned_indices=torch.tensor([9, 3, 5]),
            pruned_indices_offsets=torch.tensor([0, 1, 3]),
            logical_table_ids=torch.tensor([1, 0], dtype=torch.int32),
            buffer_ids=torch.tensor([0, 1], dtype=torch.int32),
        )
        for table, ids in enumerate([[3, 5], [9]]):
            weights, (momentum,) = kernel.split_embedding_weights()[table], kernel.split_optimizer_states()[table]
            assert weights.sum(dim=1).eq(0).nonzero().squeeze(1).tolist() == ids
            assert momentum.eq(0).nonzero().squeeze(1).tolist() == ids
            others = [row for row in range(ROWS) if row not in ids]
            assert torch.equal(weights[others], before[table][others])


# Deleted rows.

OPTIMIZERS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
SHARDING = {
    "rows": row_wise(compute_kernel="fused"),
    "columns": column_wise(ranks=[0, 1], compute_kernel="fused"),
    "pairs": column_wise(ranks=[1, 1], compute_kernel="fused"),
    "whole": table_wise(rank=0, compute_kernel="fused"),
    "dense": table_wise(rank=0, compute_kernel="dense"),
}


@SCENARIOS.scenario("resets", ranks=2)
def a_deleted_row_is_reset_and_no_other() -> None:
    everything, ids = list(range(ROWS)), torch.tensor([1, 9])
    for optimizer in OPTIMIZERS:
        model = sharded({"bags": bags(*(bag(name, dim=8) for name in SHARDING))}, SHARDING, optimizer=optimizer)
        tracker = Tracker(model, TrackerOptions(verify=True))
        train(model, **dict.fromkeys(SHARDING, everything))
        tracker.step()
        kernels = list(kernels_of(model))
        held = [weights for kernel in kernels for weights in kernel.split_embedding_weights()]
        states = [
            state
            for kernel in kernels
            if hasattr(kernel, "split_optimizer_states")
            for states_of_table in kernel.split_optimizer_states()
            for state in states_of_table
        ]
        assert optimizer is EmbOptimType.EXACT_SGD or states
        tensors = held + states
        before = [tensor.clone() for tensor in tensors]
        for table in tracker.tables:
            tracker.delete(table.name, ids)
        first = tracker.tables[0].row_offset
        for tensor, was in zip(tensors, before, strict=True):
            offset = first if len(tensor) < ROWS else 0
            local = [row - offset for row in ids.tolist() if 0 <= row - offset < len(tensor)]
            assert local
            assert not tensor[local].any()
            others = [row for row in range(len(tensor)) if row not in local]
            assert torch.equal(tensor[others], was[others])
        for _ in range(2):  # Which find no row that has changed unmarked.
            assert set(tracker.get_delta().deletes) == {table.name for table in tracker.tables}


@SCENARIOS.scenario("resets", ranks=2)
def a_lookup_whose_backward_is_still_to_come_brings_its_rows_back() -> None:
    """Pipelines look rows up ahead; autograd must not take the delete for a mistake."""
    for name, sharding in SHARDING.items():
        model = sharded({"bags": bags(bag("t", dim=8))}, {"t": sharding}, optimizer=EmbOptimType.EXACT_ADAGRAD)
        tracker = Tracker(model)
        _train_ahead(model, tracker)
        changed = set() if name == "dense" else {2}  # Its optimizer has not stepped.
        for table in tracker.tables:
            held, delta = set(range(table.row_offset, table.row_offset + table.rows)), tracker.get_delta()
            assert set(delta.ids.get(table.name, ())) == changed & held
            assert set(delta.deletes.get(table.name, ())) == ({1, 2, 9} - changed) & held


def _train_ahead(model: torch.nn.Module, tracker: Tracker) -> None:
    loss, _ = model(lookups(t=[2]))
    for table in tracker.tables:
        tracker.delete(table.name, torch.tensor([1, 2, 9]))
    loss.backward()
    tracker.step()
