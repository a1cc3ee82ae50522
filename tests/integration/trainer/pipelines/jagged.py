"""The same ids as KeyedJaggedTensors and as TensorDicts, and models that look them up."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from tests.integration.trainer.pipelines.training import Training, farthest, through
from tests.integration.trainer.torchrec_defects.models import DIM
from tests.integration.trainer.tracking.rows import Rows
from torch import nn
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.sharding_plan import column_wise, data_parallel, row_wise, table_wise
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from deltasync.trainer.pipelines import accept_tensordicts

ROWS = 16
# How tables of these names are sharded.
EVERY_SHARDING = {
    "t": table_wise(rank=1, compute_kernel="fused"),
    "r": row_wise(compute_kernel="fused"),
    "c": column_wise(ranks=[0, 1], compute_kernel="fused"),
    "d": data_parallel(),
}
_COLLIDED = ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection
# The ids of each example, by key.
Ids = dict[str, list[list[int]]]


def ids(count: int, *keys: str, size: int = 4, seed: int = 0) -> Iterator[Ids]:
    """This rank's batches: others have other ones."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(count):
        yield {key: [_some(generator) for _ in range(size)] for key in keys or ("f", "g")}


def _some(generator: torch.Generator) -> list[int]:
    length = int(torch.randint(0, 4, (), generator=generator))
    found: list[int] = torch.randint(0, ROWS, (length,), generator=generator).tolist()
    return found


def as_kjt(batch: Ids, keys: Sequence[str] = (), weights: bool = False) -> KeyedJaggedTensor:
    values = torch.cat([flat(batch[key]) for key in keys or batch])
    return KeyedJaggedTensor(
        keys=list(keys or batch),
        values=values,
        lengths=torch.cat([lengths(batch[key]) for key in keys or batch]),
        weights=weights_of(values) if weights else None,
    )


def as_tensordict(
    batch: Ids,
    keys: Sequence[str] = (),
    value: Callable[[list[list[int]]], Any] | None = None,
    batch_size: Sequence[int] = (),
    **extra: Any,
) -> TensorDict:
    make = value or nested
    return TensorDict({key: make(batch[key]) for key in keys or batch} | extra, batch_size=list(batch_size))


def nested(examples: list[list[int]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.nested.nested_tensor([flat([one]).to(dtype) for one in examples], layout=torch.jagged)


def by_lengths(examples: list[list[int]]) -> JaggedTensor:
    return JaggedTensor(values=flat(examples), lengths=lengths(examples))


def by_offsets(examples: list[list[int]]) -> JaggedTensor:
    return JaggedTensor(values=flat(examples), offsets=offsets(examples))


def by_both(examples: list[list[int]]) -> JaggedTensor:
    return JaggedTensor(values=flat(examples), lengths=lengths(examples), offsets=offsets(examples))


def weighted(examples: list[list[int]]) -> JaggedTensor:
    values = flat(examples)
    return JaggedTensor(values=values, lengths=lengths(examples), weights=weights_of(values))


def weights_of(values: torch.Tensor) -> torch.Tensor:
    """A weight for each id, far from 1."""
    return 2.0 + 0.125 * values.float()


def flat(examples: list[list[int]]) -> torch.Tensor:
    return torch.tensor([one for example in examples for one in example], dtype=torch.int64)


def lengths(examples: list[list[int]]) -> torch.Tensor:
    return torch.tensor([len(example) for example in examples], dtype=torch.int64)


def offsets(examples: list[list[int]]) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths(examples).cumsum(0)])


def itself(batch: Any) -> Any:
    return batch


class Lookups(nn.Module):
    """Looks up in all of its collections; its output is all that was found."""

    def __init__(self, of: Callable[[Any], Any] = itself, **collections: nn.Module) -> None:
        """Get features `of` the batch."""
        super().__init__()
        self._of, self._names = of, list(collections)
        for name, collection in collections.items():
            self.add_module(name, collection)
        self._sequences = {name: _sequence_features(module) for name, module in collections.items()}
        self._collided = {name for name, module in collections.items() if isinstance(module, _COLLIDED)}
        self.over = nn.Linear(DIM, 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.cat([rows.reshape(-1, DIM) for name in self._names for rows in self._found(name, batch)])
        return 0.05 * self.over(found).square().sum(), found.detach()

    def _found(self, name: str, batch: Any) -> list[torch.Tensor]:
        found = getattr(self, name)(self._of(batch))
        found = found[0] if name in self._collided else found
        names = self._sequences[name]
        return [found[feature].values() for feature in names] if names else [found.values()]


def _sequence_features(module: Any) -> list[str]:
    """Those of a collection whose rows are not pooled."""
    inner = module._embedding_module if isinstance(module, _COLLIDED) else module
    if not isinstance(inner, EmbeddingCollection):
        return []
    return [feature for config in inner.embedding_configs() for feature in config.feature_names]


def train_same(
    make: Callable[[], nn.Module],
    sharding: Mapping[str, Any],
    expected: Iterable[Any],
    given: Iterable[Any],
    *,
    plain_model: Callable[[], nn.Module] | None = None,
    ahead: bool = True,
) -> None:
    """What TorchRec trains without a pipeline, on KeyedJaggedTensors, is trained on what is given, in every way.

    Args:
        make: the model.
        sharding: of its tables.
        expected: what TorchRec is given.
        given: the same otherwise.
        plain_model: what TorchRec trains, if it is another model.
        ahead: whether the ids of all sharded modules are sent out ahead of forward; of none, if not.
    """
    check_trained(make, sharding, trained_plainly(plain_model or make, sharding, expected), given, ahead=ahead)


@dataclass(frozen=True)
class Trained:
    """What training has given: the outputs, and what this rank then holds."""

    outputs: list[Any]
    held: Rows


def trained_plainly(make: Callable[[], nn.Module], sharding: Mapping[str, Any], batches: Iterable[Any]) -> Trained:
    """What TorchRec trains without a pipeline."""
    plain = Training(make(), sharding)
    before = plain.held()
    outputs = plain.plainly(batches)
    assert 0 < farthest(before, plain.held()) < float("inf")  # not NaN, which compares equal to everything
    return Trained(outputs, plain.held())


def check_trained(
    make: Callable[[], nn.Module],
    sharding: Mapping[str, Any],
    expected: Trained,
    given: Iterable[Any],
    *,
    ahead: bool = True,
) -> None:
    """The same comes of training on what is given, in every way; see `train_same`."""
    given = list(given)
    eager, pipelined = Training(make(), sharding), Training(make(), sharding)
    accept_tensordicts(eager.model)
    for training, found in ((eager, eager.plainly(given)), (pipelined, _pipelined(pipelined, given, ahead))):
        assert all(torch.equal(*two) for two in zip(found, expected.outputs, strict=True))
        assert farthest(training.held(), expected.held) == 0


def _pipelined(training: Training, batches: Iterable[Any], ahead: bool) -> list[Any]:
    pipeline = training.pipeline()
    outputs = through(pipeline, batches)
    sharded = [module for module in training.model.modules() if isinstance(module, ShardedEmbeddingModule)]
    assert len(pipeline._pipelined_modules) == (len(sharded) if ahead else 0)
    return outputs


def in_both_ways(training: Callable[[], Training]) -> Iterator[Callable[[Iterable[Any]], list[Any]]]:
    """Train on batches without a pipeline, and with one."""
    eager = training()
    accept_tensordicts(eager.model)
    yield eager.plainly
    pipeline = training().pipeline()
    yield lambda batches: through(pipeline, batches)
