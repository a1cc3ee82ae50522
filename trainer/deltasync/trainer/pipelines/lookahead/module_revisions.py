"""What a preprocessing module's results depend on, beside its arguments."""

import operator
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

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
_OF_TORCH = frozenset(vars(nn.Module()))


class ModuleRevisions:
    """Numbers the states that others bring a module into; what it does to itself is part of its calls.

    Seen are changes of its attributes, of the items of containers in them (dicts, lists, tuples, deques and sets,
    nested too), and writes to tensors there. Not seen are changes of single items beyond the first `MOST_ITEMS`,
    those within objects of other kinds, and those made while the module is called by way of its own forward, where
    they may be its own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._state, self._revision = _State.of(module), 0

    def current(self) -> int:
        """The number of the state that the module is in."""
        state = _State.of(self._module)
        if not state.is_same(self._state):
            self._state, self._revision = state, self._revision + 1
        return self._revision

    def called(self) -> None:
        """The module has just been called."""
        self._state = _State.of(self._module)


@dataclass(eq=False)
class _State:
    """The attributes of a module and of those within, taken apart.

    Attributes:
        shape: type and size of each container, and before which leaf it begins; copies of sets.
        leaves: everything that is no container.
        versions: how often each tensor among these has been written to.
    """

    shape: list[Any] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, module: nn.Module) -> "_State":
        state, seen = cls(), set[int]()
        for one in module.modules():
            for name, value in vars(one).items():
                if name in _OF_TORCH:
                    state.leaves.append(value)
                elif name != "forward":
                    state._add([value], seen)
        state.leaves += module.buffers()
        return state

    def is_same(self, other: "_State") -> bool:
        if self.shape != other.shape or self.versions != other.versions or len(self.leaves) != len(other.leaves):
            return False
        # Mostly nothing has changed, which is seen without a call for each.
        return all(map(operator.is_, self.leaves, other.leaves)) or all(map(is_same, self.leaves, other.leaves))

    def _add(self, values: Iterable[Any], seen: set[int]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self.versions.append(version(value))
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
