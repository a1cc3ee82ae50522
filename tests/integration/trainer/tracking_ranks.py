"""The ranks of test_tracking: what the tracker says against the rows that really changed."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed import DistributedModelParallel, TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineSemiSync,
    TrainPipelineSparseDistLite,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from tests.support.ranks import leave
from trainer.tracking.delta import Delta
from trainer.tracking.modes import TrackingMode
from trainer.tracking.options import TrackerOptions
from trainer.tracking.shards import TrackedTable
from trainer.tracking.tracker import Tracker

STEPS, BATCH = 12, 4
# Feature "shared" is looked up in two tables of different sharding; "tall" has fewer ids than rows.
BAGS = {
    "rows": ["shared"],
    "whole": ["tall"],
    "columns": ["shared", "other"],
    "halves": ["other"],
    "copies": ["tall"],
}
ROWS = {"rows": 23, "whole": 40, "columns": 17, "halves": 19, "copies": 11, "sequence": 29}
FEATURES = ("shared", "tall", "other", "sequence")


@dataclass
class Batch(Pipelineable):  # type: ignore[misc]
    sparse: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return Batch(self.sparse.to(device, non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        self.sparse.record_stream(stream)

    def pin_memory(self) -> "Batch":
        return Batch(self.sparse.pin_memory())


class Model(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        bags = [
            EmbeddingBagConfig(name=name, num_embeddings=ROWS[name], embedding_dim=8, feature_names=features)
            for name, features in BAGS.items()
        ]
        sequence = EmbeddingConfig(
            name="sequence", num_embeddings=ROWS["sequence"], embedding_dim=8, feature_names=["sequence"]
        )
        self.bags = EmbeddingBagCollection(tables=bags, device=device)
        self.sequences = EmbeddingCollection(tables=[sequence], device=device)
        self.dense = nn.Linear(8 * 7, 1, device=device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.bags(batch.sparse).values()
        sequence = self.sequences(batch.sparse)["sequence"].values()
        loss = self.dense(torch.cat([pooled, pooled[:, :8]], dim=1)).pow(2).mean() + sequence.pow(2).sum()
        return loss, loss.detach()


def build() -> tuple[DistributedModelParallel, CombinedOptimizer]:
    torch.manual_seed(1)
    model = Model(torch.device("meta"))
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    bags, sequences = (
        EmbeddingBagCollectionSharder(fused_params=fused),
        EmbeddingCollectionSharder(fused_params=fused),
    )
    shared = {"local_size": 2, "world_size": 2, "device_type": "cpu"}
    plan = {
        "bags": construct_module_sharding_plan(
            model.bags,
            {
                "rows": row_wise(compute_kernel="fused"),
                "whole": table_wise(rank=1, compute_kernel="fused"),
                "columns": column_wise(ranks=[0, 1], compute_kernel="fused"),
                "halves": column_wise(ranks=[1, 1], compute_kernel="fused"),
                "copies": data_parallel(),
            },
            bags,
            **shared,
        ),
        "sequences": construct_module_sharding_plan(
            model.sequences, {"sequence": row_wise(compute_kernel="fused")}, sequences, **shared
        ),
    }
    distributed = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan=plan),
        sharders=[bags, sequences],
    )
    rest = dict(in_backward_optimizer_filter(distributed.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adam(parameters, lr=0.1))
    return distributed, CombinedOptimizer([distributed.fused_optimizer, dense])


def batch(generator: torch.Generator) -> Batch:
    # Some lookups are empty, and rank 1 has none at all of feature "other".
    most = torch.tensor([3, 2, 0 if dist.get_rank() == 1 else 2, 2]).repeat_interleave(BATCH)
    lengths = (torch.rand(len(most), generator=generator) * (most + 1)).int()
    smallest = {"shared": 17, "tall": 11, "other": 17, "sequence": 29}
    highest = torch.tensor([smallest[name] for name in FEATURES]).repeat_interleave(BATCH)
    highest = highest.repeat_interleave(lengths)
    values = (torch.rand(len(highest), generator=generator) * highest).long()
    return Batch(KeyedJaggedTensor(keys=list(FEATURES), values=values, lengths=lengths))


def pipelines() -> dict[str, type[TrainPipelineSparseDist]]:
    """Pipelines of TorchRec. SemiSync looks rows up a step before they change; on a CPU it needs a stand-in."""
    for kind in (KeyedJaggedTensor, torch.Tensor):
        patched: Any = kind
        patched.record_stream = lambda *_: None
    module: Any = torch
    module.get_device_module = lambda *_: torch.cpu
    return {
        "Base": TrainPipelineBase,
        "SparseDist": TrainPipelineSparseDist,
        "Lite": TrainPipelineSparseDistLite,
        "SemiSync": TrainPipelineSemiSync,
    }


class Copy:
    """What a receiver holds that is given deltas only."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.rows = {table.name: torch.full_like(weights(table), float("nan")) for table in tracker.tables}
        tracker.resync()

    def update(self, *, again: bool = False) -> dict[str, set[int]]:
        """Take what has changed; the ids by table. With `again`, only what is read a second time."""
        delta = self._tracker.get_delta()
        if again:
            first, delta = delta, self._tracker.get_delta()
            assert {n: ids.tolist() for n, ids in first.ids.items()} == {
                n: ids.tolist() for n, ids in delta.ids.items()
            }
        for table in self._tracker.tables:
            if rows := delta.rows.get(table.name):
                assert rows.values is not None
                self.rows[table.name][rows.ids - table.row_offset] = rows.values
        assert self._tracker.acknowledge(delta.token)
        return as_sets(delta)

    def check(self) -> None:
        for table in self._tracker.tables:
            assert torch.equal(self.rows[table.name], weights(table)), f"rank {dist.get_rank()}: {table.place}"


def as_sets(delta: Delta) -> dict[str, set[int]]:
    return {name: set(ids.tolist()) for name, ids in delta.ids.items()}


def weights(table: TrackedTable) -> torch.Tensor:
    return torch.cat([tracked.weight for tracked in table.shards], dim=1)


def main(name: str) -> None:
    dist.init_process_group("gloo")
    model, optimizer = build()
    tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST, dense=True))
    names = {table.name for table in tracker.tables}
    assert {"bags.embedding_bags.rows", "sequences.embeddings.sequence", "dense.weight"} <= names, names
    assert names <= {key.removesuffix(".weight") for key in model.state_dict()} | {"dense.weight", "dense.bias"}

    copy = Copy(tracker)
    copy.update()
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    batches = iter([batch(generator) for _ in range(STEPS)])
    pipeline = pipelines()[name](model, optimizer, torch.device("cpu"))
    for step in range(STEPS):
        before = {table.name: weights(table).clone() for table in tracker.tables}
        pipeline.progress(batches)
        tracker.step()
        if step % 2:
            continue  # The next read finds the rows of both steps.
        reported = copy.update(again=True)
        if step == 0:
            check_exact(tracker, before, reported)
    copy.update()
    copy.check()
    if name == "SparseDist":
        pipeline.detach()
        check_evaluation_marks_nothing(model, tracker, generator)
    dist.barrier()
    dist.destroy_process_group()
    leave()


def check_exact(tracker: Tracker, before: dict[str, torch.Tensor], reported: dict[str, set[int]]) -> None:
    """After one step, the rows reported are exactly those that changed."""
    for table in tracker.tables:
        changed = torch.nonzero((weights(table) != before[table.name]).any(dim=1)).squeeze(1) + table.row_offset
        assert reported.get(table.name, set()) == set(changed.tolist()), f"rank {dist.get_rank()}: {table.place}"


def check_evaluation_marks_nothing(model: nn.Module, tracker: Tracker, generator: torch.Generator) -> None:
    with torch.no_grad():
        model(batch(generator))
    model(batch(generator))  # Without a backward nothing changes either.
    assert not tracker.get_delta().rows
    model(batch(generator))[0].backward()
    assert tracker.get_delta().rows


if __name__ == "__main__":
    main(sys.argv[1])
