"""What a preprocessing module's results depend on, beside its arguments."""

import operator
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from deltasync.trainer.pipelines.lookahead.calls import is_same, version

MOST_ITEMS = 1_000
"""As many items of a module's containers are compared, which is done at every step; of others, their number is."""
_PLAIN = frozenset({int, float, bool, complex, str, bytes, type(None)})
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
_CONTAINERS = (dict, *_SEQUENCES, *_SETS)
# Torch's own attributes: hooks may come and go; buffers are looked at one by one.
OF_TORCH = frozenset(vars(nn.Module()))


@dataclass(eq=False)
class ModuleState:
    """The attributes and buffers of a module and of those within, taken apart, cheaply enough for every step.

    Two states differ if an attribute is another one, an item of a container in one (dicts, lists, tuples, deques,
    sets and arrays, nested too), or if a tensor there has been written to. Not seen are changes of single items
    beyond the first `MOST_ITEMS`, and those within objects of other kinds.

    Attributes:
        shape: type and size of each container, and before which leaf it begins; copies of sets and arrays.
        leaves: everything else that is no container.
        of_torch: what torch gives to every module.
        versions: how often each tensor among these has been written to.
    """

    shape: list[Any] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    of_torch: list[Any] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, module: nn.Module) -> "ModuleState":
        """The state that a module is in."""
        state, seen = cls(), set[int]()
        for one in module.modules():
            for name, value in vars(one).items():
                if name in OF_TORCH:
                    state.of_torch.append(value)
                elif name != "forward":
                    state._add([value], seen)
        state._add(module.buffers(), seen)
        return state

    def is_same(self, other: "ModuleState") -> bool:
        """Whether nothing that is seen has changed between two states of one module."""
        if self.shape != other.shape or self.versions != other.versions:
            return False
        pairs = ((self.leaves, other.leaves), (self.of_torch, other.of_torch))
        # Mostly nothing has changed, which is seen without a call for each.
        return all(
            len(ours) == len(theirs) and (all(map(operator.is_, ours, theirs)) or all(map(is_same, ours, theirs)))
            for ours, theirs in pairs
        )

    def _add(self, values: Iterable[Any], seen: set[int]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self.versions.append(version(value))
            elif isinstance(value, np.ndarray) and value.size <= MOST_ITEMS:
                self.shape.append(value.tobytes())
            elif isinstance(value, _CONTAINERS) and id(value) not in seen:
                seen.add(id(value))
                self._add_items(value, seen)
                continue
            self.leaves.append(value)

    def _add_items(self, container: Any, seen: set[int]) -> None:
        self.shape += (type(container), len(container), len(self.leaves))
        if len(self.leaves) + len(container) > MOST_ITEMS:
            return
        if isinstance(container, _SETS):
            self.shape.append(frozenset(container))
            return
        if isinstance(container, _SEQUENCES):
            groups = [list(container)]
        else:
            groups = [list(container.keys()), list(container.values())]
        for values in groups:
            if _PLAIN.issuperset(map(type, values)):
                self.leaves += values
            else:
                self._add(values, seen)
