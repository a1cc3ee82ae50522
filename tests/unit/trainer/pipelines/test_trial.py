"""What trying a plan on copies finds out about modules."""

import itertools
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.trainer.pipelines.sharded import Sharded
from torch import nn

from deltasync.trainer.pipelines.plan import make_plan
from deltasync.trainer.pipelines.trial import why_not_early


class Holder(nn.Module):
    """Does something to what it holds when it is called."""

    def __init__(self, value: Any, do: Callable[[Any], object] = lambda _: None) -> None:
        super().__init__()
        self.held, self._do = value, do
        self.register_buffer("buffer", torch.zeros(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self._do(self)
        return ids + 1


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.held += 1
        return ids


class Model(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = first, second or Holder(None)
        self.one, self.other = Sharded(), Sharded()

    def forward(self, ids: Any) -> Any:
        return self.one(self.first(ids)), self.other(self.second(ids))


def reasons(first: nn.Module, second: nn.Module | None = None) -> dict[str, str]:
    model = Model(first, second)
    plan = make_plan(model, {})
    assert list(plan.preprocessing) == ["first", "second"]
    return why_not_early(plan, model, torch.arange(3))


def _linear() -> Any:
    linear: Any = nn.Identity()
    linear.inner = nn.Identity()
    linear.inner.held = 1
    return linear


@dataclass
class Record:
    calls: int = 0


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


def _count(record: Any) -> None:
    record.calls += 1


def _add_twice(its: Any) -> None:
    """The second result may lie where the value before the first one did."""
    for _ in range(2):
        its.held = its.held + 1


@pytest.mark.parametrize(
    ("value", "do"),
    [
        (0, lambda its: its.__dict__.update(held=its.held + 1)),
        (None, lambda its: its.__dict__.update(held="a first batch")),
        ([], lambda its: its.held.append(1)),
        ({"calls": [0]}, lambda its: its.held["calls"].append(1)),
        ({}, lambda its: its.held.setdefault("a", 1)),
        ({"a"}, lambda its: its.held.add("b")),
        (deque([1], maxlen=1), lambda its: its.held.append(2)),
        (Counter(), lambda its: its.held.update("a")),
        (bytearray(b"a"), lambda its: its.held.extend(b"b")),
        (np.zeros(3), lambda its: its.held.__setitem__(0, 1)),
        ([{"counts": np.zeros(2000)}], lambda its: np.add.at(its.held[0]["counts"], [1999], 1)),
        (torch.zeros(1), lambda its: its.held.add_(1)),
        (torch.zeros(1), _add_twice),
        (Record(), lambda its: _count(its.held)),
        (Slotted(), lambda its: _count(its.held)),
        (SimpleNamespace(inner=[SimpleNamespace(calls=0)]), lambda its: _count(its.held.inner[0])),
        (dict.fromkeys(range(2000)), lambda its: its.held.update({1999: 1})),
        (itertools.count(), lambda its: next(its.held)),
        (random.Random(1), lambda its: its.held.random()),
        (np.random.default_rng(1), lambda its: its.held.random()),
        (torch.Generator(), lambda its: torch.rand(1, generator=its.held)),
        ([_linear()], lambda its: its.held[0].inner.__dict__.update(held=2)),
    ],
)
def test_a_module_that_changes_what_it_holds_is_left_to_forward(value: Any, do: Callable[[Any], object]) -> None:
    changes = "it changes its attribute 'held' when it is called"
    assert reasons(Holder(value, do)) == {"first": changes}
    assert reasons(nn.Sequential(Holder(value, do))) == {"first": changes.replace("held", "0.held")}


@pytest.mark.parametrize(
    "do",
    [
        lambda its: its.buffer.add_(1),
        lambda its: its._buffers.update(buffer=its.buffer + 1),
        lambda its: its.register_buffer("buffer", None),
    ],
)
def test_a_module_that_changes_its_buffer_is_left_to_forward(do: Callable[[Any], object]) -> None:
    assert reasons(Holder(None, do)) == {"first": "it changes its attribute 'buffer' when it is called"}


def test_a_module_that_gets_or_loses_an_attribute_is_left_to_forward() -> None:
    changes = "it changes its attribute 'more' when it is called"
    assert reasons(Holder(1, lambda its: its.__dict__.update(more=1))) == {"first": changes}
    loses = Holder(1, lambda its: delattr(its, "more"))
    loses.more = 1  # type: ignore[assignment]
    assert reasons(loses) == {"first": changes}


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_a_scripted_module_that_counts_its_calls_is_left_to_forward() -> None:
    assert reasons(torch.jit.script(Scripted())) == {"first": "it changes its attribute 'held' when it is called"}
    assert reasons(torch.jit.script(nn.Identity())) == {}


@pytest.mark.parametrize(
    ("value", "do"),
    [
        (10**6, lambda its: its.__dict__.update(held=int("1000000"))),
        ({"a": 1}, lambda its: its.held["a"]),
        (np.ones(3), lambda its: its.held.sum()),
        (torch.ones(3), lambda its: its.held.sum()),
        (torch.ones(3), lambda its: its.__dict__.update(held=its.held.view(3))),
        (Record(), lambda its: its.held.calls),
        (Record, lambda its: its.held(1)),
        (random.Random(1), lambda its: its.held.getstate()),
        ([_linear()], lambda its: its.held[0](1)),
        (None, lambda its: its.register_forward_hook(lambda *_: None)),
        (torch.compile(nn.Identity(), backend="eager"), lambda its: its.held(torch.ones(1))),
    ],
)
def test_a_module_that_leaves_what_it_holds_as_it_is_may_be_called_ahead(
    value: Any, do: Callable[[Any], object]
) -> None:
    assert reasons(Holder(value, do)) == {}


def test_what_is_tried_is_a_copy() -> None:
    module = Holder([], lambda its: its.held.append(1))
    assert reasons(module)
    assert module.held == []


def test_a_module_that_cannot_be_copied_is_left_to_forward_alone() -> None:
    [(name, reason)] = reasons(Holder(threading.Lock())).items()
    assert name == "first"
    assert reason.startswith("it can't be tried on a copy: TypeError")
    assert reasons(Holder(None), Holder(threading.Lock())).keys() == {"second"}


def test_modules_within_others_count_too() -> None:
    shared = Holder(0, lambda its: its.__dict__.update(held=its.held + 1))
    assert reasons(nn.Sequential(nn.Identity(), nn.Sequential(shared))) == {
        "first": "it changes its attribute '1.0.held' when it is called"
    }
