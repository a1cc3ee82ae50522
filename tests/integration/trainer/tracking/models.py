"""Small models of every sharding type and variety, on gloo ranks."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.torchrec_defects.models import META, collided, sharders_of
from tests.integration.trainer.tracking.batches import LONGEST, Batch
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import ParameterShardingGenerator, construct_module_sharding_plan
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_modules import MCHManagedCollisionModule
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

# Below what ids are that managed collision maps to rows.
RAW_IDS = 60


@dataclass(frozen=True)
class TableSpec:
    """A table, how it is sharded, and the features looked up in it. Without an optimizer: row-wise Adagrad."""

    sharding: ParameterShardingGenerator
    rows: int
    features: tuple[str, ...]
    dim: int = 8
    pooling: PoolingType = PoolingType.SUM
    dtype: DataType = DataType.FP32
    optimizer: type[torch.optim.Optimizer] | None = None


Tables = Mapping[str, TableSpec]


@dataclass(frozen=True)
class Part:
    """An embedding module: its tables, how it is made, and what is trained of its output."""

    tables: Tables
    make: Callable[[], nn.Module]
    values: Callable[[Any], torch.Tensor]


def adam(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


@dataclass(frozen=True)
class Case:
    """A model to be trained.

    Attributes:
        parts: its embedding modules by FQN.
        dense: it has parameters outside of tables.
        weighted: ids have weights.
        variable: features have batch sizes of their own.
        raw_ids: ids are mapped to rows by managed collision.
        optimizer: of what is not updated in backward.
        ranks: how many it is for.
    """

    parts: Mapping[str, Part]
    dense: bool = True
    weighted: bool = False
    variable: bool = False
    raw_ids: bool = False
    optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer] = adam
    ranks: int = 2

    @property
    def tables(self) -> list[TableSpec]:
        return [spec for part in self.parts.values() for spec in part.tables.values()]

    @property
    def ids(self) -> dict[str, int]:
        """What the ids of each feature are below: they are rows of every table that it is looked up in."""
        below: dict[str, int] = {}
        for spec in self.tables:
            for feature in spec.features:
                below[feature] = RAW_IDS if self.raw_ids else min(spec.rows, below.get(feature, spec.rows))
        return below


def bags(tables: Tables, *, weighted: bool = False) -> Part:
    return Part(tables, partial(_bags, tables, weighted=weighted), _pooled)


def sequences(tables: Tables) -> Part:
    return Part(tables, partial(_sequences, tables), lambda output: _together(output))


def processed(tables: Tables) -> Part:
    """Each id is weighted by its position."""
    return Part(tables, partial(_processed, tables), _pooled)


def collision_bags(tables: Tables, eviction_interval: int) -> Part:
    make = partial(_collided, _bag_configs(tables), eviction_interval)
    return Part(tables, make, lambda output: _pooled(output[0]))


def collision_sequences(tables: Tables, eviction_interval: int) -> Part:
    make = partial(_collided, _sequence_configs(tables), eviction_interval)
    return Part(tables, make, lambda output: _together(output[0]))


def _pooled(output: Any) -> torch.Tensor:
    values: torch.Tensor = output.values()
    return values


@torch.fx.wrap  # Pipelines trace models, with nothing to go over. To be called by its name.
def _together(output: Any) -> torch.Tensor:
    return torch.cat([jagged.values().flatten() for jagged in output.values()])


def _bags(tables: Tables, *, weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=_bag_configs(tables), device=META, is_weighted=weighted)


def _bag_configs(tables: Tables) -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(**_config(name, spec), pooling=spec.pooling) for name, spec in tables.items()]


def _sequences(tables: Tables) -> EmbeddingCollection:
    return EmbeddingCollection(tables=_sequence_configs(tables), device=META)


def _sequence_configs(tables: Tables) -> list[EmbeddingConfig]:
    return [EmbeddingConfig(**_config(name, spec)) for name, spec in tables.items()]


def _config(name: str, spec: TableSpec) -> dict[str, Any]:
    return {
        "name": name,
        "num_embeddings": spec.rows,
        "embedding_dim": spec.dim,
        "feature_names": list(spec.features),
        "data_type": spec.dtype,
    }


def _processed(tables: Tables) -> FeatureProcessedEmbeddingBagCollection:
    longest = {feature: LONGEST for spec in tables.values() for feature in spec.features}
    weights = PositionWeightedModuleCollection(longest, device=META)
    return FeatureProcessedEmbeddingBagCollection(_bags(tables, weighted=True), weights)


def _collided(configs: list[Any], eviction_interval: int) -> nn.Module:
    return collided(*configs, every=eviction_interval, input_hash_size=RAW_IDS)


class Model(nn.Module):
    """Trained to make what its parts return small."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        for name, part in case.parts.items():
            self.add_module(name, part.make())
        self._values = {name: part.values for name, part in case.parts.items()}
        self.dense = nn.Linear(len(case.parts), 3, device=META) if case.dense else None

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = [values(getattr(self, name)(batch.sparse)) for name, values in self._values.items()]
        losses = torch.stack([output.float().pow(2).sum() for output in outputs])
        if self.dense is not None:
            losses = losses + self.dense(losses.log1p()).sum()
        loss = losses.sum()
        return loss, loss.detach()


def build(case: Case) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The model over all ranks, and its optimizer."""
    torch.manual_seed(1)
    model = Model(case)
    sharders = sharders_of({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1})
    distributed = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(
            plan={name: _plan(getattr(model, name), part.tables, sharders) for name, part in case.parts.items()}
        ),
        sharders=list(sharders.values()),
    )
    _fill_collisions(distributed)
    rest = dict(in_backward_optimizer_filter(distributed.named_parameters()))
    others = [KeyedOptimizerWrapper(rest, case.optimizer)] if rest else []
    return distributed, CombinedOptimizer([distributed.fused_optimizer, *others])


def _plan(module: nn.Module, tables: Tables, sharders: Mapping[type[nn.Module], Any]) -> Any:
    for name, parameter in module.named_parameters():
        spec = tables.get(name.split(".")[-2])
        if spec and spec.optimizer:
            apply_optimizer_in_backward(spec.optimizer, [parameter], {"lr": 0.1})
    shardings = {name: spec.sharding for name, spec in tables.items()}
    return construct_module_sharding_plan(module, shardings, sharders[type(module)], device_type="cpu")


def _fill_collisions(model: nn.Module) -> None:
    """As if a checkpoint had been loaded: some raw ids have rows of their own."""
    for module in model.modules():
        if isinstance(module, MCHManagedCollisionModule):
            known = module._mch_sorted_raw_ids[:-1]
            first = dist.get_rank() * RAW_IDS // dist.get_world_size()
            known.copy_(first + 3 * torch.arange(len(known)))
