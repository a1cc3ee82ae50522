"""KeyedJaggedTensors and TensorDicts on one module, in every order of first use."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
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
    ids,
    trained_plainly,
)
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.training import Training, farthest
from tests.integration.trainer.torchrec_defects.models import bag, bags, sequence, sequences
from torch import nn
from torchrec.distributed.sharding_plan import column_wise, row_wise, table_wise
from torchrec.modules.embedding_configs import PoolingType

from deltasync.core.errors import InvalidInput
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
    """What training on so many batches gives: the same, however they are given."""
    return trained_plainly(make, SHARDING, (as_kjt(batch, "fgh") for batch in ids(count, *"fghxy")))


def _train_same_in(forms: Sequence[Callable[[Ids], Any]], make: Callable[[], nn.Module]) -> None:
    given = [form(batch) for form, batch in zip(forms, ids(len(forms), *"fghxy"), strict=True)]
    check_trained(make, SHARDING, _plain(make, len(forms)), given)


def _rotations() -> Iterator[list[Callable[[Ids], Any]]]:
    for first in range(len(FORMS)):
        yield FORMS[first:] + FORMS[:first]


@SCENARIOS.scenario("mixed features", ranks=2)
def bags_begin_with_any() -> None:
    for forms in _rotations():
        _train_same_in(forms, _bags)


@SCENARIOS.scenario("mixed features", ranks=2)
def sequences_and_tables_that_share_features_begin_with_any() -> None:
    for make in (_sequences, _shared):
        for forms in _rotations():
            _train_same_in(forms, make)


@SCENARIOS.scenario("mixed features", ranks=2)
def long_random_mixes() -> None:
    choice = random.Random(7)
    for make in (_bags, _sequences, _shared):
        _train_same_in(choice.choices(FORMS, k=15), make)


@SCENARIOS.scenario("mixed features", ranks=2)
def ranks_are_given_them_in_different_forms() -> None:
    rank = torch.distributed.get_rank()
    forms = [FORMS[(number * (rank + 1) + rank) % len(FORMS)] for number in range(8)]
    for make in (_bags, _sequences):
        _train_same_in(forms, make)


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


@SCENARIOS.scenario("mixed features", ranks=2)
def accepted_after_batches_with_other_keys_between() -> None:
    """Either right or refused, whatever comes then."""
    before = KEYED[4]
    for make in (_bags, _sequences):
        for form in FORMS:
            with suppress(InvalidInput):
                _accepted_after(make, before, [form])
    _accepted_after(_bags, before, [before] * 3)


@SCENARIOS.scenario("mixed features", ranks=2)
def accepted_twice_is_accepted_once() -> None:
    training = Training(_bags(), SHARDING)
    named = list(training.model.state_dict())
    accept_tensordicts(training.model)
    placed = [vars(module).get("input_dist") for module in training.model.modules()]
    accept_tensordicts(training.model)
    assert [vars(module).get("input_dist") for module in training.model.modules()] == placed
    assert any(placed)
    assert list(training.model.state_dict()) == named


@SCENARIOS.scenario("mixed features", ranks=2)
def accepted_before_sharding_and_again_after() -> None:
    def make() -> nn.Module:
        module = _bags()
        accept_tensordicts(module)
        return module

    _train_same_in(FORMS, make)
