"""The demo's model: a click predictor in the shape of DLRM, and how its tables are sharded."""

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.clicks.batch import SPARSE_FEATURES, ClickBatch
from deltasync.trainer.clicks.features import DENSE_FEATURES, RAW_IDS
from deltasync.trainer.clicks.model_options import MANAGED, ModelOptions

# The loss that the pipeline calls backward() on, and index, logit and label of each event.
Output = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


# A managed table gives rows away after so many batches.
_EVICTION_BATCHES = 5


class ClickModel(nn.Module):
    """Embeddings, a bottom MLP over the dense features, dot products of all pairs, a top MLP.

    After "Deep Learning Recommendation Model for Personalization and Recommendation Systems"
    (Naumov et al., 2019). Used whole by trainers (sharded) and predictors (as it is).
    """

    def __init__(self, options: ModelOptions, device: torch.device | None = None) -> None:
        super().__init__()
        vectors = len(SPARSE_FEATURES) + 1
        pairs = vectors * (vectors - 1) // 2
        self.managed = _managed(options, device) if options.managed else None
        self.sparse = EmbeddingBagCollection(tables=_tables(options, _unmanaged(options)), device=device)
        self.bottom = _mlp(len(DENSE_FEATURES), options.hidden, options.dim, device, normalised=options.managed)
        self.top = _mlp(options.dim * vectors + pairs, options.hidden, 1, device)
        self._dim = options.dim
        first, second = torch.triu_indices(vectors, vectors, offset=1).tolist()
        self._first, self._second = first, second

    def logits(self, dense: torch.Tensor, sparse: KeyedJaggedTensor | TensorDict) -> torch.Tensor:
        """Log odds of a click: float32 [B], from dense features [B, 4] and the sparse ones."""
        pooled = self._pooled(sparse).view(-1, len(SPARSE_FEATURES), self._dim)
        vectors = torch.cat([pooled, self.bottom(dense).unsqueeze(1)], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self._first, self._second]
        logits: torch.Tensor = self.top(torch.cat([vectors.flatten(1), dots], dim=1)).squeeze(1)
        return logits

    def forward(self, batch: ClickBatch) -> Output:
        """The loss of a batch, and the logits made before anything was learnt from it."""
        return _scored(self.logits(batch.dense, batch.sparse), batch.label, batch.index)

    def _pooled(self, sparse: KeyedJaggedTensor | TensorDict) -> torch.Tensor:
        found: torch.Tensor = self.sparse(sparse).values()
        return found if self.managed is None else torch.cat([self.managed(sparse)[0].values(), found], dim=1)


class TensorDictClickModel(ClickModel):
    """The same model, of batches that are TensorDicts."""

    def forward(self, batch: TensorDict) -> Output:
        """The loss of a batch, and the logits made before anything was learnt from it."""
        return _scored(self.logits(batch["dense"], batch), batch["label"], batch["index"])


MODELS = {"kjt": ClickModel, "tensordict": TensorDictClickModel}
"""The model by what its batches are."""


def _scored(logits: torch.Tensor, label: torch.Tensor, index: torch.Tensor) -> Output:
    loss = nn.functional.binary_cross_entropy_with_logits(logits, label)
    return loss, (index, logits.detach().float(), label)


def _managed(options: ModelOptions, device: torch.device | None) -> ManagedCollisionEmbeddingBagCollection:
    tables = _tables(options, MANAGED)
    modules = {
        table.name: MCHManagedCollisionModule(
            zch_size=table.num_embeddings,
            device=device or torch.device("cpu"),
            eviction_policy=DistanceLFU_EvictionPolicy(),
            eviction_interval=_EVICTION_BATCHES,
            input_hash_size=RAW_IDS,
        )
        for table in tables
    }
    return ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=tables, device=device), ManagedCollisionCollection(modules, tables)
    )


def _unmanaged(options: ModelOptions) -> dict[str, list[str]]:
    managed = [feature for table in options.managed_tables for feature in MANAGED[table]]
    return {name: [name] for name in SPARSE_FEATURES if name not in managed}


def _tables(options: ModelOptions, features: Mapping[str, list[str]]) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=options.rows[name],
            embedding_dim=options.dim,
            feature_names=names,
            # Of one id sum and mean are the same. TorchRec 1.8.0 divides all of a collection's means by their
            # lengths, if it has one that is sharded by rows; those that are not have been divided before.
            pooling=PoolingType.MEAN if "history" in names else PoolingType.SUM,
            weight_init_min=-0.05,
            weight_init_max=0.05,
        )
        for name, names in features.items()
    ]


def _mlp(
    inputs: int, hidden: int, outputs: int, device: torch.device | None, *, normalised: bool = False
) -> nn.Sequential:
    norm = [nn.BatchNorm1d(hidden, device=device)] if normalised else []
    return nn.Sequential(
        nn.Linear(inputs, hidden, device=device), *norm, nn.ReLU(), nn.Linear(hidden, outputs, device=device)
    )
