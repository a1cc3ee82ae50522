"""TensorDicts as features of embedding modules."""

from typing import Any

from tensordict import TensorDictBase, is_tensorclass
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)

from deltasync.core.errors import InvalidInput
from deltasync.trainer.pipelines.feature_order import OrderedInputDist, refuse_tensorclass
from deltasync.trainer.pipelines.tensordict_to_kjt import to_kjt

_WITHOUT_TENSORDICTS = (
    FeatureProcessedEmbeddingBagCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
# Fused collections have these interfaces too.
_UNSHARDED = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)
_SHARDED = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)


def accept_tensordicts(model: nn.Module) -> None:
    """Let a model's embedding modules take TensorDicts, beside KeyedJaggedTensors, with their keys in any order.

    A module takes for each of its features what is under the key of that name, and ignores other keys. To be
    called after sharding; calling it twice does no harm. `OnlinePipeline` calls it for its model.
    """
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingModule):
            _accept_in_sharded(module)
        elif isinstance(module, _UNSHARDED):
            _before_forward(module, _TensorDictConversion(_keys(_configs(module)), _is_weighted(module)))
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


class _TensorDictConversion:
    """A hook before the forward of an unsharded module: TensorDicts become KeyedJaggedTensors."""

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
    """A hook before the forward of an unsharded module that does more with features than looking them up."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for features in (*args, *kwargs.values()):
            _refuse_tensordict(features, type(module).__name__)


class _KeyedInputDist:
    """The `input_dist` of a sharded module that does more with features than looking them up: no TensorDicts."""

    def __init__(self, module: Any) -> None:
        self._input_dist, self._kind = module.input_dist, type(module).__name__

    def __call__(self, ctx: Any, features: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_tensordict(features, self._kind)
        return self._input_dist(ctx, features, *args, **kwargs)


def _refuse_tensordict(features: Any, kind: str) -> None:
    if isinstance(features, TensorDictBase) or is_tensorclass(features):
        raise InvalidInput(f"a {kind} takes no TensorDict: give it `to_kjt(features, keys)`")


def _configs(module: Any) -> list[Any]:
    bags = isinstance(module, EmbeddingBagCollectionInterface)
    return list(module.embedding_bag_configs() if bags else module.embedding_configs())


def _keys(configs: list[Any]) -> list[str]:
    return list(dict.fromkeys(feature for config in configs for feature in config.feature_names))


def _is_weighted(module: Any) -> bool | None:
    """Whether a module multiplies rows by weights; None for sequences of rows, which leave weights alone."""
    if isinstance(module, EmbeddingCollectionInterface | ShardedEmbeddingCollection):
        return None
    bags = isinstance(module, EmbeddingBagCollectionInterface)
    return bool(module.is_weighted() if bags else module._is_weighted)
