"""Where in a batch a TensorDict is, and how forward comes by it."""

from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any

import torch
from tensordict import TensorDict
from tests.integration.trainer.pipelines import jagged
from tests.integration.trainer.pipelines.batches import Batch
from tests.integration.trainer.pipelines.jagged import (
    ROWS,
    Lookups,
    as_kjt,
    as_tensordict,
    ids,
    nested,
    train_same,
)
from tests.integration.trainer.pipelines.models import BOTH_RANKS
from tests.integration.trainer.pipelines.registry import SCENARIOS
from tests.integration.trainer.pipelines.training import Training, farthest, through
from tests.integration.trainer.torchrec_defects.models import CPU, DIM, bags, sequences
from torch import nn
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.pipelines import accept_tensordicts


@SCENARIOS.scenario("tensordicts in batches", ranks=2)
def a_tensordict_within_the_batch() -> None:
    batches = list(ids(5))

    def make(of: Callable[[Any], Any] = itemgetter("sparse")) -> nn.Module:
        return Lookups(of, bags=bags("f", "g"), sequences=sequences("f", "g"))

    for value in (nested, jagged.by_lengths):
        given = [
            TensorDict({"sparse": as_tensordict(batch, value=value), "f": torch.ones(4)}) for batch in batches
        ]
        train_same(make, BOTH_RANKS, [{"sparse": as_kjt(batch)} for batch in batches], given)


@SCENARIOS.scenario("tensordicts in batches", ranks=2)
def a_keyed_jagged_tensor_within_a_tensordict() -> None:
    batches = list(ids(5))

    def make() -> nn.Module:
        return Lookups(itemgetter("sparse"), bags=bags("f", "g"))

    given = [TensorDict({"sparse": as_kjt(batch), "dense": torch.ones(4)}) for batch in batches]
    train_same(make, BOTH_RANKS, [{"sparse": as_kjt(batch)} for batch in batches], given)


@SCENARIOS.scenario("tensordicts in batches", ranks=2)
def a_tensordict_in_a_pipelineable_batch() -> None:
    batches = list(ids(5))

    def make() -> nn.Module:
        return Lookups(attrgetter("sparse"), bags=bags("f", "g"), sequences=sequences("f", "g"))

    def around(sparse: Any) -> Batch:
        return Batch(sparse=sparse, dense=torch.ones(4, 3), label=torch.ones(4))

    expected = [around(as_kjt(batch)) for batch in batches]
    train_same(make, BOTH_RANKS, expected, [around(as_tensordict(batch)) for batch in batches])


@SCENARIOS.scenario("tensordicts in batches", ranks=2)
def a_tensordict_that_is_got_from_the_batch() -> None:
    batches = list(ids(4))

    def make() -> nn.Module:
        return Lookups(lambda batch: batch.get("sparse"), bags=bags("f", "g"))

    given = [TensorDict({"sparse": as_tensordict(batch)}) for batch in batches]
    train_same(make, BOTH_RANKS, [{"sparse": as_kjt(batch)} for batch in batches], given)


@SCENARIOS.scenario("tensordicts in batches", ranks=2)
def a_tensordict_given_by_name() -> None:
    class ByName(Lookups):
        def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            found = getattr(self, "bags")(features=batch).values()  # noqa: B009  # Its type says too little.
            return 0.05 * self.over(found.reshape(-1, DIM)).square().sum(), found.detach()

    batches = list(ids(4))
    train_same(lambda: ByName(bags=bags("f", "g")), BOTH_RANKS, map(as_kjt, batches), map(as_tensordict, batches))


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
    make = lambda: Preprocessed(bags=bags("f", "g"))  # noqa: E731
    train_same(make, BOTH_RANKS, map(as_kjt, batches), map(as_tensordict, batches))


@SCENARIOS.scenario("tensordicts in batches", ranks=2)
def a_tensordict_that_forward_makes() -> None:
    """It can't be traced, and so is not sent out ahead."""
    batches = list(ids(5))

    def make() -> nn.Module:
        return Lookups(lambda batch: TensorDict({"f": batch["a"], "g": batch["b"]}), bags=bags("f", "g"))

    given = [TensorDict({"a": nested(batch["f"]), "b": nested(batch["g"])}) for batch in batches]
    plain = lambda: Lookups(bags=bags("f", "g"))  # noqa: E731
    train_same(make, BOTH_RANKS, map(as_kjt, batches), given, plain_model=plain, ahead=False)


@SCENARIOS.scenario("tensordicts in batches", ranks=2)
def a_tensordict_that_forward_changes() -> None:
    """It has been sent out by then, and has to be sent out again."""

    def changed(batch: Any) -> Any:
        batch.set("f", batch["g"])
        return batch

    batches = list(ids(5))
    plain = Training(Lookups(bags=bags("f", "g")), BOTH_RANKS)
    expected = plain.plainly(as_kjt({"f": batch["g"], "g": batch["g"]}) for batch in batches)
    training = Training(Lookups(changed, bags=bags("f", "g")), BOTH_RANKS)
    pipeline = training.pipeline()
    outputs = through(pipeline, map(as_tensordict, batches))
    assert all(torch.equal(*two) for two in zip(outputs, expected, strict=True))
    assert farthest(training.held(), plain.held()) == 0
    assert not pipeline._pipelined_modules


@SCENARIOS.scenario("tensordicts in batches", ranks=2)
def pipelines_of_torchrec_take_them_too() -> None:
    def around(sparse: Any) -> Batch:
        return Batch(sparse=sparse, dense=torch.ones(4, 3), label=torch.ones(4))

    def training() -> Training:
        return Training(Lookups(attrgetter("sparse"), bags=bags("f", "g")), BOTH_RANKS)

    orders = ["fg", "gf", "gf", "fg", "gf"]
    batches = list(ids(5))
    plain = training()
    expected = plain.plainly(around(as_kjt(batch)) for batch in batches)
    for kind in (TrainPipelineBase, TrainPipelineSparseDist):
        given = [around(as_tensordict(batch, order)) for batch, order in zip(batches, orders, strict=True)]
        one = training()
        accept_tensordicts(one.model)
        outputs = through(kind(one.model, one.optimizer, CPU), given)
        assert all(torch.equal(*two) for two in zip(outputs, expected, strict=True))
        assert farthest(one.held(), plain.held()) == 0
