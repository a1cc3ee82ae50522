"""KeyedJaggedTensors and TensorDicts on one module, in any order of first use; modules that refuse the latter."""

import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from tests.integration.trainer.pipelines.jagged import (
    Ids,
    Lookups,
    Trained,
    as_kjt,
    as_tensordict,
    by_lengths,
    check_trained,
    flat,
    ids,
    in_both_ways,
    lengths,
    train_same,
    trained_plainly,
)
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.scenarios.tensordicts import weighted_bags
from tests.integration.trainer.pipelines.training import BOTH_RANKS, Training, farthest
from tests.integration.trainer.torchrec_defects.models import ROWS, bag, bags, collided, sequence, sequences
from torch import nn
from torchrec.distributed.sharding_plan import column_wise, row_wise, table_wise
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.base.errors import InvalidInput
from deltasync.trainer.pipelines import accept_tensordicts

SHARDING = {
    "f": table_wise(rank=1, compute_kernel="fused"),
    "g": row_wise(compute_kernel="fused"),
    "h": column_wise(ranks=[0, 1], compute_kernel="fused"),
}
# "x" and "y" are keys that no module needs.
KEYS = ("fgh", "hgf", "xfgh", "ghfx", "hxyfg", "gyfhx")
KEYED: list[Callable[[Ids], Any]] = [lambda batch, keys=keys: as_kjt(batch, keys) for keys in KEYS]  # type: ignore[misc]
TENSORDICTS: list[Callable[[Ids], Any]] = [
    *(lambda batch, keys=keys: as_tensordict(batch, keys) for keys in KEYS),
    lambda batch: as_tensordict(batch, value=by_lengths),
]
FORMS = KEYED + TENSORDICTS


def _bags() -> nn.Module:
    return Lookups(bags=bags(bag("f"), bag("g", pooling=PoolingType.MEAN), bag("h", dim=8)))


def _sequences() -> nn.Module:
    return Lookups(sequences=sequences(sequence("f"), sequence("g"), sequence("h")))


def _shared() -> nn.Module:
    return Lookups(one=bags(bag("f", "f", "h"), bag("g", "h", "g")), two=sequences("h", "f"))


@cache
def _plain(make: Callable[[], nn.Module], count: int) -> Trained:
    """The result of training on this number of batches, the same for each form of features."""
    return trained_plainly(make, SHARDING, (as_kjt(batch, "fgh") for batch in ids(count, *"fghxy")))


@SCENARIOS.scenario("mixed features", ranks=2)
def long_random_mixes() -> None:
    """Bags and sequences by themselves are tried in other orders below."""
    forms = random.Random(7).choices(FORMS, k=15)
    given = [form(batch) for form, batch in zip(forms, ids(15, *"fghxy"), strict=True)]
    check_trained(_shared, SHARDING, _plain(_shared, 15), given)


@SCENARIOS.scenario("mixed features", ranks=2)
def a_keyed_jagged_tensor_without_a_key_is_refused_by_its_name() -> None:
    for forms in (KEYED[:1], KEYED[1:2], TENSORDICTS[:1], []):
        training = Training(_bags(), SHARDING)
        accept_tensordicts(training.model)
        batches = list(ids(len(forms) + 2, *"fghxy"))
        training.plainly(form(batch) for form, batch in zip(forms, batches, strict=False))
        with pytest.raises(InvalidInput, match="'g'"):
            training.plainly([as_kjt(batches[-2], "fhx")])
        training.plainly([as_kjt(batches[-1], "hgf")])


# Models that have had KeyedJaggedTensors before TensorDicts are accepted.


def _accepted_after(
    make: Callable[[], nn.Module], before: Callable[[Ids], Any], then: Iterable[Callable[[Ids], Any]]
) -> None:
    forms = [before, before, *then]
    batches = list(ids(len(forms), *"fghxy"))
    expected, training = _plain(make, len(forms)), Training(make(), SHARDING)
    outputs = training.plainly(map(before, batches[:2]))
    accept_tensordicts(training.model)
    outputs += training.plainly(form(batch) for form, batch in zip(forms[2:], batches[2:], strict=True))
    assert all(torch.equal(*two) for two in zip(outputs, expected.outputs, strict=True))
    assert farthest(training.held(), expected.held) == 0


@SCENARIOS.scenario("mixed features", ranks=2)
def accepted_after_batches_in_any_order_of_keys_and_others_at_the_end() -> None:
    for keys in ("fgh", "hgf", "ghf", "fghx"):
        for make in (_bags, _sequences, _shared):
            _accepted_after(make, lambda batch, keys=keys: as_kjt(batch, keys), TENSORDICTS + FORMS)  # type: ignore[misc]


# Modules that do more with their features than looking them up, and features of variable batch size.


def _collided(kind: Any) -> Training:
    return Training(Lookups(collided=collided(kind("f"), kind("g"), every=1000)), _sharded(BY_ROWS))


def _processed() -> Training:
    """Bags whose ids are weighted by their positions."""
    processors = {name: PositionWeightedModule(max_feature_length=8) for name in ("f", "g")}
    module = FeatureProcessedEmbeddingBagCollection(weighted_bags("f", "g"), processors)
    return Training(Lookups(processed=module), _sharded(table_wise(rank=1)))


def _sharded(sharding: Any) -> dict[str, Any]:
    return dict.fromkeys(("f", "g"), sharding)


BY_ROWS = row_wise(compute_kernel="fused")
KINDS: dict[str, Callable[[], Training]] = {
    "ShardedManagedCollisionEmbeddingBagCollection": lambda: _collided(bag),
    "ShardedManagedCollisionEmbeddingCollection": lambda: _collided(sequence),
    "ShardedFeatureProcessedEmbeddingBagCollection": _processed,
}


@SCENARIOS.scenario("modules that take no tensordicts", ranks=2)
def tensordicts_are_refused_eagerly_and_pipelined() -> None:
    for kind, training in KINDS.items():
        for train in in_both_ways(training):
            with pytest.raises(InvalidInput) as refusal:
                train([as_tensordict(next(ids(1)))])
            assert kind in str(refusal.value)
            assert "to_kjt" in str(refusal.value)


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


def _two_bags() -> nn.Module:
    return Lookups(bags=bags("f", "g"))


@SCENARIOS.scenario("variable batch size", ranks=2)
def keyed_jagged_tensors_in_the_same_order_of_keys() -> None:
    for keys in ("fg", "gf"):
        batches = [_of_variable_batch_size(keys, shift) for shift in range(4)]
        train_same(_two_bags, BOTH_RANKS, batches, batches)


@SCENARIOS.scenario("variable batch size", ranks=2)
def keyed_jagged_tensors_in_another_order_are_refused() -> None:
    for first, then in (("fg", "gf"), ("gf", "fg")):
        for train in in_both_ways(lambda: Training(_two_bags(), BOTH_RANKS)):
            with pytest.raises(InvalidInput, match="variable batch size"):
                train([_of_variable_batch_size(first), _of_variable_batch_size(then)])
