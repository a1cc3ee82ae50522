"""Modules that do more with their features than looking them up, and features of variable batch size."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.integration.trainer.pipelines.jagged import (
    Lookups,
    as_kjt,
    as_tensordict,
    flat,
    ids,
    in_both_ways,
    lengths,
    train_same,
)
from tests.integration.trainer.pipelines.models import BOTH_RANKS
from tests.integration.trainer.pipelines.registry import SCENARIOS
from tests.integration.trainer.pipelines.scenarios.weighted_tensordicts import weighted_bags
from tests.integration.trainer.pipelines.training import Training, farthest, fill, sgd
from tests.integration.trainer.torchrec_defects.models import CPU, ROWS, bag, bags, sequence, sequences
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.core.errors import InvalidInput
from deltasync.trainer.pipelines import accept_tensordicts


def _collided(kind: str) -> nn.Module:
    configs: list[Any] = [bag(name) if kind == "bags" else sequence(name) for name in ("f", "g")]
    remappings = {config.name: _remapping() for config in configs}
    collisions = ManagedCollisionCollection(remappings, configs)
    if kind == "bags":
        return Lookups(collided=ManagedCollisionEmbeddingBagCollection(bags(*configs), collisions))
    return Lookups(collided=ManagedCollisionEmbeddingCollection(sequences(*configs), collisions))


def _remapping() -> MCHManagedCollisionModule:
    return MCHManagedCollisionModule(
        zch_size=ROWS, device=CPU, eviction_policy=DistanceLFU_EvictionPolicy(), eviction_interval=1000
    )


class FeatureProcessed(Training):
    """In training: bags whose ids are weighted by their positions."""

    def __init__(self, sharding: Any) -> None:
        processors = {name: PositionWeightedModule(max_feature_length=8) for name in ("f", "g")}
        module = FeatureProcessedEmbeddingBagCollection(weighted_bags("f", "g"), processors)
        fused = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.5})
        sharder = FeatureProcessedEmbeddingBagCollectionSharder(fused)
        plan = construct_module_sharding_plan(
            module, {"f": sharding, "g": sharding}, sharder, local_size=2, world_size=2, device_type="cpu"
        )
        self.model = DistributedModelParallel(
            Lookups(processed=module),
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=CPU,
            plan=ShardingPlan(plan={"processed": plan}),
            sharders=[sharder],
        )
        fill(self.model)
        rest = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, KeyedOptimizerWrapper(rest, sgd)])


KINDS: dict[str, Callable[[], Training]] = {
    "ShardedManagedCollisionEmbeddingBagCollection": lambda: Training(_collided("bags"), _row_wise()),
    "ShardedManagedCollisionEmbeddingCollection": lambda: Training(_collided("sequences"), _row_wise()),
    "ShardedFeatureProcessedEmbeddingBagCollection": lambda: FeatureProcessed(table_wise(rank=1)),
}


def _row_wise() -> dict[str, Any]:
    return {name: row_wise(compute_kernel="fused") for name in ("f", "g")}


@SCENARIOS.scenario("modules that take no tensordicts", ranks=2)
def tensordicts_are_refused_eagerly_and_pipelined() -> None:
    for kind, training in KINDS.items():
        for train in in_both_ways(training):
            with pytest.raises(InvalidInput) as refusal:
                train([as_tensordict(next(ids(1)))])
            assert kind in str(refusal.value)
            assert "to_kjt" in str(refusal.value)


@SCENARIOS.scenario("modules that take no tensordicts", ranks=2)
def keyed_jagged_tensors_are_trained_on_as_before() -> None:
    trainings: list[Callable[[], Training]] = [
        *KINDS.values(),
        lambda: FeatureProcessed(row_wise(compute_kernel="fused")),
    ]
    for training in trainings:
        plain = training()
        expected = plain.plainly(map(as_kjt, ids(4)))
        for train, held in _accepting(training):
            outputs = train(map(as_kjt, ids(4)))
            assert all(torch.equal(*two) for two in zip(outputs, expected, strict=True))
            assert farthest(held(), plain.held()) == 0


def _accepting(training: Callable[[], Training]) -> list[tuple[Callable[..., list[Any]], Callable[[], Any]]]:
    eager, pipelined = training(), training()
    accept_tensordicts(eager.model)
    return [(eager.plainly, eager.held), (pipelined.pipelined, pipelined.held)]


# Two of "f" and three of "g", whose four examples share them.
DIFFERENT = {"f": [[1, 2], [3]], "g": [[4], [5, 6], [7]]}
INVERSE = {"f": [0, 1, 0, 1], "g": [2, 1, 0, 0]}


def _of_variable_batch_size(keys: Sequence[str], shift: int = 0) -> KeyedJaggedTensor:
    values = torch.cat([flat(DIFFERENT[key]) for key in keys])
    return KeyedJaggedTensor(
        keys=list(keys),
        values=(values + shift) % ROWS,
        lengths=torch.cat([lengths(DIFFERENT[key]) for key in keys]),
        stride_per_key_per_rank=[[len(DIFFERENT[key])] for key in keys],
        inverse_indices=(list(keys), torch.tensor([INVERSE[key] for key in keys])),
    )


def _bags() -> nn.Module:
    return Lookups(bags=bags("f", "g"))


@SCENARIOS.scenario("variable batch size", ranks=2)
def keyed_jagged_tensors_in_the_same_order_of_keys() -> None:
    for keys in ("fg", "gf"):
        batches = [_of_variable_batch_size(keys, shift) for shift in range(4)]
        train_same(_bags, BOTH_RANKS, batches, batches)


@SCENARIOS.scenario("variable batch size", ranks=2)
def keyed_jagged_tensors_in_another_order_are_refused() -> None:
    for first, then in (("fg", "gf"), ("gf", "fg")):
        for train in in_both_ways(lambda: Training(_bags(), BOTH_RANKS)):
            with pytest.raises(InvalidInput, match="variable batch size"):
                train([_of_variable_batch_size(first), _of_variable_batch_size(then)])


@SCENARIOS.scenario("variable batch size", ranks=2)
def accepted_after_keyed_jagged_tensors() -> None:
    for keys in ("fg", "gf"):
        plain, training = Training(_bags(), BOTH_RANKS), Training(_bags(), BOTH_RANKS)
        batches = [_of_variable_batch_size(keys, shift) for shift in range(4)]
        expected = plain.plainly(batches)
        outputs = training.plainly(batches[:2])
        accept_tensordicts(training.model)
        outputs += training.plainly(batches[2:])
        assert all(torch.equal(*two) for two in zip(outputs, expected, strict=True))
        assert farthest(training.held(), plain.held()) == 0
