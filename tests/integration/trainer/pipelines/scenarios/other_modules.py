"""Modules that do more with their features than looking them up, and features of variable batch size."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
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
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.scenarios.tensordicts import weighted_bags
from tests.integration.trainer.pipelines.training import Training, farthest
from tests.integration.trainer.torchrec_defects.models import ROWS, bag, bags, collided, sequence
from torch import nn
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.core.errors import InvalidInput
from deltasync.trainer.pipelines import accept_tensordicts


def _collided(kind: Any) -> Training:
    return Training(Lookups(collided=collided(kind("f"), kind("g"), every=1000)), _sharded(BY_ROWS))


def _processed(sharding: Any) -> Training:
    """Bags whose ids are weighted by their positions."""
    processors = {name: PositionWeightedModule(max_feature_length=8) for name in ("f", "g")}
    module = FeatureProcessedEmbeddingBagCollection(weighted_bags("f", "g"), processors)
    return Training(Lookups(processed=module), _sharded(sharding))


def _sharded(sharding: Any) -> dict[str, Any]:
    return dict.fromkeys(("f", "g"), sharding)


BY_ROWS = row_wise(compute_kernel="fused")
KINDS: dict[str, Callable[[], Training]] = {
    "ShardedManagedCollisionEmbeddingBagCollection": lambda: _collided(bag),
    "ShardedManagedCollisionEmbeddingCollection": lambda: _collided(sequence),
    "ShardedFeatureProcessedEmbeddingBagCollection": lambda: _processed(table_wise(rank=1)),
}


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
    for training in (*KINDS.values(), lambda: _processed(BY_ROWS)):
        plain, eager, pipelined = training(), training(), training()
        expected = plain.plainly(map(as_kjt, ids(4)))
        accept_tensordicts(eager.model)
        for one, train in ((eager, eager.plainly), (pipelined, pipelined.pipelined)):
            outputs = train(map(as_kjt, ids(4)))
            assert all(torch.equal(*two) for two in zip(outputs, expected, strict=True))
            assert farthest(one.held(), plain.held()) == 0


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
