"""The ranks of test_tracker_model: random interleavings with real lookups, against a plain model of sets.

Hypothesis draws the same programs on every rank: it is derandomized.
"""

import os
import sys
import traceback
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.integration.trainer.torchrec_defects.models import META, bag, bags, distributed, sequence, sequences
from tests.support.ranks import leave
from tests.support.side_by_side import Operation, SideBySide, operations
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, data_parallel, row_wise, table_wise
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.tracking import TrackerOptions, TrackingMode

ROWS, BATCH = 6, 2
# Features are looked up in several tables, of other sharding too; one table has two.
BAGS = {"rows": ["shared"], "whole": ["shared", "own"], "other": ["own"], "columns": ["own"], "copies": ["own"]}
LOOKUPS = sum(map(len, BAGS.values()))
FEATURES = ("shared", "own", "sequence")
MODES = (TrackingMode.EMBEDDING, TrackingMode.EMBEDDING, TrackingMode.EMBEDDING_LAST, TrackingMode.ID_ONLY)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = bags(*(bag(name, *features, rows=ROWS, dim=8) for name, features in BAGS.items()))
        self.sequences = sequences(sequence("sequence", rows=ROWS))
        self.dense = nn.Linear(8 * LOOKUPS, 2, device=META)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        # Gradients are positive: every row that is looked up changes.
        pooled: torch.Tensor = self.bags(features).values()
        sequence = self.sequences(features)["sequence"].values()
        loss: torch.Tensor = pooled.sum() + sequence.sum() + self.dense(pooled.detach()).sum()
        return loss


def build() -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    ranks = dist.get_world_size()
    by_rows, on_last = row_wise(compute_kernel="fused"), table_wise(rank=ranks - 1, compute_kernel="fused")
    sharding = {
        "rows": by_rows,
        "whole": on_last,
        "other": on_last,
        "columns": column_wise(ranks=[0, ranks - 1], compute_kernel="fused"),
        "copies": data_parallel(),
        "sequence": by_rows,
    }
    model = distributed(Model(), sharding, EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.1)
    rest = [parameter for _, parameter in in_backward_optimizer_filter(model.named_parameters())]
    # Momentum moves rows that were not looked up.
    return model, torch.optim.SGD(rest, lr=0.1, momentum=0.9)


class Trained(SideBySide):
    """Rows change in training."""

    optimizer: torch.optim.Optimizer
    noted = (0, 0)

    def train(self, ids: Sequence[Sequence[int]], complete: bool) -> None:
        """One step, or a micro-batch of one."""
        self._backward(ids)
        self.optimizer.step()
        if complete:
            self.end_step()
            self.noted = (self.noted[1], 0)

    def train_unnoticed(self, ids: Sequence[Sequence[int]]) -> None:
        self.plain.settle()
        with self.tracker.pause():
            self._backward(ids)
        self.optimizer.zero_grad()
        self.plain.overlook()

    def delete(self, table: int, rows: Sequence[int]) -> None:
        embeddings = [number for number, tracked in enumerate(self.tracker.tables) if tracked.features]
        super().delete(embeddings[table % len(embeddings)], rows)

    def evaluate(self, ids: Sequence[Sequence[int]]) -> None:
        with torch.no_grad():
            self.model(batch(ids))
        self.model(batch(ids))  # Without a backward nothing changes either.

    def _backward(self, ids: Sequence[Sequence[int]]) -> None:
        self.optimizer.zero_grad()
        features = batch(ids)
        self.model(features).backward()
        self.noted = (self.noted[0], self.noted[1] + sum(map(len, ids)) * 8 * LOOKUPS)

    @property
    def bytes_under_way(self) -> int:
        return sum(self.noted)


def batch(ids: Sequence[Sequence[int]]) -> KeyedJaggedTensor:
    """This rank's share of some ids by feature; may be none."""
    mine = [its[dist.get_rank() :: dist.get_world_size()] for its in ids]
    lengths = [length for its in mine for length in (len(its) // 2, len(its) - len(its) // 2)]
    values = torch.tensor([one for its in mine for one in its], dtype=torch.int64)
    return KeyedJaggedTensor(keys=list(FEATURES), values=values, lengths=torch.tensor(lengths))


def programs() -> st.SearchStrategy[list[Operation]]:
    name, row = st.sampled_from(("a", "a", "b")), st.integers(0, ROWS - 1)
    ids = st.tuples(*(st.lists(row, min_size=least, max_size=4) for least in (1, 0, 1)))
    kinds = [
        *4 * [operations("train", ids, st.booleans())],
        operations("train_unnoticed", ids),
        operations("evaluate", ids),
        *4 * [operations("read", name)],
        operations("read_ids", name),
        *3 * [operations("acknowledge", st.sampled_from((0, 0, 0, 1, 2, 5)))],
        operations("mark", st.integers(0, 7), st.lists(row, max_size=3)),
        operations("delete", st.integers(0, 7), st.lists(row, max_size=3)),
        operations("mark_all", st.none() | st.integers(0, 7)),
        operations("add", st.sampled_from("abc"), st.sampled_from(MODES)),
        operations("remove", name),
        operations("resync", name),
        operations("reload"),
        operations("save"),
        operations("restore"),
    ]
    return st.integers(4, 20).flatmap(lambda size: st.lists(st.one_of(*kinds), min_size=size, max_size=size))


def check(model: nn.Module, examples: int) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def interleaving(program: list[Operation]) -> None:
        with leaving_on_failure(str(program)):
            agree(program)
            both = Trained(model, TrackerOptions(consumers=["a", "b"], mode=MODES[0], dense=True))
            both.run(program)
            both.tracker.close()

    interleaving()


@contextmanager
def leaving_on_failure(what: str) -> Iterator[None]:
    """Other ranks are in the middle of collectives: nothing that came later would tell anything."""
    try:
        yield
    finally:
        if sys.exc_info()[0]:
            sys.stderr.write(f"rank {dist.get_rank()}, {what}\n{traceback.format_exc()}")
            sys.stderr.flush()
            os._exit(1)


def agree(program: list[Operation]) -> None:
    drawn = torch.tensor([zlib.crc32(repr(program).encode())])
    first = drawn.clone()
    dist.broadcast(first, 0)
    assert torch.equal(drawn, first), "the ranks have drawn different programs"


def check_memory(model: nn.Module) -> None:
    """Steps that nobody reads take no memory."""
    both = Trained(model, TrackerOptions(consumers=["a", "b"], mode=TrackingMode.EMBEDDING, dense=True))
    sizes = set()
    for _ in range(20):
        both.train([[0, 1, 2, 3]] * len(FEATURES), complete=True)
        sizes.add(both.tracker.nbytes)
    assert len(sizes) == 1, sizes


def main(examples: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model, Trained.optimizer = build()
    check(model, examples)
    check_memory(model)
    dist.barrier()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]))
