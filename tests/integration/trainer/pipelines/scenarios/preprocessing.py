"""Preprocessing: done ahead of forward, each call with its own result.

Which constants and containers a call may have is shown by tests/unit/trainer/pipelines.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from tests.integration.trainer.pipelines.comparison import check_like_plain, check_same, told
from tests.integration.trainer.pipelines.prepared import (
    Does,
    Prepared,
    PreparedModel,
    Shift,
    Together,
    rich,
    shifted,
    with_values,
)
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.training import BOTH_RANKS, ROWS, Training
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

scenario = SCENARIOS.scenario("preprocessing", ranks=2)


def _shifts(*calls: Callable[[Any, Any], KeyedJaggedTensor]) -> Prepared:
    """A model whose lookups need all of these calls of one module."""
    return Prepared(
        lambda model, batch: [model.together([call(model, batch) for call in calls])],
        {"shift": Shift, "together": Together},
    )


def _check_calls(*calls: Callable[[Any, Any], KeyedJaggedTensor]) -> None:
    check_like_plain(_shifts(*calls), ahead={"shift": len(calls), "together": 1})


def _nested(name: str, make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A model in a model, with a module that makes its features."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.list = nn.ModuleList([Prepared(_prepare, {"own": make})()])

        def forward(self, batch: Any) -> Any:
            return self.list[0](batch)

    def _prepare(model: Any, batch: Any) -> Any:
        return [model.get_submodule(name)(batch.sparse, 3)]

    return Outer


@scenario
def a_module_of_a_module_that_has_collections_is_called_ahead() -> None:
    check_like_plain(_nested("own", Shift), ahead={"list.0.own": 1})


@scenario
def a_call_that_is_not_made_ahead_comes_before_one_that_is() -> None:
    def prepare(model: Any, batch: Any) -> Any:
        later = model.shift(batch.sparse, batch.amount + 1)
        return [later, model.shift(batch.sparse, batch.amount)]

    check_like_plain(
        Prepared(prepare, {"shift": Shift}, collections=("bags", "more")),
        ahead={"shift": 1},
        refused={"bags": "changed on the way, by add", "shift": "changed on the way, by add"},
    )


@scenario
def calls_with_different_parts_of_the_batch_have_their_own_results() -> None:
    _check_calls(
        lambda m, b: m.shift(b.sparse, b.amount),
        lambda m, b: m.shift(b.sparse, b.inner.amount),
        lambda m, b: m.shift(b.sparse, b.named["one"]),
        lambda m, b: m.shift(b.sparse, b.named["other"]),
        lambda m, b: m.shift(b.sparse, b.named.get("one"), b.named.get("none")),
        lambda m, b: m.shift(b.sparse, b.named.get("none", 3)),
        lambda m, b: m.shift(b.sparse, b.listed[0]),
        lambda m, b: m.shift(b.sparse, b.listed[-1]),
        lambda m, b: m.shift(b.sparse, b.listed),
        lambda m, b: m.shift(b.sparse, b.number),
        lambda m, b: m.shift(b.sparse, b.inner),
        lambda m, b: m.shift(b.sparse, b.extra),
        lambda m, b: m.shift(b.wrapped, 5),
    )


@scenario
def two_calls_with_the_same_arguments_are_two_calls() -> None:
    _check_calls(lambda m, b: m.shift(b.sparse, 1), lambda m, b: m.shift(b.sparse, 1))


@scenario
def a_call_for_something_else_leaves_a_result_to_the_one_it_is_for() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prepared = Prepared(lambda m, b: [m.shift(b.sparse, 1)], {"shift": Shift})()

        def forward(self, batch: Any) -> Any:
            other = self.prepared.shift(batch.sparse, 1).values().sum()
            loss, _ = self.prepared(batch)
            return loss + other, loss.detach()

    check_like_plain(Twice)


@scenario
def a_scripted_module_is_called_ahead() -> None:
    class Scripted(nn.Module):
        def forward(self, values: torch.Tensor, by: int) -> torch.Tensor:
            return (values + by) % 16

    def prepare(model: Any, batch: Any) -> Any:
        values = model.values(batch.sparse)
        return [model.wrap(batch.sparse, model.scripted(values, 1), model.scripted(values, 2))]

    modules: dict[str, Callable[[], nn.Module]] = {
        "scripted": lambda: torch.jit.script(Scripted()),
        "values": lambda: Does(lambda features: features.values()),
        "wrap": lambda: Does(lambda features, one, other: with_values(features, (one + 3 * other) % ROWS)),
    }
    check_like_plain(Prepared(prepare, modules), ahead={"values": 1, "wrap": 1})


@scenario
def preprocessing_runs_under_autocast() -> None:
    def product(features: Any, dense: Any, weights: Any) -> Any:
        return shifted(features, ((dense @ weights).sum() * 1000).long())

    class Wide(PreparedModel):
        def __init__(self) -> None:
            super().__init__(
                Prepared(lambda m, b: [m.does(b.sparse, b.dense, m.weights)], {"does": lambda: Does(product)})
            )
            self.register_buffer("weights", torch.linspace(0, 1, 12).view(3, 4))

    training, exact = Training(Wide(), BOTH_RANKS), Training(Wide(), BOTH_RANKS)
    pipelined = Training(Wide(), BOTH_RANKS)
    with told() as reasons:
        outputs = pipelined.pipelined(rich(6), enable_amp=True)
    assert reasons == {}
    with mock.patch.object(training, "model", _Autocast(training.model)):
        assert outputs == training.plainly(rich(6))
    assert outputs != exact.plainly(rich(6))
    check_same(pipelined.held(), training.held())


class _Autocast(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(batch)
