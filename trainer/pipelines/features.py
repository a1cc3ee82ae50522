"""The jagged keys of a TensorDict as a KeyedJaggedTensor."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from sync_service.errors import InvalidInput


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
    lengths = {key: _lengths(jagged) for key, jagged in found.items()}
    examples = _examples(lengths)
    weights = [_weights(key, jagged) for key, jagged in found.items()] if weighted else None
    if weighted is False:
        _refuse_weights(found)
    together = torch.cat(list(lengths.values()))
    length_per_key = together.view(len(keys), examples).sum(1).tolist()
    for (key, jagged), length in zip(found.items(), length_per_key, strict=True):
        if jagged.values().numel() != length:
            raise InvalidInput(f"key {key!r}: {jagged.values().numel()} ids, and lengths that add up to {length}")
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.cat([jagged.values() for jagged in found.values()]),
        weights=torch.cat(weights) if weights else None,
        lengths=together,
        stride=examples,
        length_per_key=length_per_key,
    )


def _jagged(features: TensorDictBase, key: str) -> JaggedTensor:
    if key not in features.keys():  # noqa: SIM118  # A TensorDict iterates over its examples.
        there = ", ".join(map(str, features.keys()))
        raise InvalidInput(f"key {key!r} is not in the TensorDict, which has {there}")
    value = features[key]  # `get` hands out a JaggedTensor in a wrapper.
    if isinstance(value, torch.Tensor) and value.layout == torch.jagged and value.dim() == 2:
        whole: Any = value.contiguous()  # One that was narrowed has gaps between its values.
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


def _lengths(jagged: JaggedTensor) -> torch.Tensor:
    lengths: torch.Tensor | None = jagged.lengths_or_none()
    return torch.diff(jagged.offsets()) if lengths is None else lengths


def _examples(lengths: dict[str, torch.Tensor]) -> int:
    first, examples = next((key, length.numel()) for key, length in lengths.items())
    for key, length in lengths.items():
        if length.numel() != examples:
            raise InvalidInput(
                f"key {key!r} has {length.numel()} examples, key {first!r} has {examples}: features of variable "
                f"batch size need a KeyedJaggedTensor with inverse indices"
            )
    return examples


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
