"""Small sharded models, and batches for them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ROWS, DIM = 16, 4
CPU, META = torch.device("cpu"), torch.device("meta")
# What a table is called in the `state_dict` of a model with a collection "bags" or "sequences".
BAGS, SEQUENCES = "bags.embedding_bags", "sequences.embeddings"

_COLLIDED = ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection


def bag(name: str, *features: str, rows: int = ROWS, dim: int = DIM, **options: Any) -> EmbeddingBagConfig:
    """A table whose rows are pooled; its feature has its name, if none are named."""
    names = list(features) or [name]
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=names, **options)


def bags(*tables: str | EmbeddingBagConfig) -> EmbeddingBagCollection:
    configs = [bag(table) if isinstance(table, str) else table for table in tables]
    return EmbeddingBagCollection(tables=configs, device=META)


def sequence(name: str, *features: str, rows: int = ROWS, dim: int = DIM, **options: Any) -> EmbeddingConfig:
    names = list(features) or [name]
    return EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=names, **options)


def sequences(*tables: str | EmbeddingConfig) -> EmbeddingCollection:
    configs = [sequence(table) if isinstance(table, str) else table for table in tables]
    return EmbeddingCollection(tables=configs, device=META)


def collided(
    *tables: EmbeddingBagConfig | EmbeddingConfig,
    policy: Callable[[], Any] = DistanceLFU_EvictionPolicy,
    every: int = 1,
    **options: Any,
) -> nn.Module:
    """Tables of one kind behind managed collision, which may evict ids at intervals of batches."""
    remappings = {
        table.name: MCHManagedCollisionModule(
            zch_size=table.num_embeddings,
            device=CPU,
            eviction_policy=policy(),
            eviction_interval=every,
            **options,
        )
        for table in tables
    }
    collisions = ManagedCollisionCollection(remappings, list(tables))
    module: nn.Module = (
        ManagedCollisionEmbeddingBagCollection(bags(*tables), collisions)
        if isinstance(tables[0], EmbeddingBagConfig)
        else ManagedCollisionEmbeddingCollection(sequences(*tables), collisions)
    )
    return module


class Model(nn.Module):
    """Adds up all that it looks up: every row looked up changes, by the same in all its columns."""

    def __init__(self, collections: Mapping[str, nn.Module], *, dense: bool = False) -> None:
        super().__init__()
        for name, collection in collections.items():
            self.add_module(name, collection)
        self._features = {name: _features_of(collection) for name, collection in collections.items()}
        self._collided = {name for name, collection in collections.items() if isinstance(collection, _COLLIDED)}
        self.dense = nn.Linear(1, 1) if dense else None

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = []
        for name, sequence_features in self._features.items():
            found = getattr(self, name)(features)
            found = found[0] if name in self._collided else found
            if sequence_features:
                parts += [found[feature].values().sum() for feature in sequence_features]
            else:
                parts.append(found.values().sum())
        loss = torch.stack(parts).sum()
        if self.dense is not None:
            loss = self.dense(loss.view(1, 1)).sum()
        return loss, loss.detach()


def _features_of(collection: Any) -> list[str]:
    """Those of a collection whose rows are not pooled."""
    inner = getattr(collection, "_embedding_module", collection)
    if not isinstance(inner, EmbeddingCollection):
        return []
    return [feature for config in inner.embedding_configs() for feature in config.feature_names]


def sharded(
    collections: Mapping[str, nn.Module],
    sharding: Mapping[str, Any] | None = None,
    *,
    optimizer: EmbOptimType = EmbOptimType.EXACT_SGD,
    dense: bool = False,
    **fused: Any,
) -> DistributedModelParallel:
    """A model of these collections, sharded as told for each table; those left out are whole, on rank 0."""
    return distributed(Model(collections, dense=dense), sharding or {}, optimizer, **fused)


def distributed(
    model: nn.Module,
    sharding: Mapping[str, Any],
    optimizer: EmbOptimType,
    group: dist.ProcessGroup | None = None,
    **fused: Any,
) -> DistributedModelParallel:
    sharders = sharders_of({"optimizer": optimizer, "learning_rate": 0.5} | fused)
    plan = {
        name: _planned(module, sharders[type(module)], sharding, dist.get_world_size(group))
        for name, module in model.named_modules()
        if type(module) in sharders
    }
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(group or dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan(plan=plan),
        sharders=list(sharders.values()),
    )


def sharders_of(fused: dict[str, Any]) -> dict[type[nn.Module], Any]:
    """Those of each kind of module, with such parameters of fused tables."""
    bags, sequences = EmbeddingBagCollectionSharder(fused), EmbeddingCollectionSharder(fused)
    return {
        EmbeddingBagCollection: bags,
        EmbeddingCollection: sequences,
        FeatureProcessedEmbeddingBagCollection: FeatureProcessedEmbeddingBagCollectionSharder(bags),
        ManagedCollisionEmbeddingBagCollection: ManagedCollisionEmbeddingBagCollectionSharder(bags),
        ManagedCollisionEmbeddingCollection: ManagedCollisionEmbeddingCollectionSharder(sequences),
    }


def _planned(module: nn.Module, sharder: Any, sharding: Mapping[str, Any], ranks: int) -> Any:
    whole = table_wise(rank=0, compute_kernel="fused")
    tables = {name: sharding.get(name, whole) for name in sharder.shardable_parameters(module)}
    return construct_module_sharding_plan(
        module, tables, sharder, local_size=ranks, world_size=ranks, device_type="cpu"
    )


def lookups_of(model: nn.Module) -> Iterator[Any]:
    """What TorchRec has look rows up, one for each sharding type of each collection."""
    for module in model.modules():
        yield from getattr(module, "_lookups", ())


def kernels_of(model: nn.Module) -> Iterator[Any]:
    """What FBGEMM has hold the rows, and change them."""
    for lookup in lookups_of(model):
        for kernel in lookup._emb_modules:
            yield kernel.emb_module


def lookups(**ids: list[int]) -> KeyedJaggedTensor:
    """A batch of one sample: the ids of each feature."""
    values = torch.tensor([one for some in ids.values() for one in some], dtype=torch.int64)
    lengths = torch.tensor([len(some) for some in ids.values()], dtype=torch.int32)
    return KeyedJaggedTensor(keys=list(ids), values=values, lengths=lengths)


def train(model: nn.Module, **ids: list[int]) -> None:
    """Forward and backward, which is where the rows of fused tables change."""
    loss, _ = model(lookups(**ids))
    loss.backward()
