"""The result of a read: changed and deleted rows by table, and the token that acknowledges them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat

import numpy as np
import torch

from deltasync.base.errors import InvalidInput
from deltasync.core.policy import Amount
from deltasync.core.rows import RowBatch
from deltasync.core.tables import Shard
from deltasync.trainer.tracking.options import TrackingMode, has_rows


@dataclass(eq=False)
class Delta:
    """The changes for a consumer since its cursor.

    On a GPU, `Tracker.begin_delta` returns a delta before its rows have arrived in host memory
    (`gpu.LaunchedDelta`). Until then, use only `arrived`, `result`, `token` and `deletes`, from one thread at a
    time.

    Attributes:
        rows: changed rows by table FQN, only of tables with changes.
        token: pass it to `Tracker.acknowledge` once the receiver has the rows and the deletes.
        deletes: deleted rows by table FQN; a deleted row that has changed again is in `rows` instead.
    """

    rows: "Mapping[str, DeltaRows]"
    token: "Token"
    deletes: "Mapping[str, DeletedRows]"

    @property
    def arrived(self) -> bool:
        """Whether `result` returns without waiting."""
        return True

    @property
    def result(self) -> "Delta":
        """This delta, after waiting until its rows are in host memory."""
        return self

    @property
    def ids(self) -> dict[str, torch.Tensor]:
        """Global ids of the changed rows by table FQN, without the deleted ones."""
        return {fqn: rows.ids for fqn, rows in self.rows.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values, including first values."""
        tensors = [part for rows in self.rows.values() for part in (rows.ids, *rows.shard_values, rows.first)]
        tensors += [deleted.ids for deleted in self.deletes.values()]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def without_values(self) -> "Delta":
        """A copy with ids only."""
        rows = {fqn: replace(rows, shard_values=[], first=None) for fqn, rows in self.rows.items()}
        return Delta(rows, self.token, self.deletes)

    def batches(self) -> list[RowBatch]:
        """The current rows and the deletes of all tables, by shard, for a publisher. Does not copy.

        Raises:
            InvalidInput: the delta has no current rows because of its mode, or was read with ids only.
        """
        batches = [batch for rows in self.rows.values() for batch in rows.batches()]
        return batches + [batch for deleted in self.deletes.values() for batch in deleted.batches()]


@dataclass(frozen=True, eq=False)
class DeltaRows:
    """The changed rows of one table on this rank. Read only.

    Attributes:
        ids: int64 [n], global row ids, ascending, each once.
        shards: the table's shards on this rank, by column; most ranks hold all columns in one.
        shard_values: by shard, the current rows [n, its columns], or the current momentum with as many columns, or
            with one column if the optimizer has one value per row. Empty for ids only.
        first: `values` at the consumer's cursor; NaN for rows that the consumer does not have, for example after a
            `resync`. None if the mode does not keep them.
        mode: the mode of the read.
        shard_digests: by shard, digests of the current rows, int64 [n], if a GPU has computed them. Otherwise
            empty, and the publisher's thread computes them.
    """

    ids: torch.Tensor
    shards: list[Shard]
    shard_values: list[torch.Tensor]
    first: torch.Tensor | None
    mode: TrackingMode
    shard_digests: list[torch.Tensor] = field(default_factory=list)

    @property
    def columns(self) -> list[tuple[int, int]]:
        """Offset and number of each shard's columns."""
        return [(shard.col_offset, shard.cols) for shard in self.shards]

    @cached_property
    def values(self) -> torch.Tensor | None:
        """The values of all shards side by side, copied if there are several shards. None for ids only."""
        if len(self.shard_values) > 1:
            return torch.cat(self.shard_values, dim=1)
        return self.shard_values[0] if self.shard_values else None

    def batches(self) -> list[RowBatch]:
        """The current rows by shard, for a publisher. Does not copy.

        Raises:
            InvalidInput: the delta has no current rows because of its mode, or was read with ids only.
        """
        if not self.shard_values or not has_rows(self.mode):
            raise InvalidInput(
                f"this delta, of mode {self.mode.value!r}, has no current rows: "
                f"use {TrackingMode.EMBEDDING_LAST.value!r} and read it with get_delta"
            )
        ids = self.ids.numpy()
        digests = [each.numpy().view(np.uint64) for each in self.shard_digests]
        return [
            RowBatch(shard, ids, values.numpy(), digests=of_shard)
            for shard, values, of_shard in zip(
                self.shards, self.shard_values, digests or repeat(None), strict=False
            )
        ]

    @property
    def states(self) -> torch.Tensor | None:
        """The `states` of TorchRec's tracker: first rows, last momentum, or the increase of the momentum."""
        if self.values is None or self.first is None:
            return self.values
        return self.first if self.mode is TrackingMode.EMBEDDING else self.values - self.first

    def norms(self) -> torch.Tensor:
        """L2 norm of each row's change, or of its last momentum: float32 [n].

        Raises:
            InvalidInput: the mode does not allow it, or the delta was read with ids only.
        """
        check_ranked(self.mode)
        if self.values is None:
            raise InvalidInput("this delta has ids only: read it with get_delta")
        changed = self.values.float() if self.first is None else self.values.float() - self.first.float()
        norms: torch.Tensor = torch.linalg.vector_norm(changed, dim=1)
        return norms

    def select(self, rows: torch.Tensor) -> "DeltaRows":
        """The rows that a bool mask [n] selects."""
        by_shard = [values[rows] for values in self.shard_values]
        first = None if self.first is None else self.first[rows]
        digests = [each[rows] for each in self.shard_digests]
        return DeltaRows(self.ids[rows], self.shards, by_shard, first, self.mode, digests)


@dataclass(frozen=True, eq=False)
class DeletedRows:
    """The deleted rows of one table on this rank.

    Attributes:
        ids: int64 [n], global row ids, ascending, each once.
        shards: the table's shards on this rank, by column.
    """

    ids: torch.Tensor
    shards: list[Shard]

    def batches(self) -> list[RowBatch]:
        """The deletes by shard, for a publisher."""
        return [RowBatch.deletes(shard, self.ids.numpy()) for shard in self.shards]


@dataclass(frozen=True, eq=False)
class Token:
    """Acknowledges one delta for one consumer.

    Attributes:
        consumer: the consumer's name.
        cursor: all rows stamped up to here were in the delta or are carried over.
        rows: the delta's rows by FQN, if the consumer has first values.
        deletes: the delta's deletes by FQN, if the consumer has first values.
        carried: by FQN, global ids of due rows that the delta left for later.
        registration: distinguishes the consumer from an earlier or later one of the same name.
    """

    consumer: str
    cursor: int
    rows: Mapping[str, DeltaRows]
    deletes: Mapping[str, DeletedRows]
    carried: Mapping[str, torch.Tensor]
    registration: object


def check_ranked(mode: TrackingMode, k: float = 1) -> None:
    """Check that a mode can rank rows by their change, and that `k` is a number of rows or a share of them.

    Raises:
        InvalidInput: the mode cannot, or `k` is neither.
    """
    if mode in (TrackingMode.ID_ONLY, TrackingMode.EMBEDDING_LAST):
        raise InvalidInput(
            f"mode {mode.value!r} does not show by how much a row has changed: "
            f"use {TrackingMode.EMBEDDING.value!r}"
        )
    Amount().read("k", k.item() if isinstance(k, np.generic) else k)


def largest(norms: Mapping[str, torch.Tensor], k: float, *, per_table: bool) -> dict[str, torch.Tensor]:
    """Choose the rows with the largest norms: a bool mask [n] by FQN. NaN counts as the largest.

    Args:
        norms: norms of the changed rows, [n] by FQN.
        k: number of rows, or if below 1 the share of rows, rounded up.
        per_table: apply `k` to each table instead of to all tables together.
    """
    if per_table:
        return {fqn: _largest(of_table, k) for fqn, of_table in norms.items()}
    every = torch.cat(list(norms.values())) if norms else torch.empty(0)
    masks = torch.split(_largest(every, k), [len(of_table) for of_table in norms.values()])
    return dict(zip(norms, masks, strict=True))


def _largest(norms: torch.Tensor, k: float) -> torch.Tensor:
    # In floating point, 0.07 * 100 is 7.000000000000001.
    rows = max(1, math.ceil(round(k * len(norms), 6))) if k < 1 else int(k)
    chosen = torch.zeros(len(norms), dtype=torch.bool)
    chosen[torch.topk(norms, min(rows, len(norms))).indices] = True
    return chosen
