"""Records calls made ahead of forward, to compare them with the calls that forward makes."""

import dataclasses
import operator
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from deltasync.trainer.pipelines.batches import Path, leaves_in, tensors_in

_JAGGED = (JaggedTensor, KeyedJaggedTensor)
_PLAIN_TYPES = (int, float, complex, str, bytes, bool, type(None), slice, range, frozenset, set)
_CONSTANTS = (*_PLAIN_TYPES, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """A call of a module: arguments and result."""

    arguments: dict[Any, Any]  # Positional arguments by number, keyword arguments by name.
    result: Any  # The result.
    # The leaves of the arguments, each with its version (the number of writes to a tensor).
    leaves: dict[Path, tuple[Any, int]]
    results: list[tuple[torch.Tensor, int]]  # The tensors inside the result, each with its version.

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any = None) -> "ModuleCall":
        """Record a call that has just been made."""
        arguments = _named(args, kwargs)
        leaves = {path: (leaf, version(leaf)) for path, leaf in leaves_in(arguments)}
        results = [(tensor, version(tensor)) for _, tensor in tensors_in(result)]
        return cls(arguments, result, leaves, results)

    def why_different(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Why this call differs from one with these arguments; empty if it does not."""
        named = _named(args, kwargs)
        if named.keys() != self.arguments.keys():
            return f"it has arguments {list(named)}, where the traced forward has {list(self.arguments)}"
        for name, value in named.items():
            if not is_same(self.arguments[name], value):
                return f"its argument {name} is not the one that the traced forward has at this place"
        return self._why_outdated()

    def _why_outdated(self) -> str:
        if any(version(tensor) != before for tensor, before in self.results):
            return "its result has been written to since"
        now = dict(leaves_in(self.arguments))
        for path, (leaf, before) in self.leaves.items():
            other = now.get(path)
            untouched = other is leaf if isinstance(leaf, torch.Tensor) else is_same(leaf, other)
            if not untouched or version(leaf) != before:
                return f"its argument {'.'.join(map(str, path))} is written to on the way"
        return ""


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Any, Any]:
    named: dict[Any, Any] = dict(enumerate(args))
    return named | dict(kwargs)


def is_same(ahead: Any, value: Any) -> bool:
    """Whether two arguments are the same object, views of the same memory, or equal constants."""
    if ahead is value:
        return True
    if type(ahead) is not type(value):
        return False
    if isinstance(ahead, torch.Tensor):
        if ahead.is_nested or value.is_nested:
            return False
        ours, theirs = ((t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in (ahead, value))
        return ours == theirs
    if isinstance(ahead, _JAGGED):
        # Compare the memory, because wrappers may be new and offsets computed again from the same lengths.
        keys = isinstance(ahead, KeyedJaggedTensor) and ahead.keys() != value.keys()
        parts = ((each.values(), each.weights_or_none(), each.lengths()) for each in (ahead, value))
        return not keys and all(map(is_same, *parts))
    if isinstance(ahead, list | tuple):
        return len(ahead) == len(value) and all(map(is_same, ahead, value))
    if isinstance(ahead, Mapping):
        names = list(ahead.keys())  # Iteration over a TensorDict yields examples, not keys.
        return names == list(value.keys()) and all(is_same(ahead[name], value[name]) for name in names)
    if dataclasses.is_dataclass(ahead):
        return all(is_same(getattr(ahead, f.name), getattr(value, f.name)) for f in dataclasses.fields(ahead))
    return isinstance(ahead, _CONSTANTS) and bool(ahead == value)


def version(value: Any) -> int:
    """The number of writes to a tensor; 0 for inference tensors and other objects, which do not count them."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


MOST_ITEMS = 1_000
"""Maximum number of container items of a module to compare at every step; beyond it, only sizes are compared."""
_PLAIN = frozenset({int, float, bool, complex, str, bytes, type(None)})
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
_CONTAINERS = (dict, *_SEQUENCES, *_SETS)
# Attributes that torch gives to every module. Hooks may come and go, and buffers are compared separately.
OF_TORCH = frozenset(vars(nn.Module()))


@dataclass(eq=False)
class ModuleState:
    """A snapshot of the attributes and buffers of a module and its submodules, cheap enough for every step.

    Two states differ if an attribute was replaced, if an item of a container changed (dicts, lists, tuples,
    deques, sets and arrays, also nested), or if a tensor was written to. This does not detect changes of single
    items beyond the first `MOST_ITEMS`, or inside other objects.
    """

    # Type, size and position among the leaves of each container, and copies of sets and arrays.
    shape: list[Any] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)  # All values that are not containers.
    of_torch: list[Any] = field(default_factory=list)  # The attributes that torch gives to every module.
    versions: list[int] = field(default_factory=list)  # The number of writes to each tensor.

    @classmethod
    def of(cls, module: nn.Module) -> "ModuleState":
        """The current state of a module."""
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
        """Whether two states of one module are equal, as far as this detects changes."""
        if self.shape != other.shape or self.versions != other.versions:
            return False
        pairs = ((self.leaves, other.leaves), (self.of_torch, other.of_torch))
        # Usually nothing has changed, and `operator.is_` finds that without a Python call per leaf.
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
