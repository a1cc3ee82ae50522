"""Lets embedding modules take their features from TensorDicts."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import nn
from torch.nested._internal.nested_tensor import NestedTensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from deltasync.base.errors import InvalidInput

_WITHOUT_TENSORDICTS = (
    FeatureProcessedEmbeddingBagCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
# Fused collections have these interfaces too.
_UNSHARDED = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)
_SHARDED = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)


def accept_tensordicts(model: nn.Module) -> None:
    """Let a model's embedding modules accept TensorDicts as well as KeyedJaggedTensors, with keys in any order.

    A module reads each of its features under the key of that name, and ignores other keys. Call this after
    sharding; a second call changes nothing. `OnlinePipeline` calls it for its model.
    """
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingModule):
            _accept_in_sharded(module)
        elif isinstance(module, _UNSHARDED):
            bags = isinstance(module, EmbeddingBagCollectionInterface)
            configs: Any = module.embedding_bag_configs() if bags else module.embedding_configs()
            keys = list(dict.fromkeys(feature for config in configs for feature in config.feature_names))
            _before_forward(module, _TensorDictConversion(keys, _is_weighted(module)))
        elif isinstance(module, _WITHOUT_TENSORDICTS):
            _before_forward(module, _TensorDictRefusal())


def _before_forward(module: nn.Module, hook: Any) -> None:
    if not any(isinstance(other, type(hook)) for other in module._forward_pre_hooks.values()):
        module.register_forward_pre_hook(hook, with_kwargs=True)


def _accept_in_sharded(module: Any) -> None:
    if "input_dist" in vars(module):
        return
    looks_up = isinstance(module, _SHARDED)
    module.input_dist = (
        OrderedInputDist(module, weighted=_is_weighted(module)) if looks_up else _KeyedInputDist(module)
    )


class OrderedInputDist:
    """Replaces the `input_dist` of a sharded module, and passes it features in the order that it expects."""

    def __init__(self, module: Any, *, weighted: bool | None) -> None:
        """Wrap the `input_dist` before or after the module's first batch; `weighted` is as in `to_kjt`."""
        self._input_dist, self._weighted = module.input_dist, weighted
        self._needed = list(dict.fromkeys(_features_by_sharding(module)))
        self._order = None if module._has_uninitialized_input_dist else _order_of_first(module)
        if self._order is None and not module._has_uninitialized_input_dist:
            self._order = self._needed
            _expect(module, self._needed)
        self._permutations: dict[tuple[str, ...], tuple[list[int], torch.Tensor]] = {}

    def __call__(self, ctx: Any, features: KeyedJaggedTensor | TensorDictBase) -> Any:
        """Send the features out, in the module's order."""
        return self._input_dist(ctx, self._in_order(features))

    def _in_order(self, features: KeyedJaggedTensor | TensorDictBase) -> KeyedJaggedTensor:
        refuse_tensorclass(features)
        if self._order is None:
            self._order = self._first_order(features)
        if isinstance(features, TensorDictBase):
            return to_kjt(features, self._order, weighted=self._weighted)
        if features.keys() == self._order:
            return features
        return self._permuted(features, self._order)

    def _first_order(self, features: KeyedJaggedTensor | TensorDictBase) -> list[str]:
        """The order of the first batch, or the module's own order if that batch has other features too."""
        if isinstance(features, TensorDictBase):
            return self._needed
        keys: list[str] = features.keys()
        return keys if features.variable_stride_per_key() or set(keys) == set(self._needed) else self._needed

    def _permuted(self, features: KeyedJaggedTensor, order: list[str]) -> KeyedJaggedTensor:
        keys = tuple(features.keys())
        if features.variable_stride_per_key():
            raise InvalidInput(f"features of variable batch size have keys {keys}, in the first batch {order}")
        if missing := [key for key in order if key not in keys]:
            raise InvalidInput(f"keys {missing} are not in the KeyedJaggedTensor, which has {keys}")
        if keys not in self._permutations:
            places = [keys.index(key) for key in order]
            on_device = torch.tensor(places, dtype=torch.int32, device=features.device())
            self._permutations = {keys: (places, on_device)}  # Only keep the last one: there may be many orders.
        return features.permute(*self._permutations[keys])


def _features_by_sharding(module: Any) -> list[str]:
    """The features of a sharded module in the order in which it sends them; shared features appear repeatedly."""
    bags = isinstance(module, ShardedEmbeddingBagCollection)
    shardings = module._embedding_shardings if bags else module._sharding_type_to_sharding.values()
    return [feature for sharding in shardings for feature in sharding.feature_names()]


def _order_of_first(module: Any) -> list[str] | None:
    """The keys of the first batch that a module has had; None if the batch had keys that it does not need."""
    needed = _features_by_sharding(module)
    places: list[int] = module._features_order
    if not places:
        return needed
    by_place = dict(zip(places, needed, strict=True))
    return [by_place[place] for place in range(len(by_place))] if max(by_place) < len(by_place) else None


def _expect(module: Any, order: list[str]) -> None:
    """Make a module expect its features in this order instead of the order of its first batch."""
    places = [order.index(feature) for feature in _features_by_sharding(module)]
    module._features_order, module._has_features_permute = places, True
    module._features_order_tensor = torch.tensor(places, dtype=torch.int32, device=module._device)


class _KeyedInputDist:
    """Makes the `input_dist` of a sharded module refuse TensorDicts, if it does more than look up features."""

    def __init__(self, module: Any) -> None:
        self._input_dist, self._kind = module.input_dist, type(module).__name__

    def __call__(self, ctx: Any, features: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_tensordict(features, self._kind)
        return self._input_dist(ctx, features, *args, **kwargs)


class _TensorDictConversion:
    """A forward pre-hook of an unsharded module that converts TensorDicts to KeyedJaggedTensors."""

    def __init__(self, keys: list[str], weighted: bool | None) -> None:
        self._keys, self._weighted = keys, weighted

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(self._converted, args)), {name: self._converted(value) for name, value in kwargs.items()}

    def _converted(self, features: Any) -> Any:
        refuse_tensorclass(features)
        if not isinstance(features, TensorDictBase):
            return features
        return to_kjt(features, self._keys, weighted=self._weighted)


class _TensorDictRefusal:
    """Makes an unsharded module refuse TensorDicts, if it does more than look up features (a forward pre-hook)."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for features in (*args, *kwargs.values()):
            _refuse_tensordict(features, type(module).__name__)


def _refuse_tensordict(features: Any, kind: str) -> None:
    if isinstance(features, TensorDictBase) or is_tensorclass(features):
        raise InvalidInput(f"a {kind} takes no TensorDict: give it `to_kjt(features, keys)`")


def refuse_tensorclass(features: Any) -> None:
    """Refuse a tensorclass, which only some modules treat as a TensorDict."""
    if is_tensorclass(features):
        raise InvalidInput(f"{type(features).__name__} is a tensorclass: pass its `to_tensordict()`")


def _is_weighted(module: Any) -> bool | None:
    """Whether a module multiplies rows by weights; None for modules without pooling, which ignore weights."""
    if isinstance(module, EmbeddingCollectionInterface | ShardedEmbeddingCollection):
        return None
    bags = isinstance(module, EmbeddingBagCollectionInterface)
    return bool(module.is_weighted() if bags else module._is_weighted)


def to_kjt(features: TensorDictBase, keys: Sequence[str], *, weighted: bool | None = None) -> KeyedJaggedTensor:
    """Convert the named keys of a TensorDict to a KeyedJaggedTensor, in that order.

    Args:
        features: ids of B examples under each key, as a JaggedTensor or a nested tensor of layout torch.jagged.
            Other keys may have any value.
        keys: the features to convert.
        weighted: True also converts the weights of the ids, which only a JaggedTensor has; False refuses weights;
            None ignores them.

    Raises:
        InvalidInput: a key is missing, has no ids or no weights, or differs from the others in its number of
            examples.
    """
    if not keys or len(set(keys)) < len(keys):
        raise InvalidInput(f"keys {list(keys)}: expected at least one key, and no key twice")
    features_by_key = {key: _jagged(features, key) for key in keys}
    weights = [_weights(key, jagged) for key, jagged in features_by_key.items()] if weighted else None
    for key, jagged in features_by_key.items():
        # TorchRec's sharded modules would apply the weights, and its unsharded ones would not.
        if weighted is False and jagged.weights_or_none() is not None:
            raise InvalidInput(f"key {key!r} has ids with weights, for tables that do not weight them")
    lengths = _lengths(features_by_key)
    length_per_key = lengths.sum(1).tolist()
    for (key, jagged), length in zip(features_by_key.items(), length_per_key, strict=True):
        if jagged.values().numel() != length:
            raise InvalidInput(f"key {key!r}: {jagged.values().numel()} ids, but lengths that add up to {length}")
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.cat([jagged.values() for jagged in features_by_key.values()]),
        weights=torch.cat(weights) if weights else None,
        lengths=lengths.view(-1),
        stride=lengths.shape[1],
        length_per_key=length_per_key,
    )


def _jagged(features: TensorDictBase, key: str) -> JaggedTensor:
    if key not in features.keys():  # noqa: SIM118  # A TensorDict iterates over its examples.
        there = ", ".join(map(str, features.keys()))
        raise InvalidInput(f"key {key!r} is not in the TensorDict, which has {there}")
    value = features[key]  # `get` returns a JaggedTensor in a wrapper.
    # Nested tensors are slow: all but their attributes goes through Python.
    if isinstance(value, NestedTensor) and value._values.dim() == 1:
        whole: Any = value if value._lengths is None else value.contiguous()  # A narrowed tensor has gaps.
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


def _lengths(by_key: dict[str, JaggedTensor]) -> torch.Tensor:
    """The lengths of all keys: [keys, B]."""
    lengths = [jagged.lengths_or_none() for jagged in by_key.values()]
    examples = [
        jagged.offsets().numel() - 1 if length is None else length.numel()
        for jagged, length in zip(by_key.values(), lengths, strict=True)
    ]
    for key, count in zip(by_key, examples, strict=True):
        if count != examples[0]:
            raise InvalidInput(
                f"key {key!r} has {count} examples, key {next(iter(by_key))!r} has {examples[0]}: features of "
                f"variable batch size need a KeyedJaggedTensor with inverse indices"
            )
    if all(length is None for length in lengths):
        return torch.diff(torch.stack([jagged.offsets() for jagged in by_key.values()]))
    return torch.stack([jagged.lengths() for jagged in by_key.values()])


def _weights(key: str, jagged: JaggedTensor) -> torch.Tensor:
    weights: torch.Tensor | None = jagged.weights_or_none()
    if weights is None:
        raise InvalidInput(f"key {key!r} has ids without weights, for tables that weight them")
    if weights.shape != jagged.values().shape:
        shape = tuple(weights.shape)
        raise InvalidInput(f"key {key!r} has {jagged.values().numel()} ids, and weights of shape {shape}")
    return weights


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} with {value.dim()} dimensions and layout {value.layout}"
    return f"a {type(value).__name__}"
