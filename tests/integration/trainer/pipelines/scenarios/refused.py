"""What cannot be done ahead of forward: it is done in forward, and the reason is logged.

What a trace finds by itself is shown by tests/unit/trainer/pipelines/lookahead/test_plan.py.
"""

from functools import partial
from typing import Any

import pytest
import torch
from tests.integration.trainer.pipelines.batches import ROWS
from tests.integration.trainer.pipelines.comparison import check_like_plain, check_noticed_later
from tests.integration.trainer.pipelines.models import BOTH_RANKS
from tests.integration.trainer.pipelines.prepared import (
    Prepared,
    PreparedModel,
    Shift,
    does,
    rich,
    shifted,
    with_values,
)
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.training import Training
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.core.errors import InvalidInput

scenario = SCENARIOS.scenario("refused", ranks=2)

TWO = ("bags", "more")
without_extras = partial(rich, extras=False)


def adds_extra(features: KeyedJaggedTensor, extra: torch.Tensor) -> KeyedJaggedTensor:
    return shifted(features, extra.sum())


def with_an_extra_or_else_the_amount(model: Any, batch: Any) -> Any:
    if batch.extra is not None:
        return [model.does(batch.sparse, batch.extra)]
    return [model.shift(batch.sparse, batch.amount)]


@scenario
def a_module_with_parameters_to_train() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.ones(ROWS))

        def forward(self, features: KeyedJaggedTensor) -> Any:
            order = torch.argsort(self.weights, stable=True)
            return with_values(features, order[features.values()])

    check_like_plain(
        Prepared(lambda m, b: [m.learned(m.shift(b.sparse, 1))], {"learned": Learned, "shift": Shift}),
        refused={"learned": "'learned' has parameters to train", "bags": "'learned' has parameters to train"},
    )


@scenario
def a_sharded_module_called_twice() -> None:
    class Twice(PreparedModel):
        def forward(self, batch: Any) -> Any:
            again = self.bags(self.shift(batch.sparse, 1)).values().sum()
            loss, _ = super().forward(batch)
            return loss + again, loss.detach()

    check_like_plain(
        lambda: Twice(Prepared(lambda m, b: [b.sparse, m.shift(b.sparse, 2)], {"shift": Shift}, TWO)),
        refused={"bags": "it is called 2 times in one forward"},
    )


@scenario
def a_constant_that_a_trace_cannot_hold() -> None:
    check_like_plain(
        Prepared(lambda m, b: [m.shift(b.sparse, b"one")], {"shift": Shift}),
        refused={"bags": "can't be traced: .*refused.py:[0-9]+: NotImplementedError"},
    )


@scenario
def a_forward_of_any_arguments() -> None:
    class Anything(PreparedModel):
        def forward(self, *args: Any) -> Any:
            return super().forward(args[0])

    check_like_plain(
        lambda: Anything(Prepared(lambda _, b: [b.sparse])),
        refused={"bags": "its features can't be made ahead: TypeError"},
    )


@scenario
def a_call_that_fails_where_forward_does_not_make_it() -> None:
    failed = "it can't be called ahead: AttributeError"
    check_like_plain(
        Prepared(with_an_extra_or_else_the_amount, does(adds_extra)),
        refused={"does": failed, "bags": failed},
        batches=without_extras,
    )


@scenario
def a_call_that_fails_beside_one_that_does_not() -> None:
    def prepare(model: Any, batch: Any) -> Any:
        other = model.shift(batch.sparse, batch.amount)
        if batch.extra is not None:
            return [model.does(batch.sparse, batch.extra), other]
        return [batch.sparse, other]

    failed = "it can't be called ahead: AttributeError"
    check_like_plain(
        Prepared(prepare, does(adds_extra), TWO),
        ahead={"shift": 1},
        refused={"does": failed, "bags": failed},
        batches=without_extras,
    )


@scenario
def an_access_that_fails_where_forward_does_not_make_it() -> None:
    def prepare(model: Any, batch: Any) -> Any:
        return [batch.extra.sparse if batch.extra is not None else batch.sparse]

    check_like_plain(
        Prepared(prepare),
        refused={"bags": "its features can't be made ahead: AttributeError"},
        batches=without_extras,
    )


@scenario
def features_that_are_others_from_a_later_batch_on() -> None:
    def prepare(model: Any, batch: Any) -> Any:
        return [model.shift(batch.sparse, 1 if batch.extra is not None else 2)]

    check_noticed_later(Prepared(prepare, {"shift": Shift}), "shift", "bags")
    check_noticed_later(Prepared(prepare, {"shift": Shift}), "bags")


@scenario
def names_that_no_module_has() -> None:
    training = Training(Prepared(lambda _, b: [b.sparse])(), BOTH_RANKS)
    with pytest.raises(InvalidInput, match="not_ahead: the model has no module 'sacks'"):
        training.pipeline(not_ahead=["sacks"])


@scenario
def a_call_that_fails_for_a_later_batch() -> None:
    make = Prepared(with_an_extra_or_else_the_amount, does(adds_extra))
    with pytest.raises(AttributeError) as failed:
        Training(make(), BOTH_RANKS).pipelined(rich(3))
    assert "module 'does'" in failed.value.__notes__[0]
    assert "PipelineOptions.not_ahead" in failed.value.__notes__[0]
    named = "it is named in not_ahead"
    check_like_plain(make, refused={"does": named, "bags": named}, not_ahead=["does"])


@scenario
def a_batch_that_cannot_be_copied() -> None:
    def batches(count: int) -> Any:
        for batch in rich(count):
            batch.dense = batch.dense.requires_grad_() * 2
            yield batch

    check_like_plain(
        Prepared(lambda m, b: [m.shift(b.sparse, 1)], {"shift": Shift}),
        refused={"shift": "it can't be tried on a copy", "bags": "it can't be tried on a copy"},
        batches=batches,
    )
