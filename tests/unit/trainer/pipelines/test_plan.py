"""What a trace says can be done ahead of forward, and what doing it gives."""

from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.trainer.pipelines.sharded import Sharded
from torch import nn

from deltasync.trainer.pipelines.plan import LookAheadPlan, compute, make_plan

Pair = namedtuple("Pair", "one other")  # A container that traces take for a function.


GENERATOR = torch.Generator()


class Words(nn.Module):
    """Says in words what it was called with."""

    def forward(self, *args: Any, **kwargs: Any) -> str:
        return f"words({args}, {kwargs})"


@dataclass
class Batch:
    one: str = "one"
    other: str = "other"
    named: Any = None


class Model(nn.Module):
    """Calls what a function says."""

    def __init__(self, call: Callable[[Any, Any], Any], **modules: nn.Module) -> None:
        super().__init__()
        self.words, self.sharded = Words(), Sharded()
        self.parameter = nn.Parameter(torch.zeros(1))
        self.register_buffer("offset", torch.ones(1))
        for name, module in modules.items():
            self.add_module(name, module)
        self._call = call

    def forward(self, batch: Any) -> Any:
        return self._call(self, batch)


def plan_of(
    call: Callable[[Any, Any], Any], exclusions: Mapping[str, str] | None = None, **modules: nn.Module
) -> LookAheadPlan:
    return make_plan(Model(call, **modules), exclusions or {})


def done_ahead(model: Model, batch: Any) -> Any:
    """What the sharded module is going to be called with."""
    plan = make_plan(model, {})
    assert plan.reasons == {}
    node, values = plan.lookups["sharded"], dict[Any, Any]()
    for needed in plan.nodes:
        values[needed] = compute(needed, batch, model, plan.preprocessing, values)
    found: Any = node.args[0]
    return values[found]


def test_what_no_lookup_needs_is_not_done_ahead() -> None:
    plan = plan_of(lambda m, b: (m.words(b.other), m.sharded(b.one), m.words(b.one, 1)))
    assert [str(node.op) for node in plan.nodes] == ["placeholder", "call_function"]
    assert plan.preprocessing == {}


def test_nothing_is_done_ahead_in_a_model_without_sharded_modules() -> None:
    plan = plan_of(lambda m, b: m.words(b.one))
    assert plan == LookAheadPlan()


@pytest.mark.parametrize(
    ("call", "reasons"),
    [
        (lambda m, b: m.sharded(b.one + "!"), {"sharded": "its input is changed on the way, by add"}),
        (lambda m, b: m.sharded(b.one.upper()), {"sharded": "its input is changed on the way, by upper"}),
        (lambda m, b: m.sharded(torch.cat([b.one])), {"sharded": "its input is changed on the way, by cat"}),
        (lambda m, b: m.sharded([m.words(b.one), {"a": -b.one}]), {"sharded": "changed on the way, by neg"}),
        (lambda m, b: m.sharded(b.one) + m.sharded(b.one), {"sharded": "it is called 2 times in one forward"}),
        (lambda m, _: m.sharded(1), {"sharded": "it is called without anything from the batch"}),
        (lambda m, b: m.sharded(b.one, m.parameter), {"sharded": "its input is the parameter 'parameter'"}),
        (lambda m, b: m.sharded(b.one, GENERATOR), {"sharded": "its input is a Generator of the model"}),
        (lambda m, b: m.sharded(b.one, m.linear), {"sharded": "its input is a Linear of the model"}),
        (lambda m, b: m.sharded(Batch(named=b.one)), {"sharded": "its input is made on the way: a Batch"}),
        (
            lambda m, b: m.sharded(m.linear(b.one)),
            {"sharded": "module 'linear' has parameters to train", "linear": "has parameters to train"},
        ),
        (
            lambda m, _: m.sharded(m.words()),
            {"sharded": "module 'words' is called without arguments", "words": "called without arguments"},
        ),
        (
            lambda m, b: m.sharded(m.words(m.more(b.one))),
            {"sharded": "its input comes from the sharded module 'more'", "words": "the sharded module 'more'"},
        ),
        (
            lambda m, b: m.sharded(b.one) if b.one else None,
            {"sharded": "test_plan.py:", "more": "can't be traced"},
        ),
    ],
)
def test_reasons(call: Callable[[Any, Any], Any], reasons: dict[str, str]) -> None:
    plan = plan_of(call, linear=nn.Linear(1, 1), more=Sharded())
    assert plan.reasons.keys() == reasons.keys()
    assert all(part in plan.reasons[name] for name, part in reasons.items()), plan.reasons
    assert "sharded" not in plan.lookups


@pytest.mark.parametrize(
    "constant",
    [
        b"one",
        {1, 2},
        frozenset({1}),
        bytearray(b"one"),
        deque([1]),
        np.ones(2),
        np.int64(3),
        nn.Parameter(torch.ones(1)),
        nn.Identity(),
        torch.Size([1, 2]),
        OrderedDict(a=1),
        str.upper,
    ],
    ids=lambda constant: type(constant).__name__,
)
def test_a_constant_that_no_trace_holds_keeps_only_its_module_in_forward(constant: Any) -> None:
    held = f"module 'words' is called with a value of type {type(constant).__name__}, which torch.fx cannot hold"
    for argument in (constant, [constant], {"a": (1, constant)}, slice(constant)):
        plan = plan_of(
            lambda m, b, argument=argument: [  # type: ignore[misc]
                m.sharded(m.others(m.words(b.one, argument))),
                m.more(m.others(b.other, 1)),
                m.late(argument),
            ],
            more=Sharded(),
            others=Words(),
            late=Words(),
        )
        assert list(plan.lookups) == ["more"]
        assert list(plan.preprocessing) == ["others"]
        assert plan.reasons.keys() == {"sharded", "words", "others"}
        assert all(reason.startswith(held) for reason in plan.reasons.values()), plan.reasons


def test_lookups_and_accesses_may_take_a_constant_that_no_trace_holds() -> None:
    held = "is called with a value of type bytes, which torch.fx cannot hold"
    for call, reason in (
        (lambda m, b: m.sharded(b.one, b"one"), f"module 'sharded' {held}"),
        (lambda m, b: m.sharded(b.named[b"one"]), f"getitem {held}"),
        (lambda m, b: m.sharded(b.named.get(b"one")), f"get {held}"),
    ):
        plan = plan_of(lambda m, b, call=call: [call(m, b), m.more(b.other)], more=Sharded())  # type: ignore[misc]
        assert list(plan.lookups) == ["more"]
        assert list(plan.reasons) == ["sharded"]
        assert plan.reasons["sharded"].startswith(reason)


@pytest.mark.parametrize("name", ["words", "sharded"])
def test_what_is_given_up_is_not_done_ahead(name: str) -> None:
    plan = plan_of(lambda m, b: m.sharded(m.words(b.one)), {name: "because"})
    assert plan.lookups == {}
    assert plan.nodes == []
    assert plan.reasons[name] == "because"
    assert plan.reasons["sharded"] in ("because", "its input comes from module 'words': because")


def test_containers_are_made_anew_each_time() -> None:
    class Keeps(nn.Module):
        def forward(self, value: Any) -> Any:
            return value

    model = Model(lambda m, b: m.sharded(m.keeps([b.one, {"a": (b.other,)}, 1])), keeps=Keeps())
    first, second = done_ahead(model, Batch()), done_ahead(model, Batch())
    assert first == second == ["one", {"a": ("other",)}, 1]
    assert first is not second
    assert first[1] is not second[1]


def test_arguments_that_forward_has_defaults_for() -> None:
    class Defaults(Model):
        def forward(self, batch: Any, by: int = 3, also: Any = None) -> Any:
            return self.sharded(self.words(batch.one, by, also))

    model = Defaults(lambda *_: None)
    model(Batch())
    assert done_ahead(model, Batch()) == model.sharded.called[0][0] == "words(('one', 3, None), {})"


def test_a_chain_in_which_each_result_is_used_twice() -> None:
    def call(model: Any, batch: Any) -> Any:
        value = batch.one
        for _ in range(100):
            value = model.words(model.words(value, 1), model.words(value, 2))
        return model.sharded(value)

    assert len(plan_of(call).nodes) == 302


SOURCES: list[Callable[[Any, Any], Any]] = [
    lambda _, b: b,
    lambda _, b: b.one,
    lambda _, b: b.other,
    lambda _, b: b.named["a"],
    lambda _, b: b.named["b"][1],
    lambda _, b: b.named["b"][-1:],
    lambda _, b: b.named.get("a"),
    lambda _, b: b.named.get("none", b.one),
    lambda m, _: m.offset,
]
CONSTANTS = st.sampled_from((0, 1, True, 1.5, "a", None, (), slice(1, 2), torch.int64))
# A program is a list of calls. Each takes results before it, and puts them into containers of one kind or another.
CALLS = st.lists(
    st.tuples(
        st.sampled_from(("list", "dict", "tuple", "named tuple", "keywords", "slice", "plain")),
        st.lists(st.integers(0, 30), min_size=1, max_size=3),
        CONSTANTS,
    ),
    min_size=1,
    max_size=8,
)


def _called(model: Any, kind: str, inputs: list[Any], constant: Any) -> Any:
    match kind:
        case "list":
            return model.words([constant, *inputs])
        case "dict":
            return model.words({"a": inputs, "b": {"c": constant}})
        case "tuple":
            return model.words((constant, (*inputs,)))
        case "named tuple":
            return model.words(Pair(inputs[0], constant), *inputs[1:])
        case "keywords":
            return model.words(inputs[0], by=inputs[1:], also=constant)
        case "slice":
            return model.words(slice(inputs[0], constant), *inputs[1:])
        case _:
            return model.words(*inputs, constant)


@given(CALLS)
def test_what_is_done_ahead_is_what_forward_calls_with(program: list[tuple[str, list[int], Any]]) -> None:
    def call(model: Any, batch: Any) -> Any:
        values = [source(model, batch) for source in SOURCES]
        for kind, inputs, constant in program:
            values.append(_called(model, kind, [values[place % len(values)] for place in inputs], constant))
        return model.sharded(values[-1])

    model = Model(call)
    batch = Batch(named={"a": "x", "b": [1, "y", 3]})
    model(batch)
    assert done_ahead(model, batch) == model.sharded.called[0][0]
