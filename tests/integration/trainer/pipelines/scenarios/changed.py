"""What changes between a call ahead of forward and the one in forward, and modules that change things."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from tests.integration.trainer.pipelines.batches import ROWS
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
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

scenario = SCENARIOS.scenario("changed", ranks=2)

TWO = ("bags", "more")


@scenario
def a_part_of_the_batch_written_to_in_place() -> None:
    def prepare(model: Any, batch: Any) -> Any:
        batch.amount.add_(1)
        return [model.shift(batch.sparse, batch.amount), batch.sparse]

    check_like_plain(Prepared(prepare, {"shift": Shift}, TWO), refused={"bags": "its argument 0 is not the one"})


@scenario
def an_in_place_operator_between_two_calls() -> None:
    def prepare(model: Any, batch: Any) -> Any:
        before = model.shift(batch.sparse, batch.amount)
        amount = batch.amount
        amount += 1
        return [before, model.shift(batch.sparse, amount)]

    check_like_plain(
        Prepared(prepare, {"shift": Shift}, TWO),
        ahead={"shift": 1},
        refused={"shift": "changed on the way, by add", "more": "changed on the way, by add"},
    )


@scenario
def a_batch_that_another_module_changes() -> None:
    def replace_ids(batch: Rich) -> None:
        batch.sparse._values = (batch.sparse.values() + 1) % ROWS

    def replace_amount(batch: Rich) -> None:
        batch.amount = batch.amount + 1

    def prepare(model: Any, batch: Any) -> Any:
        model.does(batch)
        return [batch.sparse]

    def prepare_by_amount(model: Any, batch: Any) -> Any:
        model.does(batch)
        return [model.shift(batch.sparse, batch.amount)]

    written = "its argument 0._values is written to on the way"
    for how, change, reason in (
        (prepare, lambda batch: batch.sparse.values().add_(1).remainder_(ROWS), written),
        (prepare, replace_ids, written),
        (prepare_by_amount, replace_amount, "its argument 0 is not the one"),
    ):
        check_like_plain(Prepared(how, does(change)), refused={"bags": reason})


def _written(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    features.values().add_(1).remainder_(ROWS)
    return features


@scenario
def a_module_that_writes_to_its_input() -> None:
    check_like_plain(
        Prepared(lambda m, b: [m.shift(b.sparse, b.number), m.does(b.sparse)], does(_written), TWO),
        refused={"does": "it writes to its input", "more": "it writes to its input"},
        ahead={"shift": 1},
    )


@scenario
def a_module_that_writes_to_what_another_one_has_made() -> None:
    class After(PreparedModel):
        def forward(self, batch: Any) -> Any:
            features = self.shift(batch.sparse, batch.amount)
            found = self.bags(features).values().sum(1)
            again = self.more(self.does(features)).values().sum(1)
            loss = nn.functional.mse_loss(found + again, batch.label) + self.over.weight.sum()
            return loss, loss.detach()

    check_like_plain(
        lambda: After(Prepared(lambda *_: [], does(_written), TWO)),
        ahead={"shift": 1},
        refused={"does": "it writes to its input", "more": "it writes to its input"},
    )


@scenario
def a_module_that_writes_to_its_buffers() -> None:
    class Moving(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))

        def forward(self, features: KeyedJaggedTensor) -> Any:
            self.seen += 1
            return shifted(features, self.seen)

    check_like_plain(
        Prepared(lambda m, b: [m.moving(b.sparse)], {"moving": Moving}),
        refused={"moving": "it writes to its buffers", "bags": "it writes to its buffers"},
    )


@scenario
def a_module_that_writes_to_a_buffer_that_it_is_given() -> None:
    def counted(features: KeyedJaggedTensor, seen: torch.Tensor) -> Any:
        seen += 1
        return shifted(features, seen)

    check_like_plain(
        Prepared(lambda m, b: [m.does(b.sparse, m.seen)], does(counted), buffers={"seen": 0}),
        refused={"does": "it writes to its input", "bags": "it writes to its input"},
    )


@scenario
def a_module_whose_buffer_is_written_to_in_forward() -> None:
    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("by", torch.zeros(1, dtype=torch.int64))

        def forward(self, features: KeyedJaggedTensor) -> Any:
            return shifted(features, self.by)

    def prepare(model: Any, batch: Any) -> Any:
        features = model.offset(batch.sparse)
        model.offset.by.add_(1)
        return [features]

    check_noticed_later(Prepared(prepare, {"offset": Offset}), "offset", "bags")


@scenario
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


@scenario
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


@scenario
def ids_in_other_memory_at_each_access() -> None:
    check_like_plain(Prepared(lambda _, b: [b.rebuilt]), refused={"bags": "its argument 0 is not the one"})
    check_like_plain(Prepared(lambda _, b: [b.wrapped]))


@scenario
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


@scenario
def hooks_that_only_look() -> None:
    def looking() -> nn.Module:
        module = Shift()
        module.register_forward_pre_hook(lambda *_: None)
        module.register_forward_hook(lambda *_: None)
        return module

    check_like_plain(Prepared(lambda m, b: [m.shift(b.sparse, 1)], {"shift": looking}), ahead={"shift": 1})
