"""Models that TorchRec has quantised for serving, and releases of the models from which they were made."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.global_settings import get_propogate_device, set_propogate_device
from torchrec.distributed.mc_modules import InferManagedCollisionCollectionSharder
from torchrec.distributed.quant_embedding import (
    QuantEmbeddingCollectionSharder,
    QuantManagedCollisionEmbeddingCollectionSharder,
)
from torchrec.distributed.quant_embeddingbag import (
    QuantEmbeddingBagCollectionSharder,
    QuantManagedCollisionEmbeddingBagCollectionSharder,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ParameterSharding, ShardingPlan
from torchrec.inference.modules import (
    DEFAULT_FUSED_PARAMS,
    DEFAULT_SHARDERS,
    quantize_embeddings,
    shard_quant_model,
)
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.quant import embedding_modules as quant
from torchrec.quant.embedding_modules import quant_prep_customize_row_alignment

from deltasync.client import Position, Release, RowBatch, TableSpec
from deltasync.core.rows import Ids, Values
from deltasync.core.table_form import Mode, TableForm
from deltasync.core.value_types import ValueType

TYPES = {8: (ValueType.INT8_TBE, torch.qint8), 4: (ValueType.INT4_TBE, torch.quint4x2)}
SIZES = {"user": 5, "item": 9, "shop": 3}

_QUANTISED: dict[type[nn.Module], type[nn.Module]] = {
    EmbeddingCollection: quant.EmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection: quant.QuantManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection: quant.QuantManagedCollisionEmbeddingCollection,
}


class Model(nn.Module):
    """Three tables, of which a trainer publishes the first two."""

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
        """The weight of a table."""
        tables = self.sparse.embedding_bags if hasattr(self.sparse, "embedding_bags") else self.sparse.embeddings
        weight: nn.Parameter = tables[name].weight
        return weight


def with_other_rows(model: Model) -> Model:
    """A copy with other rows in the published tables."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name in ("user", "item"):
            other.table(name).mul_(-0.5).add_(0.1)
    return other


def rows_of(model: Model, value_type: ValueType) -> dict[str, tuple[TableSpec, Values]]:
    """The rows that replicas have of the published tables with a value type, by the tables' short names."""
    kind = "embedding_bags" if hasattr(model.sparse, "embedding_bags") else "embeddings"
    held = {}
    for name in ("user", "item"):
        values = model.table(name).detach().numpy()
        spec = TableSpec(f"sparse.{kind}.{name}", *values.shape)
        form = TableForm(spec, value_type, Mode.EMBEDDINGS)
        held[name] = form.replica_spec, form.held(form.encode(values))
    return held


def release_of(number: int, model: Model, changed: dict[str, Ids], value_type: ValueType, **what: Any) -> Release:
    """A release of some current rows, by table; rows of zeros are deletes."""
    held, rows = rows_of(model, value_type), []
    for name, ids in changed.items():
        table, values = held[name]
        deleted = ~values[ids].any(axis=1)
        rows.append(RowBatch.of_table(table, ids[~deleted], values[ids[~deleted]]))
        rows.append(RowBatch.deletes(rows[-1].shard, ids[deleted]))
    tables = [table for table, _ in held.values()]
    return Release(Position("h", number), number, 0, what.pop("resync", False), tables, rows, **what)


def whole(model: Model, value_type: ValueType = ValueType.INT8_TBE) -> Release:
    """A first release, with all rows."""
    changed = {name: np.arange(SIZES[name]) for name in ("user", "item")}
    return release_of(1, model, changed, value_type, resync=True)


def quantised(model: nn.Module, bits: int = 8, alignment: int = 16) -> nn.Module:
    """A copy of a model, quantised by TorchRec."""
    fresh = copy.deepcopy(model)
    quant_prep_customize_row_alignment(fresh, [EmbeddingBagCollection, EmbeddingCollection], alignment)
    made: nn.Module = quantize_embeddings(
        fresh,
        dtype=TYPES[bits][1],
        inplace=True,
        additional_qconfig_spec_keys=list(_QUANTISED),
        additional_mapping=_QUANTISED,
    )
    return made


def tbes_of(module: nn.Module) -> list[Any]:
    """The TBEs of an unsharded quantised model."""
    return [tbe for each in module.modules() for tbe in getattr(each, "_emb_modules", ())]


def tbe_bytes(module: nn.Module) -> dict[str, bytes]:
    """All bytes of TBEs, including padding, by table."""
    return {
        spec[0]: view[0].cpu().numpy().tobytes()
        for tbe in tbes_of(module)
        for spec, view in zip(tbe.embedding_specs, tbe.split_embedding_weights_with_scale_bias(0), strict=True)
    }


@contextmanager
def on_cpu() -> Iterator[None]:
    """Make TorchRec shard for inference on CPUs."""
    before = get_propogate_device()
    set_propogate_device(True)
    try:
        yield
    finally:
        set_propogate_device(before)


def tbe_memory_of(module: nn.Module) -> list[torch.Tensor]:
    """The memory in which TBEs have their rows."""
    return [view[0] for tbe in tbes_of(module) for view in tbe.split_embedding_weights_with_scale_bias(0)]


def outputs(module: nn.Module, device: torch.device | None = None) -> dict[str, torch.Tensor]:
    """The result of looking up each row, by table."""
    features = each_row()
    return by_table(module.get_submodule("sparse")(features if device is None else features.to(device)))


def each_row() -> KeyedJaggedTensor:
    """Features that look up each row of each table once."""
    most = max(SIZES.values())
    ids = torch.cat([torch.arange(rows) for rows in SIZES.values()])
    lengths = torch.cat([(torch.arange(most) < rows).int() for rows in SIZES.values()])
    return KeyedJaggedTensor(keys=list(SIZES), values=ids, lengths=lengths)


def by_table(found: Any) -> dict[str, torch.Tensor]:
    """The result of `each_row`, by table."""
    if isinstance(found, dict):
        return {name: each.values() for name, each in found.items()}
    pooled: dict[str, torch.Tensor] = found.to_dict()
    return {name: each[: SIZES[name]] for name, each in pooled.items()}


# First row, first column, rows, columns of each shard.
Shards = list[tuple[int, int, int, int]]


def by_rows(rows: int, dim: int, ranks: int = 2) -> Shards:
    """Shard a table by rows, like TorchRec."""
    block = -(-rows // ranks)
    return [(first, 0, min(block, rows - first), dim) for first in range(0, rows, block)]


def by_columns(rows: int, dim: int) -> Shards:
    """Split a table into two halves of columns."""
    return [(0, 0, rows, dim // 2), (0, dim // 2, rows, dim // 2)]


def whole_tables(rows: int, dim: int) -> Shards:
    """Put a table on one rank."""
    return [(0, 0, rows, dim)]


def collision_sharders() -> list[ModuleSharder[Any]]:
    """Sharders for quantised collections with managed collision."""
    fused: dict[str, Any] = dict(DEFAULT_FUSED_PARAMS)
    collision = InferManagedCollisionCollectionSharder()
    return [
        QuantManagedCollisionEmbeddingBagCollectionSharder(QuantEmbeddingBagCollectionSharder(fused), collision),
        QuantManagedCollisionEmbeddingCollectionSharder(QuantEmbeddingCollectionSharder(fused), collision),
    ]


def sharded(
    module: Any,
    sharding: str,
    sharders: Sequence[ModuleSharder[nn.Module]] = tuple(DEFAULT_SHARDERS),
    ranks: int = 2,
    shards_by_row: Shards | None = None,
) -> nn.Module:
    """Shard a quantised model for inference over ranks of this process: "table_wise" and so on.

    See `on_cpu`.
    """
    cuts: dict[str, Callable[[int, int], Shards]] = {
        "table_wise": whole_tables,
        "row_wise": lambda rows, dim: shards_by_row or by_rows(rows, dim, ranks),
        "column_wise": by_columns,
    }
    plan = EmbeddingModuleShardingPlan()
    sparse = module.get_submodule("sparse")
    configs = getattr(sparse, "embedding_bag_configs", None) or sparse.embedding_configs
    for number, config in enumerate(configs()):
        shards = cuts[sharding](config.num_embeddings, config.embedding_dim)
        used = [(number + rank) % ranks for rank in range(len(shards))]
        plan[config.name] = ParameterSharding(
            sharding_type=sharding,
            compute_kernel="quant",
            ranks=used,
            sharding_spec=EnumerableShardingSpec(
                [
                    ShardMetadata([row, column], [rows, columns], f"rank:{rank}/cpu")
                    for rank, (row, column, rows, columns) in zip(used, shards, strict=True)
                ]
            ),
        )
    made: nn.Module
    made, _ = shard_quant_model(
        module,
        ranks,
        compute_device="cpu",
        sharding_device="cpu",
        sharders=list(sharders),
        sharding_plan=ShardingPlan({"sparse": plan}),
    )
    return made
