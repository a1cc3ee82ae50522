"""Models whose forward in evaluation reads more than rows: statistics, counts, maps from raw ids to rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.torchrec_defects.models import CPU, META, distributed
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import ParameterShardingGenerator, column_wise, row_wise, table_wise
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHEvictionPolicy,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.tracking.shards import evict_on_cpu

TABLES = ("user", "item")
ROWS, DIM, NUMBERS, IDS, SAMPLES = 20, 8, 3, 2, 8
# Raw ids are below; those of a table are not many more than its rows at a time.
RAW_IDS = 1000
KERNEL = "fused"


@dataclass(frozen=True)
class Case:
    """A model and how its tables are sharded.

    Attributes:
        sequences: rows are looked up one by one, not pooled.
        policy: by which raw ids lose their rows.
        hashed: rows of raw ids are found by hashing. The test gives rows to them: on a CPU, TorchRec does not.
        sharding: of both tables.
    """

    sharding: ParameterShardingGenerator
    sequences: bool = False
    policy: Callable[[], MCHEvictionPolicy] | None = None
    hashed: bool = False

    @property
    def managed(self) -> bool:
        """Whether ids are raw ids, to which managed collision gives rows."""
        return self.hashed or self.policy is not None


_SHARDINGS = {
    "row-wise": row_wise(compute_kernel=KERNEL),
    "table-wise": table_wise(rank=1, compute_kernel=KERNEL),
    "column-wise": column_wise(ranks=[0, 1], compute_kernel=KERNEL),
}
_POLICIES = {"distance-lfu": DistanceLFU_EvictionPolicy, "lfu": LFU_EvictionPolicy, "lru": LRU_EvictionPolicy}


def _cases() -> Iterator[tuple[str, Case]]:
    for name, sharding in _SHARDINGS.items():
        yield f"bags-{name}", Case(sharding)
        yield f"sequences-{name}", Case(sharding, sequences=True)
    for name, policy in _POLICIES.items():
        yield f"raw-ids-of-bags-{name}", Case(_SHARDINGS["row-wise"], policy=policy)
    yield "hashed-ids-of-bags", Case(_SHARDINGS["row-wise"], hashed=True)
    yield "raw-ids-of-sequences", Case(_SHARDINGS["row-wise"], sequences=True, policy=DistanceLFU_EvictionPolicy)


CASES = dict(_cases())


@dataclass(frozen=True)
class Batch:
    """Two ids of each table and some numbers, for each of `SAMPLES` samples."""

    ids: KeyedJaggedTensor
    numbers: torch.Tensor


def batch_of(ids: torch.Tensor, numbers: torch.Tensor) -> Batch:
    """Of int64 [tables, samples * ids] and float32 [samples, numbers]."""
    lengths = torch.full((len(TABLES) * SAMPLES,), IDS, dtype=torch.int32)
    return Batch(KeyedJaggedTensor(keys=list(TABLES), values=ids.flatten(), lengths=lengths), numbers)


class Counted(nn.Module):
    """Buffers of other types: how many samples there were, the sum of their numbers, which of these were large."""

    count: torch.Tensor
    total: torch.Tensor
    large: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(1))
        self.register_buffer("total", torch.zeros(NUMBERS, dtype=torch.float64))
        self.register_buffer("large", torch.zeros(NUMBERS, dtype=torch.bool))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += len(numbers)
            self.total = self.total + numbers.sum(dim=0)
            self.large = numbers.mean(dim=0) > 0
        mean = (self.total / self.count).float()
        return torch.where(self.large, numbers - mean, numbers)


class Model(nn.Module):
    """What is looked up and some numbers, through two layers with batch normalisation in between."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__()
        self.case = case
        self.sparse = _sparse(case, device)
        self.counted = Counted()
        self.under = nn.Linear(len(TABLES) * DIM + NUMBERS, 6)
        self.norm = nn.BatchNorm1d(6)
        self.over = nn.Linear(6, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, KeyedJaggedTensor | None]:
        """Logits [samples], and the row of each id where these are raw ids."""
        looked_up = self.sparse(batch.ids)
        found, rows = looked_up if self.case.managed else (looked_up, None)
        return self.logits(found, batch.numbers), rows

    def logits(self, found: Any, numbers: torch.Tensor) -> torch.Tensor:
        """Of what was looked up, pooled or not."""
        if self.case.sequences:
            pooled = [found[table].values().view(-1, IDS, DIM).sum(dim=1) for table in TABLES]
        else:
            pooled = [found.values()]
        hidden = self.under(torch.cat([*pooled, self.counted(numbers)], dim=1))
        logits: torch.Tensor = self.over(torch.relu(self.norm(hidden))).squeeze(1)
        return logits


def _sparse(case: Case, device: torch.device) -> nn.Module:
    inner: Any
    if case.sequences:
        rows = [EmbeddingConfig(**_config(name)) for name in TABLES]
        inner = EmbeddingCollection(tables=rows, device=device)
    else:
        bags = [EmbeddingBagConfig(**_config(name)) for name in TABLES]
        inner = EmbeddingBagCollection(tables=bags, device=device)
    if not case.managed:
        return inner  # type: ignore[no-any-return]
    modules = {name: _hashed() if case.hashed else _sorted(case) for name in TABLES}
    configs = inner.embedding_configs() if case.sequences else inner.embedding_bag_configs()
    kind = ManagedCollisionEmbeddingCollection if case.sequences else ManagedCollisionEmbeddingBagCollection
    collection = ManagedCollisionCollection(modules, configs)
    managed: nn.Module = kind(inner, collection, return_remapped_features=True)
    return managed


def _sorted(case: Case) -> nn.Module:
    assert case.policy
    module: nn.Module = MCHManagedCollisionModule(
        zch_size=ROWS,
        device=CPU,
        eviction_policy=case.policy(),
        eviction_interval=2,
        input_hash_size=RAW_IDS,
        input_hash_func=_mixed if case.sequences else None,
    )
    return module


def _mixed(ids: torch.Tensor, below: int) -> torch.Tensor:
    """Ids below, no two of them neighbours."""
    return ids * 7919 % below


def _hashed() -> nn.Module:
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule  # It compiles kernels.

    module: nn.Module = HashZchManagedCollisionModule(zch_size=ROWS, device=CPU, total_num_buckets=2)
    return module


def _config(name: str) -> dict[str, Any]:
    return {"name": name, "num_embeddings": ROWS, "embedding_dim": DIM, "feature_names": [name]}


def sharded(case: Case) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    """The model over all ranks, and the optimizer of what is outside of its tables."""
    torch.manual_seed(1)
    sharding, optimizer = dict.fromkeys(TABLES, case.sharding), EmbOptimType.EXACT_ROWWISE_ADAGRAD
    model = distributed(Model(case, META), sharding, optimizer, learning_rate=0.3)
    evict_on_cpu(model)
    dense = [parameter for name, parameter in model.named_parameters() if not name.startswith("sparse.")]
    return model, torch.optim.Adam(dense, lr=0.05)
