"""Batches of the pipeline benchmark: made once, and handed out as often as needed."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum, auto
from itertools import cycle

import torch
from tensordict import TensorDict
from tests.bench.pipelines.model import table_names
from tests.bench.pipelines.options import Sizes
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.pipelines.batches import FieldsBatch

# More than a round uses, so that rows are not looked up again soon.
_DIFFERENT = 32


@dataclass
class Batch(FieldsBatch):
    """A rank's B examples."""

    sparse: KeyedJaggedTensor
    dense: torch.Tensor
    label: torch.Tensor


class BatchKind(Enum):
    """What a pipeline is given."""

    KJT = auto()
    TENSORDICT = auto()


@dataclass(frozen=True)
class Examples:
    """What a batch is made of.

    Attributes:
        keys: of F features.
        lengths: ids per feature and example: int64 [F * B].
        ids: of the features one after the other.
        dense: float32 [B, D].
        label: float32 [B].
    """

    keys: list[str]
    lengths: torch.Tensor
    ids: torch.Tensor
    dense: torch.Tensor
    label: torch.Tensor

    @classmethod
    def drawn(cls, sizes: Sizes, generator: torch.Generator) -> "Examples":
        """By chance, every row as likely as any other."""
        count = sizes.tables * sizes.batch_size
        lengths = torch.randint(0, 2 * sizes.ids + 1, (count,), generator=generator)
        return cls(
            keys=table_names(sizes),
            lengths=lengths,
            ids=torch.randint(0, sizes.rows, (int(lengths.sum()),), generator=generator),
            dense=torch.randn(sizes.batch_size, sizes.dense, generator=generator),
            label=torch.randint(0, 2, (sizes.batch_size,), generator=generator).float(),
        )

    def pinned(self) -> "Examples":
        """In memory that is copied to a GPU without waiting."""
        return Examples(self.keys, *(getattr(self, f.name).pin_memory() for f in fields(self) if f.name != "keys"))

    def batch(self) -> Batch:
        """A new batch of the same tensors, with nothing cached in it, as from a loader."""
        sparse = KeyedJaggedTensor(keys=self.keys, values=self.ids, lengths=self.lengths)
        return Batch(sparse=sparse, dense=self.dense, label=self.label)

    def of_kind(self, kind: BatchKind) -> Batch | TensorDict:
        return self.batch() if kind is BatchKind.KJT else self.tensordict()

    def tensordict(self) -> TensorDict:
        """A batch that is a TensorDict, of everything."""
        lengths = self.lengths.view(len(self.keys), -1)
        ids = torch.split(self.ids, lengths.sum(1).tolist())
        features = {
            key: torch.nested.nested_tensor_from_jagged(of_key, lengths=lengths_of_key)
            for key, of_key, lengths_of_key in zip(self.keys, ids, lengths, strict=True)
        }
        return TensorDict({**features, "dense": self.dense, "label": self.label}, batch_size=[len(self.label)])


def draw(sizes: Sizes, rank: int, device: torch.device) -> list[Examples]:
    """Those of a rank, for a device; over and over the same."""
    generator = torch.Generator().manual_seed(rank)
    drawn = [Examples.drawn(sizes, generator) for _ in range(_DIFFERENT)]
    return [one.pinned() for one in drawn] if device.type == "cuda" else drawn


def without_end(examples: list[Examples], kind: BatchKind) -> Iterator[Batch | TensorDict]:
    """Batches of examples that come again and again."""
    return (one.of_kind(kind) for one in cycle(examples))
