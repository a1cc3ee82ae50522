"""Models that TorchRec has quantised for serving, and releases of the models that they were made of."""

import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.global_settings import get_propogate_device, set_propogate_device
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from torchrec.inference.modules import quantize_embeddings, shard_quant_model
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.quant import embedding_modules as quant
from torchrec.quant.embedding_modules import quant_prep_customize_row_alignment

from deltasync.client import Position, Release, RowBatch, TableSpec
from deltasync.core.delivery import Delivery
from deltasync.core.mode import Mode
from deltasync.core.rows import Ids
from deltasync.core.value_types import ValueType

TYPES = {8: (ValueType.INT8_TBE, torch.qint8), 4: (ValueType.INT4_TBE, torch.quint4x2)}
SIZES = {"user": 5, "item": 9, "shop": 3}


_QUANTISED: dict[type[nn.Module], type[nn.Module]] = {
    EmbeddingCollection: quant.EmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection: quant.QuantManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection: quant.QuantManagedCollisionEmbeddingCollection,
}


class Model(nn.Module):
    """Of three tables; a trainer publishes the first two."""

    def __init__(self, dim: int = 16, *, sequences: bool = False) -> None:
        super().__init__()
        config: Any = EmbeddingConfig if sequences else EmbeddingBagConfig
        tables = [
            config(name=name, embedding_dim=dim, num_embeddings=rows, feature_names=[name])
            for name, rows in SIZES.items()
        ]
        self.sparse: Any = (
            EmbeddingCollection(tables=tables) if sequences else EmbeddingBagCollection(tables=tables)
        )
        self.over = nn.Linear(2, 1)

    def table(self, name: str) -> nn.Parameter:
        tables = self.sparse.embedding_bags if hasattr(self.sparse, "embedding_bags") else self.sparse.embeddings
        weight: nn.Parameter = tables[name].weight
        return weight


def deliveries_of(model: Model, value_type: ValueType | None = ValueType.INT8_TBE) -> dict[str, Delivery]:
    """As a service sends the model's tables to a consumer."""
    kind = "embedding_bags" if hasattr(model.sparse, "embedding_bags") else "embeddings"
    specs = [TableSpec(f"sparse.{kind}.{name}", *model.table(name).shape) for name in ("user", "item")]
    return {
        spec.name.rpartition(".")[2]: Delivery(spec, value_type, Mode.EMBEDDINGS)
        if value_type
        else Delivery.unchanged(spec)
        for spec in specs
    }


def release_of(number: int, model: Model, changed: dict[str, Ids], value_type: ValueType, **what: Any) -> Release:
    """A release of some rows, by table, that the model has just now."""
    deliveries, rows = deliveries_of(model, value_type), []
    for name, ids in changed.items():
        delivery, values = deliveries[name], model.table(name).detach().numpy()[ids]
        deleted = ~values.any(axis=1)
        held = delivery.held(delivery.encode(values[~deleted]))
        rows.append(RowBatch.of_table(delivery.held_spec, ids[~deleted], held))
        rows.append(RowBatch.deletes(rows[-1].shard, ids[deleted]))
    tables = [delivery.held_spec for delivery in deliveries.values()]
    return Release(Position("h", number), number, 0, what.pop("resync", False), tables, rows, **what)


def everything(model: Model) -> dict[str, Ids]:
    return {name: np.arange(len(model.table(name))) for name in ("user", "item")}


def whole(model: Model, value_type: ValueType = ValueType.INT8_TBE, number: int = 1) -> Release:
    return release_of(number, model, everything(model), value_type, resync=True)


def quantised(model: nn.Module, bits: int = 8, alignment: int = 16) -> nn.Module:
    """A copy of a model as TorchRec quantises it."""
    fresh = copy.deepcopy(model)
    quant_prep_customize_row_alignment(fresh, [EmbeddingBagCollection, EmbeddingCollection], alignment)
    return quantize_embeddings(
        fresh,
        dtype=TYPES[bits][1],
        inplace=True,
        additional_qconfig_spec_keys=list(_QUANTISED),
        additional_mapping=_QUANTISED,
    )


def tbe_bytes(module: nn.Module) -> dict[str, bytes]:
    """All that TBEs hold, padding too, by table."""
    return {
        spec[0]: view[0].numpy().tobytes()
        for collection in module.modules()
        for tbe in getattr(collection, "_emb_modules", ())
        for spec, view in zip(tbe.embedding_specs, tbe.split_embedding_weights_with_scale_bias(0), strict=True)
    }


def outputs(module: nn.Module) -> list[torch.Tensor]:
    """What a lookup of every row of every table gives."""
    ids = [torch.arange(rows) for rows in SIZES.values()]
    lengths = torch.cat(
        [torch.ones(max(SIZES.values())).index_fill(0, torch.arange(rows, 9), 0) for rows in SIZES.values()]
    )
    found = module.get_submodule("sparse")(
        KeyedJaggedTensor(keys=list(SIZES), values=torch.cat(ids), lengths=lengths.int())
    )
    return [each.values() for each in found.values()] if isinstance(found, dict) else [found.values()]


# First row, first column, rows, columns of each shard.
Shards = list[tuple[int, int, int, int]]


def by_rows(rows: int, dim: int, ranks: int = 2) -> Shards:
    """As TorchRec shards a table by rows."""
    block = -(-rows // ranks)
    return [(first, 0, min(block, rows - first), dim) for first in range(0, rows, block)]


def by_columns(rows: int, dim: int) -> Shards:
    """A table's two halves."""
    return [(0, 0, rows, dim // 2), (0, dim // 2, rows, dim // 2)]


def whole_tables(rows: int, dim: int) -> Shards:
    """A table on one rank."""
    return [(0, 0, rows, dim)]


def sharded(module: Any, sharding: str) -> nn.Module:
    """A quantised model sharded for inference on two ranks of this process: "table_wise" and so on."""
    cut = {"table_wise": whole_tables, "row_wise": by_rows, "column_wise": by_columns}[sharding]
    plan = EmbeddingModuleShardingPlan()
    configs = getattr(module.sparse, "embedding_bag_configs", None) or module.sparse.embedding_configs
    for number, config in enumerate(configs()):
        shards = cut(config.num_embeddings, config.embedding_dim)
        ranks = [(number + rank) % 2 for rank in range(len(shards))]
        plan[config.name] = ParameterSharding(
            sharding_type=sharding,
            compute_kernel="quant",
            ranks=ranks,
            sharding_spec=EnumerableShardingSpec(
                [
                    ShardMetadata([row, column], [rows, columns], f"rank:{rank}/cpu")
                    for rank, (row, column, rows, columns) in zip(ranks, shards, strict=True)
                ]
            ),
        )
    before = get_propogate_device()
    set_propogate_device(True)
    try:
        model, _ = shard_quant_model(
            module, 2, compute_device="cpu", sharding_device="cpu", sharding_plan=ShardingPlan({"sparse": plan})
        )
    finally:
        set_propogate_device(before)
    return model
