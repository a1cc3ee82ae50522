"""Weights of ids in TensorDicts."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.integration.trainer.pipelines.jagged import (
    EVERY_SHARDING,
    Lookups,
    as_kjt,
    as_tensordict,
    by_lengths,
    ids,
    in_both_ways,
    nested,
    train_same,
    weighted,
)
from tests.integration.trainer.pipelines.models import BOTH_RANKS
from tests.integration.trainer.pipelines.registry import SCENARIOS
from tests.integration.trainer.pipelines.scenarios.tensordicts import UnshardedBags
from tests.integration.trainer.pipelines.training import Training
from tests.integration.trainer.torchrec_defects.models import META, bag, bags, sequences
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from deltasync.core.errors import InvalidInput


def weighted_bags(*names: str) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=[bag(name, dim=8) for name in names], is_weighted=True, device=META)


def _weighted() -> nn.Module:
    return Lookups(bags=weighted_bags("f", "g"))


def _unsharded() -> nn.Module:
    return Lookups(bags=UnshardedBags(tables=[bag("f"), bag("g")], is_weighted=True, device=META))


def _refused(make: Any, batch: Any, *told: str) -> None:
    for train in in_both_ways(lambda: Training(make(), BOTH_RANKS)):
        with pytest.raises(InvalidInput) as refusal:
            train([batch])
        assert all(part in str(refusal.value) for part in told), refusal.value


@SCENARIOS.scenario("tensordicts with weights", ranks=2)
def bags_of_every_sharding_type() -> None:
    batches = list(ids(5, *EVERY_SHARDING))
    expected = [as_kjt(batch, weights=True) for batch in batches]
    orders = ("trcd", "dcrt", "rtdc", "trcd", "ctdr")
    given = [as_tensordict(batch, keys, weighted) for batch, keys in zip(batches, orders, strict=True)]
    train_same(lambda: Lookups(bags=weighted_bags(*EVERY_SHARDING)), EVERY_SHARDING, expected, given)


@SCENARIOS.scenario("tensordicts with weights", ranks=2)
def unsharded_bags() -> None:
    batches = list(ids(5))
    expected = [as_kjt(batch, weights=True) for batch in batches]
    train_same(_unsharded, {}, expected, [as_tensordict(batch, "gf", weighted) for batch in batches])


@SCENARIOS.scenario("tensordicts with weights", ranks=2)
def mixed_with_keyed_jagged_tensors() -> None:
    batches = list(ids(6, "f", "g", "x"))
    forms = [
        lambda batch: as_tensordict(batch, "gf", weighted),
        lambda batch: as_kjt(batch, "xgf", weights=True),
        lambda batch: as_tensordict(batch, "fxg", weighted),
    ]
    for make in (_weighted, _unsharded):
        for first in range(len(forms)):
            given = [forms[(first + number) % len(forms)](batch) for number, batch in enumerate(batches)]
            train_same(make, BOTH_RANKS, [as_kjt(batch, "fg", weights=True) for batch in batches], given)


@SCENARIOS.scenario("tensordicts with weights", ranks=2)
def sequences_have_no_use_for_weights() -> None:
    batches = list(ids(4))
    given = [as_tensordict(batch, value=weighted) for batch in batches]
    expected = [as_kjt(batch, weights=True) for batch in batches]
    train_same(lambda: Lookups(sequences=sequences("f", "g")), BOTH_RANKS, expected, given)


@SCENARIOS.scenario("tensordicts with weights", ranks=2)
def a_key_that_lacks_them_is_refused() -> None:
    batch = next(ids(1))
    for make in (_weighted, _unsharded):
        for without in (by_lengths, nested):
            mixed = TensorDict({"f": weighted(batch["f"]), "g": without(batch["g"])})
            _refused(make, mixed, "'g'", "weights")


@SCENARIOS.scenario("tensordicts with weights", ranks=2)
def a_key_that_has_more_or_fewer_than_ids_is_refused() -> None:
    """Two that are wrong in opposite ways would have weights of the one taken for the other's."""

    def of(ids: list[int], weights: int) -> JaggedTensor:
        return JaggedTensor(torch.tensor(ids), weights=torch.ones(weights), lengths=torch.tensor([len(ids)]))

    for make in (_weighted, _unsharded):
        _refused(make, TensorDict({"f": of([1, 2], 3), "g": of([3, 4], 1)}), "'f'", "weights")
        _refused(make, TensorDict({"f": of([1, 2], 2), "g": of([3, 4], 1)}), "'g'", "weights")


@SCENARIOS.scenario("tensordicts with weights", ranks=2)
def bags_that_do_not_weight_refuse_them() -> None:
    """With a KeyedJaggedTensor, TorchRec's sharded ones weight nevertheless, and its unsharded ones do not."""
    batch = next(ids(1))
    mixed = TensorDict({"f": nested(batch["f"]), "g": weighted(batch["g"])})
    _refused(lambda: Lookups(bags=bags("f", "g")), mixed, "'g'", "weights")
    unsharded = [bag("f"), bag("g")]
    _refused(lambda: Lookups(bags=UnshardedBags(tables=unsharded, device=META)), mixed, "'g'", "weights")


@SCENARIOS.scenario("tensordicts with weights", ranks=2)
def weights_of_other_keys_are_left_alone() -> None:
    batches = list(ids(4, "f", "g", "x"))
    given = [as_tensordict(batch, "fg", nested, x=weighted(batch["x"])) for batch in batches]
    train_same(lambda: Lookups(bags=bags("f", "g")), BOTH_RANKS, [as_kjt(one, "fg") for one in batches], given)
