"""Micro-batches, the larger batches that they make up, and a model with tables of any kind."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tests.integration.trainer.pipelines.training import ROWS, WIDTH, Batch, Training, farthest
from tests.integration.trainer.torchrec_defects.models import kernels_of
from tests.integration.trainer.tracking.rows import Rows, momenta
from torch import fx, nn
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

# What adding up in another order makes of sums, after a few steps.
ROUNDING = 2e-5
# So far, at least, do some values move in a few steps.
MOVED = 0.01


def micro_batches(
    count: int, *features: str, size: int = 4, seed: int = 0, below: int = ROWS, weighted: bool = False
) -> list[Batch]:
    """This rank's, with ids below a number; others have other ones."""
    keys = features or ("f", "g")
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return [_micro_batch(list(keys), size, below, generator, weighted=weighted) for _ in range(count)]


def _micro_batch(keys: list[str], size: int, below: int, generator: torch.Generator, *, weighted: bool) -> Batch:
    lengths = torch.randint(0, 4 if below else 1, (len(keys) * size,), generator=generator)
    ids = torch.randint(0, max(below, 1), (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator) + 0.5 if weighted else None
    return Batch(
        sparse=KeyedJaggedTensor(keys, ids, weights, lengths=lengths),
        dense=torch.randn(size, WIDTH, generator=generator),
        label=torch.randn(size, generator=generator),
    )


def joined(batches: Sequence[Batch]) -> Batch:
    """All examples of some batches, in one."""
    parts = [batch.sparse.to_dict() for batch in batches]
    weighted = batches[0].sparse.weights_or_none() is not None
    features = {
        key: JaggedTensor(
            values=torch.cat([part[key].values() for part in parts]),
            weights=torch.cat([part[key].weights() for part in parts]) if weighted else None,
            lengths=torch.cat([part[key].lengths() for part in parts]),
        )
        for key in parts[0]
    }
    return Batch(
        sparse=KeyedJaggedTensor.from_jt_dict(features),
        dense=torch.cat([batch.dense for batch in batches]),
        label=torch.cat([batch.label for batch in batches]),
    )


def larger(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Join batches in groups of this size; the last group may be smaller."""
    return [joined(batches[start : start + count]) for start in range(0, len(batches), count)]


@fx.wrap
def _sums_of_squares(found: Any) -> torch.Tensor:
    """Of the rows of sequences: for each example, feature by feature."""
    return torch.cat([_by_example(rows) for rows in found.values()], dim=1)


def _by_example(rows: JaggedTensor) -> torch.Tensor:
    lengths, values = rows.lengths(), rows.values()
    examples = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return torch.zeros(len(lengths), values.shape[1]).index_add(0, examples, values.square())


@fx.wrap
def where_used(used: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Zeros for other examples; without a gradient, where there are only such."""
    return found * used.unsqueeze(1) if used.any() else torch.zeros_like(found)


class Predicting(nn.Module):
    """Predicts labels from dense values, and from what it looks up in some collections of tables."""

    def __init__(self, **collections: nn.Module) -> None:
        super().__init__()
        for name, collection in collections.items():
            self.add_module(name, collection)
        self._bags = [name for name, one in collections.items() if not isinstance(one, EmbeddingCollection)]
        self._sequences = [name for name in collections if name not in self._bags]
        self.over = nn.Linear(sum(map(_width, collections.values())) + WIDTH, 1)

    def found(self, batch: Any) -> list[torch.Tensor]:
        """What each collection has for each example."""
        bags = [getattr(self, name)(batch.sparse).values() for name in self._bags]
        return bags + [_sums_of_squares(getattr(self, name)(batch.sparse)) for name in self._sequences]

    def predicted(self, batch: Any) -> torch.Tensor:
        predicted: torch.Tensor = self.over(torch.cat([*self.found(batch), batch.dense], dim=1)).squeeze(1)
        return predicted

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = nn.functional.mse_loss(self.predicted(batch), batch.label)
        return loss, loss.detach()


def _width(collection: Any) -> int:
    sequences = isinstance(collection, EmbeddingCollection)
    configs = collection.embedding_configs() if sequences else collection.embedding_bag_configs()
    return sum(config.embedding_dim * len(config.feature_names) for config in configs)


def state(training: Training) -> Rows:
    """Everything that this rank trains, and what optimizers keep of tables."""
    kept = {f"{name}, its momentum": rows for name, rows in momenta(training.model).items()}
    return training.held() | kept


def iterations(training: Training) -> list[int]:
    """How many iterations each kernel has counted: of those whose optimizer needs to know."""
    return [int(kernel.iter) for kernel in kernels_of(training.model) if hasattr(kernel, "iter")]


def check_as_larger(
    build: Callable[[], Training], batches: Sequence[Batch], *, steps_of: int, tolerance: float = ROUNDING
) -> None:
    """Accumulated, tables too, micro-batches train a model as the batches that they make up."""
    accumulated, plain = build(), build()
    before = accumulated.held()
    accumulated.pipelined(batches, grad_accum=steps_of, accumulate_tables=True)
    plain.plainly(larger(batches, steps_of))
    assert farthest(accumulated.held(), before) > MOVED
    distance = farthest(state(accumulated), state(plain))
    assert distance < tolerance


def equal_on_ranks(values: torch.Tensor) -> bool:
    """Bit by bit."""
    of_ranks = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, values.contiguous())
    return all(torch.equal(values, others) for others in of_ranks)
