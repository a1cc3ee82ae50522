"""The jagged keys of a TensorDict as a KeyedJaggedTensor."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch.nested._internal.nested_tensor import NestedTensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from deltasync.base.errors import InvalidInput


def to_kjt(features: TensorDictBase, keys: Sequence[str], *, weighted: bool | None = None) -> KeyedJaggedTensor:
    """The ids of the named keys, in that order; other keys may hold anything.

    Args:
        features: under each key, ids of B examples: a JaggedTensor, or a nested tensor of layout torch.jagged.
        keys: which of them.
        weighted: take the weights of the ids too, which only a JaggedTensor has; refuse them if False; None leaves
            out what there are.

    Raises:
        InvalidInput: a key is missing, has no ids, no weights, or another number of examples than the others.
    """
    if not keys or len(set(keys)) < len(keys):
        raise InvalidInput(f"keys {list(keys)}: expected at least one, and each of them once")
    found = {key: _jagged(features, key) for key in keys}
    weights = [_weights(key, jagged) for key, jagged in found.items()] if weighted else None
    if weighted is False:
        _refuse_weights(found)
    lengths = _lengths(found)
    length_per_key = lengths.sum(1).tolist()
    for (key, jagged), length in zip(found.items(), length_per_key, strict=True):
        if jagged.values().numel() != length:
            raise InvalidInput(f"key {key!r}: {jagged.values().numel()} ids, and lengths that add up to {length}")
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.cat([jagged.values() for jagged in found.values()]),
        weights=torch.cat(weights) if weights else None,
        lengths=lengths.view(-1),
        stride=lengths.shape[1],
        length_per_key=length_per_key,
    )


def _jagged(features: TensorDictBase, key: str) -> JaggedTensor:
    if key not in features.keys():  # noqa: SIM118  # A TensorDict iterates over its examples.
        there = ", ".join(map(str, features.keys()))
        raise InvalidInput(f"key {key!r} is not in the TensorDict, which has {there}")
    value = features[key]  # `get` hands out a JaggedTensor in a wrapper.
    # Nested tensors are slow: all but their attributes goes through Python.
    if isinstance(value, NestedTensor) and value._values.dim() == 1:
        whole: Any = value if value._lengths is None else value.contiguous()  # A narrowed one has gaps.
        value = JaggedTensor(values=whole._values, offsets=whole._offsets)
    if not isinstance(value, JaggedTensor):
        raise InvalidInput(
            f"key {key!r}: {_described(value)}, expected ids of B examples: a JaggedTensor, or a nested tensor of "
            f"two dimensions and layout torch.jagged"
        )
    ids = value.values()
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise InvalidInput(f"key {key!r}: {_described(ids)}, expected ids: int32 or int64, one after the other")
    return value


def _lengths(found: dict[str, JaggedTensor]) -> torch.Tensor:
    """The lengths of all keys: [keys, B]."""
    lengths = [jagged.lengths_or_none() for jagged in found.values()]
    examples = [
        jagged.offsets().numel() - 1 if length is None else length.numel()
        for jagged, length in zip(found.values(), lengths, strict=True)
    ]
    _check_examples(dict(zip(found, examples, strict=True)))
    if all(length is None for length in lengths):
        return torch.diff(torch.stack([jagged.offsets() for jagged in found.values()]))
    return torch.stack([jagged.lengths() for jagged in found.values()])


def _check_examples(examples: dict[str, int]) -> None:
    first, expected = next(iter(examples.items()))
    for key, count in examples.items():
        if count != expected:
            raise InvalidInput(
                f"key {key!r} has {count} examples, key {first!r} has {expected}: features of variable batch size "
                f"need a KeyedJaggedTensor with inverse indices"
            )


def _weights(key: str, jagged: JaggedTensor) -> torch.Tensor:
    weights: torch.Tensor | None = jagged.weights_or_none()
    if weights is None:
        raise InvalidInput(f"key {key!r} has ids without weights, for tables that weight them")
    if weights.shape != jagged.values().shape:
        shape = tuple(weights.shape)
        raise InvalidInput(f"key {key!r} has {jagged.values().numel()} ids, and weights of shape {shape}")
    return weights


def _refuse_weights(found: dict[str, JaggedTensor]) -> None:
    """TorchRec's sharded modules would multiply rows by them, its unsharded ones would not."""
    for key, jagged in found.items():
        if jagged.weights_or_none() is not None:
            raise InvalidInput(f"key {key!r} has ids with weights, for tables that do not weight them")


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} with {value.dim()} dimensions and layout {value.layout}"
    return f"a {type(value).__name__}"
