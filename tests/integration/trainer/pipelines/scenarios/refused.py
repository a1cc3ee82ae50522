"""What cannot be done ahead of forward: it is done in forward, and the reason is logged.

What a trace finds by itself is shown by tests/unit/trainer/pipelines/test_plan.py.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.integration.trainer.pipelines.comparison import check_like_plain, check_noticed_later
from tests.integration.trainer.pipelines.prepared import (
    Does,
    Prepared,
    PreparedModel,
    Rich,
    Shift,
    does,
    rich,
    shifted,
)
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.training import BOTH_RANKS, ROWS, Training
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.base.errors import InvalidInput

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
def names_that_no_module_has() -> None:
    training = Training(Prepared(lambda _, b: [b.sparse])(), BOTH_RANKS)
    with pytest.raises(InvalidInput, match="not_ahead: the model has no module 'sacks'"):
        training.pipeline(not_ahead=["sacks"])


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


# What changes between a call ahead of forward and the one in forward, and modules that change things.

changed = SCENARIOS.scenario("changed", ranks=2)


@changed
def a_part_of_the_batch_written_to_in_place() -> None:
    def prepare(model: Any, batch: Any) -> Any:
        batch.amount.add_(1)
        return [model.shift(batch.sparse, batch.amount), batch.sparse]

    check_like_plain(Prepared(prepare, {"shift": Shift}, TWO), refused={"bags": "its argument 0 is not the one"})


@changed
def a_module_that_writes_to_its_input_now_and_then() -> None:
    def clamped(features: KeyedJaggedTensor, number: int) -> Any:
        if number == 3:
            features.values().clamp_(max=ROWS // 2)
        return shifted(features, 1)

    class After(PreparedModel):
        def forward(self, batch: Any) -> Any:
            found = self.bags(batch.sparse).values().sum(1)
            again = self.more(self.does(batch.sparse, batch.number)).values().sum(1)
            loss = nn.functional.mse_loss(found + again, batch.label) + self.over.weight.sum()
            return loss, loss.detach()

    check_noticed_later(lambda: After(Prepared(lambda *_: [], does(clamped), TWO)), "does", "more")


def _seeded(count: int) -> Iterator[Rich]:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    yield from rich(count)


@changed
def random_numbers() -> None:
    """Ids and the loss are changed by numbers drawn in turn from one source."""

    class Drawing(nn.Module):
        def __init__(self, draw: Callable[[], int]) -> None:
            super().__init__()
            self.inner = Prepared(lambda m, b: [m.does(b.sparse)], does(lambda kjt: shifted(kjt, draw())))()
            self.noise = Does(lambda loss: loss * (1 + draw()))

        def forward(self, batch: Any) -> Any:
            loss, _ = self.inner(batch)
            loss = self.noise(loss)
            return loss, loss.detach()

    draws = "it draws random numbers"
    for draw in (
        lambda: int(torch.randint(ROWS, (1,))),
        lambda: random.randrange(ROWS),
        lambda: int(np.random.randint(ROWS)),
    ):
        refused = {"inner.does": draws, "inner.bags": draws}
        check_like_plain(partial(Drawing, draw), refused=refused, batches=_seeded)


@changed
def hooks_that_change_what_a_module_is_given_and_returns() -> None:
    def before() -> nn.Module:
        module = Shift()
        module.register_forward_pre_hook(lambda _, args: (args[0], args[1] + 1))
        return module

    def after() -> nn.Module:
        module = Shift()
        module.register_forward_hook(lambda *given: shifted(given[-1], 1))
        return module

    for make in (before, after):
        check_like_plain(
            Prepared(lambda m, b: [m.shift(b.sparse, b.number)], {"shift": make}),
            refused={"bags": "its argument 0 is not the one"},
        )
