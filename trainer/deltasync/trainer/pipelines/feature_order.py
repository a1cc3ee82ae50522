"""Features in the order in which a sharded module expects them.

TorchRec takes features by position, in the order that a module's first batch had, and decides at that batch
whether they have to be reordered. It takes the keys of a TensorDict by position too. Here features are put in that
order by their names.
"""

from typing import Any

import torch
from tensordict import TensorDictBase, is_tensorclass
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.core.errors import InvalidInput
from deltasync.trainer.pipelines.tensordict_to_kjt import to_kjt


class OrderedInputDist:
    """Takes the place of a sharded module's `input_dist`, and hands it features in the order that it expects."""

    def __init__(self, module: Any, *, weighted: bool | None) -> None:
        """Take the place, before or after the module's first batch; `weighted` as in `to_kjt`."""
        self._input_dist, self._weighted = module.input_dist, weighted
        self._needed = list(dict.fromkeys(_features_by_sharding(module)))
        self._order = None if module._has_uninitialized_input_dist else _order_of_first(module)
        if self._order is None and not module._has_uninitialized_input_dist:
            self._order = self._needed
            _expect(module, self._needed)
        self._permutations: dict[tuple[str, ...], tuple[list[int], torch.Tensor]] = {}

    def __call__(self, ctx: Any, features: KeyedJaggedTensor | TensorDictBase) -> Any:
        """Send the features out, in the module's order.

        Raises:
            InvalidInput: a feature is missing, or does not consist of ids.
        """
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
        """As the first batch has them; if that has others too, as the module needs them."""
        if isinstance(features, TensorDictBase):
            return self._needed
        keys: list[str] = features.keys()
        return keys if features.variable_stride_per_key() or set(keys) == set(self._needed) else self._needed

    def _permuted(self, features: KeyedJaggedTensor, order: list[str]) -> KeyedJaggedTensor:
        keys = tuple(features.keys())
        if features.variable_stride_per_key():
            raise InvalidInput(f"features of variable batch size have keys {keys}, in the first batch {order}")
        if keys not in self._permutations:
            places = [keys.index(key) for key in _all_in(keys, order)]
            on_device = torch.tensor(places, dtype=torch.int32, device=features.device())
            self._permutations = {keys: (places, on_device)}  # The last order alone: there may be many.
        return features.permute(*self._permutations[keys])


def _all_in(keys: tuple[str, ...], order: list[str]) -> list[str]:
    missing = [key for key in order if key not in keys]
    if missing:
        raise InvalidInput(f"keys {missing} are not in the KeyedJaggedTensor, which has {keys}")
    return order


def refuse_tensorclass(features: Any) -> None:
    """Some modules take a tensorclass for a TensorDict and some do not: refuse it before any of them."""
    if is_tensorclass(features):
        raise InvalidInput(f"{type(features).__name__} is a tensorclass: give its `to_tensordict()`")


def _features_by_sharding(module: Any) -> list[str]:
    """The features of a sharded module in the order in which it sends them out; shared ones several times."""
    bags = isinstance(module, ShardedEmbeddingBagCollection)
    shardings = module._embedding_shardings if bags else module._sharding_type_to_sharding.values()
    return [feature for sharding in shardings for feature in sharding.feature_names()]


def _order_of_first(module: Any) -> list[str] | None:
    """The keys of a module's first batch, which is over; None if that had keys that are not needed."""
    needed = _features_by_sharding(module)
    places: list[int] = module._features_order
    if not places:
        return needed
    by_place = dict(zip(places, needed, strict=True))
    return [by_place[place] for place in range(len(by_place))] if max(by_place) < len(by_place) else None


def _expect(module: Any, order: list[str]) -> None:
    """Have a module expect its features in this order, not in that of its first batch."""
    places = [order.index(feature) for feature in _features_by_sharding(module)]
    module._features_order, module._has_features_permute = places, True
    module._features_order_tensor = torch.tensor(places, dtype=torch.int32, device=module._device)
