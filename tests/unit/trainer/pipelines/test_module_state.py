"""Changes of what a preprocessing module's results depend on."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deltasync.trainer.pipelines.calls import MOST_ITEMS, ModuleState


class Holder(nn.Module):
    """Has an attribute, and a module within that has another."""

    def __init__(self, attribute: Any = None) -> None:
        super().__init__()
        self.attribute = attribute
        self.inner = nn.Identity()
        self.inner.other = [1]  # type: ignore[assignment]
        self.register_buffer("buffer", torch.zeros(2))


def _changed(attribute: Any, change: Callable[[Any], object]) -> bool:
    holder = Holder(attribute)
    before = ModuleState.of(holder)
    assert ModuleState.of(holder).is_same(before)
    change(holder)
    return not ModuleState.of(holder).is_same(before)


@pytest.mark.parametrize(
    ("attribute", "change"),
    [
        (1, lambda its: its.__dict__.update(attribute=2)),
        (1, lambda its: its.__dict__.update(attribute=1.0)),
        ({"salt": 1}, lambda its: its.attribute.update(salt=2)),
        ({"salt": 1}, lambda its: its.attribute.update(salt=True)),
        ({"salt": 1}, lambda its: its.attribute.update(more=2)),
        ({"salt": 1, "more": 2}, lambda its: its.attribute.pop("more")),
        ({"a": 1, "b": 2}, lambda its: its.attribute.update(c=its.attribute.pop("b"))),
        (OrderedDict(a=1, b=2), lambda its: its.attribute.move_to_end("a")),
        (defaultdict(int, a=1), lambda its: its.attribute["b"]),
        ([1, 2], lambda its: its.attribute.append(3)),
        ([1, 2], lambda its: its.attribute.reverse()),
        ([1, [2]], lambda its: its.__dict__.update(attribute=[[1], 2])),
        ([(1, [2])], lambda its: its.attribute[0][1].append(3)),
        (deque([1]), lambda its: its.attribute.append(2)),
        ({1, 2}, lambda its: its.attribute.add(3)),
        ({"of": {"sets": {1}}}, lambda its: its.attribute["of"]["sets"].remove(1)),
        ({"weights": torch.ones(3)}, lambda its: its.attribute["weights"].add_(1)),
        ({"weights": torch.ones(3)}, lambda its: its.attribute.update(weights=torch.ones(3))),
        (torch.ones(3), lambda its: its.attribute.add_(1)),
        (np.zeros(3), lambda its: its.attribute.__setitem__(0, 1)),
        ([{"counts": np.zeros(MOST_ITEMS)}], lambda its: np.add.at(its.attribute[0]["counts"], [3], 1)),
        (None, lambda its: its.inner.other.append(2)),
        (None, lambda its: its._buffers.update(buffer=torch.zeros(2))),
        (None, lambda its: its.buffer.add_(1)),
        (None, lambda its: its.eval()),
        (dict.fromkeys(range(MOST_ITEMS + 1)), lambda its: its.attribute.pop(0)),
        ([[row] for row in range(2 * MOST_ITEMS)], lambda its: its.attribute.pop()),
        ({"large": list(range(MOST_ITEMS + 1)), "salt": 1}, lambda its: its.attribute.update(salt=2)),
    ],
)
def test_a_change_is_another_state(attribute: Any, change: Callable[[Any], object]) -> None:
    assert _changed(attribute, change)


@pytest.mark.parametrize(
    ("attribute", "change"),
    [
        (None, lambda _: None),
        ({"salt": 1}, lambda its: its.attribute.update(salt=1)),
        ({"salt": 10**6}, lambda its: its.attribute.update(salt=int("1000000"))),
        ({"salt": "x"}, lambda its: its.__dict__.update(attribute={"salt": "x"})),
        ({1, 2, 3}, lambda its: (its.attribute.remove(1), its.attribute.add(1))),
        (float("nan"), lambda _: None),
        ([torch.tensor([[1, 2]]), None], lambda its: its.attribute[0].sum()),
        (None, lambda its: its.register_forward_hook(lambda *_: None)),
        (object(), lambda _: None),
        (np.zeros(3), lambda its: its.attribute.sum()),
    ],
)
def test_what_stays_as_it_is_is_the_same_state(attribute: Any, change: Callable[[Any], object]) -> None:
    assert not _changed(attribute, change)


def test_containers_may_hold_themselves() -> None:
    def grow(its: Any) -> None:
        its.attribute.append(2)

    endless: list[Any] = [1]
    endless.append(endless)
    assert _changed(endless, grow)
    endless = [1]
    endless.append({"again": endless})
    assert not _changed(endless, lambda _: None)
