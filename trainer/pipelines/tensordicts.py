"""TensorDicts as features of embedding modules, and as batches of pipelines.

TorchRec takes a TensorDict's keys by position, in the order in which the first batch had them, and remembers from
then on whether features have to be reordered. Here they are put in the order of a module's first batch by name.
"""

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from sync_service.errors import InvalidInput
from trainer.pipelines.features import to_kjt

_SHARDED = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)


def accept_tensordicts(model: nn.Module) -> None:
    """Let a model's embedding modules take TensorDicts, beside KeyedJaggedTensors, with their keys in any order.

    For each of its features, a module takes what is under the key of that name; it does not look at other keys.
    Pipelines of this package do this for their model. After sharding; doing it twice changes nothing.
    """
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingModule):
            _accept_in_sharded(module)
        elif isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            _accept_in_unsharded(module)


def _accept_in_unsharded(module: EmbeddingBagCollection | EmbeddingCollection) -> None:
    if any(isinstance(hook, _Unsharded) for hook in module._forward_pre_hooks.values()):
        return
    module.register_forward_pre_hook(_Unsharded(_keys(_configs(module)), _is_weighted(module)), with_kwargs=True)


def _accept_in_sharded(module: Any) -> None:
    if "input_dist" in vars(module):
        return
    take: _Sharded | _NoTensorDicts = _Sharded(module) if isinstance(module, _SHARDED) else _NoTensorDicts(module)
    module.input_dist = take


class _Unsharded:
    """Before the forward of an unsharded module."""

    def __init__(self, keys: list[str], weighted: bool) -> None:
        self._keys, self._weighted = keys, weighted

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(self._taken, args)), {name: self._taken(value) for name, value in kwargs.items()}

    def _taken(self, features: Any) -> Any:
        if not isinstance(features, TensorDictBase):
            return features
        return to_kjt(features, self._keys, weighted=self._weighted)


class _NoTensorDicts:
    """In the place of the `input_dist` of a module that does more with its features than looking them up."""

    def __init__(self, module: Any) -> None:
        self._input_dist, self._kind = module.input_dist, type(module).__name__

    def __call__(self, ctx: Any, features: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(features, TensorDictBase):
            raise InvalidInput(f"a {self._kind} takes no TensorDict: give it `to_kjt(features, keys)`")
        return self._input_dist(ctx, features, *args, **kwargs)


class _Sharded:
    """In the place of a sharded module's `input_dist`, which knows features by their place in its first batch."""

    def __init__(self, module: Any) -> None:
        self._module, self._input_dist = module, module.input_dist
        self._weighted = _is_weighted(module)
        self._needed = list(dict.fromkeys(_features_by_sharding(module)))
        self._order = None if module._has_uninitialized_input_dist else _order_of_first(module)
        self._permutations: dict[tuple[str, ...], tuple[list[int], torch.Tensor]] = {}

    def __call__(self, ctx: Any, features: KeyedJaggedTensor | TensorDictBase) -> Any:
        return self._input_dist(ctx, self._in_order(features))

    def _in_order(self, features: KeyedJaggedTensor | TensorDictBase) -> KeyedJaggedTensor:
        if self._order is None and self._module._has_uninitialized_input_dist:
            self._order = self._first_order(features)
        if isinstance(features, TensorDictBase):
            return to_kjt(features, self._known_order(), weighted=self._weighted)
        if self._order is None or features.keys() == self._order:
            return features
        return self._permuted(features, self._order)

    def _first_order(self, features: KeyedJaggedTensor | TensorDictBase) -> list[str]:
        """As a batch has them, unless it has others too; as the module needs them then."""
        if isinstance(features, TensorDictBase):
            return self._needed
        keys: list[str] = features.keys()
        return keys if features.variable_stride_per_key() or set(keys) == set(self._needed) else self._needed

    def _known_order(self) -> list[str]:
        if self._order is None:
            raise InvalidInput(
                "a module that was given a KeyedJaggedTensor with keys that it does not need cannot take a "
                "TensorDict later: call accept_tensordicts before the first batch"
            )
        return self._order

    def _permuted(self, features: KeyedJaggedTensor, order: list[str]) -> KeyedJaggedTensor:
        keys = features.keys()
        missing = [key for key in order if key not in keys]
        if missing:
            raise InvalidInput(f"keys {missing} are not in the KeyedJaggedTensor, which has {keys}")
        if features.variable_stride_per_key():
            raise InvalidInput(f"features of variable batch size have keys {keys}, in the first batch {order}")
        indices = [keys.index(key) for key in order]
        places = self._permutations.get(tuple(keys))
        if places is None:
            places = indices, torch.tensor(indices, dtype=torch.int32, device=features.device())
            self._permutations = {tuple(keys): places}
        return features.permute(*places)


def _features_by_sharding(module: Any) -> list[str]:
    """The features of a sharded module in the order in which it sends them out; shared ones several times."""
    bags = isinstance(module, ShardedEmbeddingBagCollection)
    shardings = module._embedding_shardings if bags else module._sharding_type_to_sharding.values()
    return [feature for sharding in shardings for feature in sharding.feature_names()]


def _order_of_first(module: Any) -> list[str] | None:
    """The keys of the first batch of a module that has had one; None where it had keys that are not needed."""
    needed = _features_by_sharding(module)
    places: list[int] = module._features_order
    if not places:
        return needed
    by_place = dict(zip(places, needed, strict=True))
    return [by_place[place] for place in range(len(by_place))] if max(by_place) < len(by_place) else None


def _configs(module: EmbeddingBagCollection | EmbeddingCollection) -> list[Any]:
    bags = isinstance(module, EmbeddingBagCollection)
    return list(module.embedding_bag_configs() if bags else module.embedding_configs())


def _keys(configs: list[Any]) -> list[str]:
    return list(dict.fromkeys(feature for config in configs for feature in config.feature_names))


def _is_weighted(module: Any) -> bool:
    """Whether a module multiplies rows by weights; sequences of rows have none."""
    if isinstance(module, EmbeddingCollection | ShardedEmbeddingCollection):
        return False
    return bool(module.is_weighted() if isinstance(module, EmbeddingBagCollection) else module._is_weighted)
