"""Evictions of managed collision on a CPU: rows and momentum of slots that change hands are new."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.deletes.registry import SCENARIOS
from tests.integration.trainer.torchrec_defects.copies import Copy
from tests.integration.trainer.torchrec_defects.models import (
    ROWS,
    bag,
    bags,
    kernels_of,
    lookups,
    sequences,
    sharded,
    train,
)
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode
from deltasync.trainer.tracking.row_reset import evict_on_cpu

POLICIES: list[Callable[[], Any]] = [LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy]
# With two ranks, ids from here on have their rows on the second one.
OTHERS_FROM = 2**62
BAGS, SEQUENCES = "collided._embedding_module.embedding_bags.t", "collided._embedding_module.embeddings.t"
FIRST_VALUE = 7.0


def _first_values(rows: torch.Tensor) -> torch.Tensor:
    return nn.init.constant_(rows, FIRST_VALUE)


def _model(policy: Callable[[], Any], optimizer: EmbOptimType, *, pooled: bool) -> DistributedModelParallel:
    remapping = MCHManagedCollisionModule(
        zch_size=ROWS, device=torch.device("cpu"), eviction_policy=policy(), eviction_interval=1
    )
    module: nn.Module
    if pooled:
        bagged = bag("t", init_fn=_first_values)
        collisions = ManagedCollisionCollection({"t": remapping}, [bagged])
        module = ManagedCollisionEmbeddingBagCollection(bags(bagged), collisions)
    else:
        config = EmbeddingConfig(
            name="t", num_embeddings=ROWS, embedding_dim=4, feature_names=["t"], init_fn=_first_values
        )
        collisions = ManagedCollisionCollection({"t": remapping}, [config])
        module = ManagedCollisionEmbeddingCollection(sequences(config), collisions)
    return sharded({"collided": module}, {"t": row_wise(compute_kernel="fused")}, optimizer=optimizer)


def _models(optimizer: EmbOptimType) -> Iterator[tuple[str, DistributedModelParallel]]:
    for policy in POLICIES:
        yield BAGS, _model(policy, optimizer, pooled=True)
        yield SEQUENCES, _model(policy, optimizer, pooled=False)


def _ids(first: int, *, times: int = 2) -> list[int]:
    """Six for each rank. A policy that counts gives those that come more often the rows of others."""
    return [half + first + one for one in range(6) for half in (0, OTHERS_FROM)] * times


@SCENARIOS.scenario("evictions", ranks=2)
def rows_and_momentum_of_evicted_slots_are_reset() -> None:
    for fqn, model in _models(EmbOptimType.EXACT_ROWWISE_ADAGRAD):
        evict_on_cpu(model)
        tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST))
        for number in range(3):  # Fills the slots with trained rows.
            train(model, t=_ids(100 * number, times=number + 1))
            tracker.step()
        tracker.clear()
        (kernel,) = kernels_of(model)
        weights, momentum = kernel.split_embedding_weights()[0], kernel.split_optimizer_states()[0][0]
        assert momentum.count_nonzero() >= ROWS // 2 - 1
        before = weights.clone()
        for number in range(3, 9):
            model(
                lookups(t=_ids(1000 * number, times=9))
            )  # Without a backward: what is evicted stays as it is reset.
        tracker.step()
        evicted = tracker.get_delta().ids[fqn] - tracker.shards[0].shard.row_offset
        assert len(evicted)
        assert torch.equal(weights[evicted], torch.full_like(weights[evicted], FIRST_VALUE))
        assert not momentum[evicted].any()
        kept = torch.ones(len(weights), dtype=torch.bool).index_fill_(0, evicted, False)
        assert torch.equal(weights[kept], before[kept])


@SCENARIOS.scenario("evictions", ranks=2)
def a_copy_follows_evictions() -> None:
    for optimizer in (EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_SGD):
        for _, model in _models(optimizer):
            evict_on_cpu(model)
            tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST))
            copy = Copy(model, tracker)
            for number in range(6):
                train(model, t=_ids(100 * number, times=number + 1))
                tracker.step()
                copy.update()
                copy.check(model)


@SCENARIOS.scenario("evictions", ranks=2)
def other_optimizers_keep_their_state_as_on_a_gpu() -> None:
    for _, model in _models(EmbOptimType.EXACT_ADAGRAD):
        evict_on_cpu(model)
        for number in range(3):
            train(model, t=_ids(100 * number, times=number + 1))
        (kernel,) = kernels_of(model)
        before = [state.clone() for state in kernel.split_optimizer_states()[0]]
        for number in range(3, 9):
            model(lookups(t=_ids(1000 * number, times=9)))
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
