"""A call that was made ahead, and whether the one that forward makes is the same."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from deltasync.trainer.pipelines.batches import Path, leaves_in, tensors_in

_JAGGED = (JaggedTensor, KeyedJaggedTensor)


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """What a module was called with, and what came out.

    Attributes:
        arguments: positional ones by number, others by name.
        result: what the module returned.
        leaves: what is within the arguments, and how often each tensor there had been written to.
        results: the tensors within the result, likewise.
    """

    arguments: dict[Any, Any]
    result: Any
    leaves: dict[Path, tuple[Any, int]]
    results: list[tuple[torch.Tensor, int]]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any = None) -> "ModuleCall":
        """Note a call that has just been made."""
        arguments = _named(args, kwargs)
        leaves = {path: (leaf, version(leaf)) for path, leaf in leaves_in(arguments)}
        results = [(tensor, version(tensor)) for _, tensor in tensors_in(result)]
        return cls(arguments, result, leaves, results)

    def why_different(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Why this call does not stand for one with these arguments; empty if it does."""
        given = _named(args, kwargs)
        if given.keys() != self.arguments.keys():
            return f"it has arguments {list(given)}, where the traced forward has {list(self.arguments)}"
        for name, value in given.items():
            if not is_same(self.arguments[name], value):
                return f"its argument {name} is not the one that the traced forward has at this place"
        return self._why_outdated()

    def _why_outdated(self) -> str:
        if any(version(tensor) != before for tensor, before in self.results):
            return "its result has been written to since"
        now = dict(leaves_in(self.arguments))
        for path, (leaf, before) in self.leaves.items():
            if not _is_untouched(leaf, now.get(path)) or version(leaf) != before:
                return f"its argument {'.'.join(map(str, path))} is written to on the way"
        return ""


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Any, Any]:
    named: dict[Any, Any] = dict(enumerate(args))
    return named | dict(kwargs)


def is_same(ahead: Any, given: Any) -> bool:
    """Whether two arguments are the same object, views of the same memory, or equal constants."""
    if ahead is given:
        return True
    if type(ahead) is not type(given):
        return False
    if isinstance(ahead, torch.Tensor):
        return _is_same_memory(ahead, given)
    if isinstance(ahead, _JAGGED):
        return _is_same_jagged(ahead, given)
    if isinstance(ahead, list | tuple):
        return len(ahead) == len(given) and all(map(is_same, ahead, given))
    if isinstance(ahead, Mapping):
        names = list(ahead.keys())  # Iterating over a TensorDict goes along its batch dimension.
        return names == list(given.keys()) and all(is_same(ahead[name], given[name]) for name in names)
    if dataclasses.is_dataclass(ahead):
        return all(is_same(getattr(ahead, f.name), getattr(given, f.name)) for f in dataclasses.fields(ahead))
    return _is_constant(ahead) and bool(ahead == given)


def _is_same_memory(ahead: torch.Tensor, given: torch.Tensor) -> bool:
    if ahead.is_nested or given.is_nested:
        return False
    return (ahead.data_ptr(), ahead.shape, ahead.stride(), ahead.dtype, ahead.device) == (
        given.data_ptr(),
        given.shape,
        given.stride(),
        given.dtype,
        given.device,
    )


def _is_same_jagged(ahead: Any, given: Any) -> bool:
    """Wrappers made anew around the same memory; offsets may be computed anew too, from the same lengths."""
    keys = isinstance(ahead, KeyedJaggedTensor) and ahead.keys() != given.keys()
    if keys or not is_same(ahead.values(), given.values()):
        return False
    return is_same(ahead.weights_or_none(), given.weights_or_none()) and is_same(ahead.lengths(), given.lengths())


def _is_constant(value: Any) -> bool:
    plain = (int, float, complex, str, bytes, bool, type(None), slice, range, frozenset, set)
    return isinstance(value, (*plain, torch.dtype, torch.device, torch.layout, torch.memory_format))


def _is_untouched(before: Any, now: Any) -> bool:
    return now is before if isinstance(before, torch.Tensor) else is_same(before, now)


def version(value: Any) -> int:
    """How often a tensor has been written to, as far as it keeps count; 0 of anything else."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0
