"""4. The model, a DLRM click predictor; its batches, and its quantised form."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.client import ValueType
from deltasync.trainer.example.features import DENSE_FEATURES, SPARSE_FEATURES, Features
from deltasync.trainer.example.options import MANAGED, RAW_IDS, ModelOptions
from deltasync.trainer.pipelines.batches import FieldsBatch

Output = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""The loss for backward, and index, log odds of a click and label of each event."""

QUANTISED = {ValueType.INT8_TBE: torch.qint8, ValueType.INT4_TBE: torch.quint4x2}
"""How TorchRec quantises the tables of a consumer with this value type."""


@dataclass
class ClickBatch(FieldsBatch):
    """B events."""

    dense: torch.Tensor
    """float32 [B, 4]"""
    sparse: KeyedJaggedTensor
    """SPARSE_FEATURES, values int64, lengths int32"""
    label: torch.Tensor
    """float32 [B], 0 or 1"""
    index: torch.Tensor
    """int64 [B], positions of the events in the stream"""


def click_batch(features: Features, rank: int = 0, ranks: int = 1) -> ClickBatch:
    """A rank's share of the events: rank, rank + ranks, ...

    All ranks get equally many events because TorchRec needs that; up to ranks - 1 events at the end are left out.
    """
    mine = slice(rank, len(features) - len(features) % ranks, ranks)
    single = [features.ids[name][mine] for name in SPARSE_FEATURES[:-1]]
    lengths = features.history_lengths[mine]
    chosen = np.zeros(len(features), np.bool_)
    chosen[mine] = True
    history = features.history[np.repeat(chosen, features.history_lengths)]
    sparse = KeyedJaggedTensor(
        keys=list(SPARSE_FEATURES),
        values=torch.from_numpy(np.concatenate([*single, history])),
        lengths=torch.from_numpy(np.concatenate([np.ones(len(single) * lengths.size, np.int32), lengths])),
        stride=lengths.size,
    )
    # Copy, because the arrays of `features` may change later.
    dense, label, index = (torch.tensor(each[mine]) for each in (features.dense, features.label, features.index))
    return ClickBatch(dense, sparse, label, index)


class ClickModel(nn.Module):
    """Embeddings, a bottom MLP for the dense features, dot products of all pairs, and a top MLP.

    After "Deep Learning Recommendation Model for Personalization and Recommendation Systems"
    (Naumov et al., 2019). Trainers shard it, predictors do not.
    """

    def __init__(self, options: ModelOptions, device: torch.device | None = None) -> None:
        super().__init__()
        vectors = len(SPARSE_FEATURES) + 1
        self.managed = _managed_collision(options, device) if options.managed else None
        managed = [name for table in options.managed_tables for name in MANAGED[table]]
        plain = {name: [name] for name in SPARSE_FEATURES if name not in managed}
        self.sparse = EmbeddingBagCollection(tables=_tables(options, plain), device=device)
        self.bottom = _mlp(len(DENSE_FEATURES), options.hidden, options.dim, device, normalised=options.managed)
        self.top = _mlp(options.dim * vectors + vectors * (vectors - 1) // 2, options.hidden, 1, device)
        self._dim = options.dim
        self._first, self._second = torch.triu_indices(vectors, vectors, offset=1).tolist()

    def forward(self, batch: ClickBatch) -> Output:
        """Return the loss of a batch, and its logits before training on it."""
        rows = self.sparse(batch.sparse).values()
        pooled = rows if self.managed is None else torch.cat([self.managed(batch.sparse)[0].values(), rows], dim=1)
        vectors = [pooled.view(-1, len(SPARSE_FEATURES), self._dim), self.bottom(batch.dense).unsqueeze(1)]
        crossed = torch.cat(vectors, dim=1)
        dots = torch.bmm(crossed, crossed.transpose(1, 2))[:, self._first, self._second]
        logits: torch.Tensor = self.top(torch.cat([crossed.flatten(1), dots], dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        return loss, (batch.index, logits.detach().float(), batch.label)


def outputs(model: nn.Module, batch: ClickBatch) -> torch.Tensor:
    """Log odds of a click for each event of a batch, without gradients."""
    with torch.no_grad():
        _, (_, logits, _) = model(batch)
    return torch.as_tensor(logits)


def quantised(model: ClickModel, value_type: ValueType) -> ClickModel:
    """Quantise a model's tables in place for a consumer with this value type; returns the model."""
    quantize_embeddings(model, dtype=QUANTISED[value_type], inplace=True)
    return model


def _managed_collision(options: ModelOptions, device: Any) -> ManagedCollisionEmbeddingBagCollection:
    tables = _tables(options, MANAGED)
    modules = {
        table.name: MCHManagedCollisionModule(
            zch_size=table.num_embeddings,
            device=device or torch.device("cpu"),
            eviction_policy=DistanceLFU_EvictionPolicy(),
            eviction_interval=5,  # Batches between evictions.
            input_hash_size=RAW_IDS,
        )
        for table in tables
    }
    bags = EmbeddingBagCollection(tables=tables, device=device)
    return ManagedCollisionEmbeddingBagCollection(bags, ManagedCollisionCollection(modules, tables))


def _tables(options: ModelOptions, features: Mapping[str, list[str]]) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=table,
            num_embeddings=options.rows[table],
            embedding_dim=options.dim,
            feature_names=names,
            # Use MEAN only where needed; for one id, sum and mean are equal. If a table with MEAN is sharded by
            # rows, TorchRec 1.8.0 divides all means of the collection by their lengths, even those of other
            # tables, which are already divided.
            pooling=PoolingType.MEAN if "history" in names else PoolingType.SUM,
            weight_init_min=-0.05,
            weight_init_max=0.05,
        )
        for table, names in features.items()
    ]


def _mlp(inputs: int, hidden: int, outputs: int, device: Any, *, normalised: bool = False) -> nn.Sequential:
    norm = [nn.BatchNorm1d(hidden, device=device)] if normalised else []
    first, last = nn.Linear(inputs, hidden, device=device), nn.Linear(hidden, outputs, device=device)
    return nn.Sequential(first, *norm, nn.ReLU(), last)
