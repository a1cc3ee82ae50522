"""TensorDicts: trained on as the same ids are in KeyedJaggedTensors, whatever holds them and however they lie."""

from collections.abc import Callable, Iterable
from operator import attrgetter, itemgetter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from tests.integration.trainer.pipelines import jagged
from tests.integration.trainer.pipelines.jagged import (
    EVERY_SHARDING,
    ROWS,
    Ids,
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
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.training import BOTH_RANKS, Batch, Training, farthest, through
from tests.integration.trainer.torchrec_defects.models import CPU, META, bag, bags, sequence, sequences
from torch import nn
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.base.errors import InvalidInput
from deltasync.trainer.pipelines import accept_tensordicts

# In which keys come, batch by batch.
ORDERS = ("fg", "gf", "gf", "fg", "gf")


def _bags(of: Callable[[Any], Any] = jagged.itself) -> nn.Module:
    return Lookups(of, bags=bags("f", "g"))


def _both() -> nn.Module:
    return Lookups(bags=bags("f", "g"), sequences=sequences("f", "g"))


@SCENARIOS.scenario("tensordicts", ranks=2)
def bags_of_every_sharding_type() -> None:
    batches = list(ids(5, *EVERY_SHARDING))
    for pooling in (PoolingType.SUM, PoolingType.MEAN):

        def make(pooling: PoolingType = pooling) -> nn.Module:
            return Lookups(bags=bags(*(bag(name, dim=8, pooling=pooling) for name in EVERY_SHARDING)))

        train_same(make, EVERY_SHARDING, map(as_kjt, batches), map(as_tensordict, batches))


@SCENARIOS.scenario("tensordicts", ranks=2)
def sequences_of_every_sharding_type() -> None:
    tables = {name: how for name, how in EVERY_SHARDING.items() if name != "d"}
    batches = list(ids(5, *tables))

    def make() -> nn.Module:
        return Lookups(sequences=sequences(*(sequence(name, dim=8) for name in tables)))

    train_same(make, tables, map(as_kjt, batches), map(as_tensordict, batches))


@SCENARIOS.scenario("tensordicts", ranks=2)
def batches_and_ranks_without_ids() -> None:
    nothing: Ids = {"f": [[], [], [], []], "g": [[], [], [], []]}
    rank = dist.get_rank()
    batches = [
        next(ids(1)),
        nothing,
        next(ids(1, seed=1)) if rank else nothing,
        nothing if rank else next(ids(1, seed=2)),
        nothing | {"f": [[], [1, 2], [], []]},
    ]
    for value in (nested, by_lengths, jagged.by_offsets):
        given = [as_tensordict(batch, value=value) for batch in batches]
        train_same(_both, BOTH_RANKS, map(as_kjt, batches), given)
    batches[1:] = [{"f": [], "g": []}, next(ids(1, seed=1))]  # Not even examples.
    given = [as_tensordict(batch, value=by_lengths) for batch in batches]
    train_same(_bags, BOTH_RANKS, map(as_kjt, batches), given)


# Where in a batch a TensorDict is, and how forward comes by it.


def around(sparse: Any) -> Batch:
    return Batch(sparse=sparse, dense=torch.ones(4, 3), label=torch.ones(4))


@SCENARIOS.scenario("tensordicts in batches", ranks=2)
def a_tensordict_within_the_batch() -> None:
    batches = list(ids(5))

    def make(of: Callable[[Any], Any] = itemgetter("sparse")) -> nn.Module:
        return Lookups(of, bags=bags("f", "g"), sequences=sequences("f", "g"))

    for value in (nested, by_lengths):
        given = [
            TensorDict({"sparse": as_tensordict(batch, value=value), "f": torch.ones(4)}) for batch in batches
        ]
        train_same(make, BOTH_RANKS, [{"sparse": as_kjt(batch)} for batch in batches], given)


class Next(nn.Module):
    """Preprocessing: the id after each, in a TensorDict or KeyedJaggedTensor like that which is given."""

    def forward(self, features: Any) -> Any:
        if isinstance(features, KeyedJaggedTensor):
            following = (features.values() + 1) % ROWS
            return KeyedJaggedTensor(features.keys(), following, lengths=features.lengths())
        return TensorDict({key: (features[key] + 1) % ROWS for key in ("g", "f")})


class Preprocessed(Lookups):
    def __init__(self, **collections: nn.Module) -> None:
        super().__init__(self.preprocessed, **collections)
        self.next = Next()

    def preprocessed(self, batch: Any) -> Any:
        return self.next(batch)


@SCENARIOS.scenario("tensordicts in batches", ranks=2)
def a_tensordict_that_preprocessing_makes() -> None:
    batches = list(ids(5))
    train_same(
        lambda: Preprocessed(bags=bags("f", "g")), BOTH_RANKS, map(as_kjt, batches), map(as_tensordict, batches)
    )


@SCENARIOS.scenario("tensordicts in batches", ranks=2)
def a_tensordict_that_forward_changes() -> None:
    """It has been sent out by then, and has to be sent out again."""

    def changed(batch: Any) -> Any:
        batch.set("f", batch["g"])
        return batch

    batches = list(ids(5))
    plain = Training(_bags(), BOTH_RANKS)
    expected = plain.plainly(as_kjt({"f": batch["g"], "g": batch["g"]}) for batch in batches)
    training = Training(_bags(changed), BOTH_RANKS)
    pipeline = training.pipeline()
    outputs = through(pipeline, map(as_tensordict, batches))
    assert all(torch.equal(*two) for two in zip(outputs, expected, strict=True))
    assert farthest(training.held(), plain.held()) == 0
    assert not pipeline._pipelined_modules


@SCENARIOS.scenario("tensordicts in batches", ranks=2)
def pipelines_of_torchrec_take_them_too() -> None:
    def training() -> Training:
        return Training(_bags(attrgetter("sparse")), BOTH_RANKS)

    batches = list(ids(5))
    plain = training()
    expected = plain.plainly(around(as_kjt(batch)) for batch in batches)
    for kind in (TrainPipelineBase, TrainPipelineSparseDist):
        given = [around(as_tensordict(batch, order)) for batch, order in zip(batches, ORDERS, strict=True)]
        one = training()
        accept_tensordicts(one.model)
        outputs = through(kind(one.model, one.optimizer, CPU), given)
        assert all(torch.equal(*two) for two in zip(outputs, expected, strict=True))
        assert farthest(one.held(), plain.held()) == 0


# Weights of ids.


def weighted_bags(*names: str) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=[bag(name, dim=8) for name in names], is_weighted=True, device=META)


def _weighted() -> nn.Module:
    return Lookups(bags=weighted_bags("f", "g"))


@SCENARIOS.scenario("tensordicts with weights", ranks=2)
def weighted_bags_of_every_sharding_type() -> None:
    batches = list(ids(5, *EVERY_SHARDING))
    expected = [as_kjt(batch, weights=True) for batch in batches]
    orders = ("trcd", "dcrt", "rtdc", "trcd", "ctdr")
    given = [as_tensordict(batch, keys, weighted) for batch, keys in zip(batches, orders, strict=True)]
    train_same(lambda: Lookups(bags=weighted_bags(*EVERY_SHARDING)), EVERY_SHARDING, expected, given)


# Those that cannot be right: which these are is shown by tests/unit/trainer/pipelines/test_tensordict_to_kjt.py.


def _check_refused(makes: Iterable[Callable[[], nn.Module]], batch: Any, *told: str) -> None:
    for make in makes:
        for train in in_both_ways(lambda make=make: Training(make(), BOTH_RANKS)):  # type: ignore[misc]
            with pytest.raises(InvalidInput) as refusal:
                train([batch])
            assert all(part in str(refusal.value) for part in told), refusal.value


@SCENARIOS.scenario("refused tensordicts", ranks=2)
def a_key_that_is_missing() -> None:
    batch, examples = next(ids(1)), [[1, 2], [3]]
    without = TensorDict({"f": nested(examples), "h": nested(examples)})
    _check_refused([_bags, lambda: Lookups(sequences=sequences("f", "g"))], without, "'g'", "f, h")
    mixed = TensorDict({"f": weighted(batch["f"]), "g": nested(batch["g"])})
    _check_refused([_weighted], mixed, "'g'", "weights")


@SCENARIOS.scenario("refused tensordicts", ranks=2)
def no_batch_is_trained_on_with_a_refused_one() -> None:
    """A pipeline sends ids out before it trains on the batch before: that one has not been trained on either."""
    good, bad = as_tensordict(next(ids(1))), TensorDict({"f": nested([[1, 2], [3]])})
    training = Training(_bags(), BOTH_RANKS)
    pipeline, before = training.pipeline(), training.held()
    with pytest.raises(InvalidInput):
        through(pipeline, [bad, good])
    assert farthest(before, training.held()) == 0
