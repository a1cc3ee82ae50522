"""What a read of the tracker returns."""

import math
from collections.abc import Callable, Mapping
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


def check_ranked(mode: TrackingMode, k: float = 1) -> None:
    """Check that a mode tells by how much a row has changed, and that `k` is a number of rows or a share of them.

    Raises:
        InvalidInput: it does not tell, or `k` is neither.
    """
    if mode in (TrackingMode.ID_ONLY, TrackingMode.EMBEDDING_LAST):
        raise InvalidInput(
            f"mode {mode.value!r} does not tell by how much a row has changed: "
            f"use {TrackingMode.EMBEDDING.value!r}"
        )
    Amount().read("k", k.item() if isinstance(k, np.generic) else k)


def largest(norms: Mapping[str, torch.Tensor], k: float, *, per_table: bool) -> dict[str, torch.Tensor]:
    """Which rows have the largest norms, as a bool mask [n] by FQN. NaN is the largest.

    Args:
        norms: of the rows that have changed, [n] by FQN.
        k: how many rows, or below 1 which share of them, rounded up.
        per_table: of each table, instead of all together.
    """
    if per_table:
        return {fqn: _largest(of_table, k) for fqn, of_table in norms.items()}
    every = torch.cat(list(norms.values())) if norms else torch.empty(0)
    masks = torch.split(_largest(every, k), [len(of_table) for of_table in norms.values()])
    return dict(zip(norms, masks, strict=True))


def _largest(norms: torch.Tensor, k: float) -> torch.Tensor:
    # As floats, 0.07 of 100 rows are 7.000000000000001.
    rows = max(1, math.ceil(round(k * len(norms), 6))) if k < 1 else int(k)
    chosen = torch.zeros(len(norms), dtype=torch.bool)
    chosen[torch.topk(norms, min(rows, len(norms))).indices] = True
    return chosen


@dataclass(frozen=True, eq=False)
class DeltaRows:
    """The changed rows of one table that this rank holds, in host memory. Not to be written to.

    Attributes:
        ids: int64 [n], global row ids, ascending, each once.
        shards: those of the table that this rank holds, by column; most ranks hold all columns in one.
        shard_values: for each of these, current rows [n, its columns], or momentum: as many columns, or one where
            the optimizer keeps one value per row. None at all where the mode is ids only.
        first: `values` as they were at the consumer's cursor; NaN where it has none, as after a `resync`. None
            where the mode does not keep them.
        mode: how they were read.
        shard_digests: the digests of each shard's current rows, int64 [n]; none for rows that were gathered from
            host memory, of which the publisher makes them in its own thread.
    """

    ids: torch.Tensor
    shards: list[Shard]
    shard_values: list[torch.Tensor]
    first: torch.Tensor | None
    mode: TrackingMode
    shard_digests: list[torch.Tensor] = field(default_factory=list)

    @property
    def columns(self) -> list[tuple[int, int]]:
        """Offset and number of the columns held, by shard."""
        return [(shard.col_offset, shard.cols) for shard in self.shards]

    @cached_property
    def values(self) -> torch.Tensor | None:
        """Those of all shards side by side, [n, columns held]; a copy if there are several. None if ids only."""
        if len(self.shard_values) > 1:
            return torch.cat(self.shard_values, dim=1)
        return self.shard_values[0] if self.shard_values else None

    def batches(self) -> list[RowBatch]:
        """The current rows of each shard, as they are published: no copies.

        Raises:
            InvalidInput: the mode, or a read of ids only, has no current rows.
        """
        if not self.shard_values or not has_rows(self.mode):
            raise InvalidInput(
                f"this delta, of mode {self.mode.value!r}, has no current rows: "
                f"use {TrackingMode.EMBEDDING_LAST.value!r} and read it with get_delta"
            )
        ids = self.ids.numpy()
        digests = [each.numpy().view(np.uint64) for each in self.shard_digests]
        return [
            RowBatch(shard, ids, values.numpy(), digests=made)
            for shard, values, made in zip(self.shards, self.shard_values, digests or repeat(None), strict=False)
        ]

    @property
    def states(self) -> torch.Tensor | None:
        """The `states` of TorchRec's tracker: first rows, the last momentum, or by how much momentum has grown."""
        if self.values is None or self.first is None:
            return self.values
        return self.first if self.mode is TrackingMode.EMBEDDING else self.values - self.first

    def norms(self) -> torch.Tensor:
        """L2 norm of what has changed in each row, or of the last momentum: float32 [n].

        Raises:
            InvalidInput: the mode, or a read of ids only, has no values to tell it from.
        """
        check_ranked(self.mode)
        if self.values is None:
            raise InvalidInput("this delta has ids only: read it with get_delta")
        changed = self.values.float() if self.first is None else self.values.float() - self.first.float()
        norms: torch.Tensor = torch.linalg.vector_norm(changed, dim=1)
        return norms

    def select(self, rows: torch.Tensor) -> "DeltaRows":
        """Some of the rows, by a bool mask [n]."""
        by_shard = [values[rows] for values in self.shard_values]
        first = None if self.first is None else self.first[rows]
        digests = [each[rows] for each in self.shard_digests]
        return DeltaRows(self.ids[rows], self.shards, by_shard, first, self.mode, digests)


@dataclass(frozen=True, eq=False)
class DeletedRows:
    """The deleted rows of one table that this rank holds.

    Attributes:
        ids: int64 [n], global row ids, ascending, each once.
        shards: those of the table that this rank holds, by column.
    """

    ids: torch.Tensor
    shards: list[Shard]

    def batches(self) -> list[RowBatch]:
        """The deletes of each shard, as they are published."""
        return [RowBatch.deletes(shard, self.ids.numpy()) for shard in self.shards]


@dataclass(frozen=True, eq=False)
class Token:
    """Stands for a delta that was read. It acknowledges that delta for its consumer, and nothing else.

    Attributes:
        consumer: its name.
        cursor: everything marked up to here was in the delta, or is carried over.
        rows: those of the delta, by FQN.
        deletes: likewise.
        carried: global ids that were due but left for later, by FQN.
        registration: tells the consumer from another of its name, before or after it.
    """

    consumer: str
    cursor: int
    rows: Mapping[str, DeltaRows]
    deletes: Mapping[str, DeletedRows]
    carried: Mapping[str, torch.Tensor]
    registration: object


@dataclass(frozen=True, eq=False)
class Delta:
    """What has changed for a consumer since its cursor.

    Attributes:
        rows: changed rows by table FQN; tables without any are left out.
        token: to be given to `Tracker.acknowledge` once rows and deletes have safely arrived.
        deletes: deleted rows by table FQN, likewise; a row that has changed since is among `rows` again.
    """

    rows: Mapping[str, DeltaRows]
    token: Token
    deletes: Mapping[str, DeletedRows]

    @property
    def ids(self) -> dict[str, torch.Tensor]:
        """Global ids of the changed rows by table FQN, without those of deletes."""
        return {fqn: rows.ids for fqn, rows in self.rows.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values, first ones too."""
        tensors = [part for rows in self.rows.values() for part in (rows.ids, *rows.shard_values, rows.first)]
        tensors += [deleted.ids for deleted in self.deletes.values()]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def without_values(self) -> "Delta":
        """The same with ids alone."""
        rows = {fqn: replace(rows, shard_values=[], first=None) for fqn, rows in self.rows.items()}
        return replace(self, rows=rows)

    def batches(self) -> list[RowBatch]:
        """The current rows and the deletes of all tables, shard by shard, as they are published: no copies.

        Raises:
            InvalidInput: the mode, or a read of ids only, has no current rows.
        """
        batches = [batch for rows in self.rows.values() for batch in rows.batches()]
        return batches + [batch for deleted in self.deletes.values() for batch in deleted.batches()]


class PendingDelta:
    """What `Tracker.begin_delta` returns. By one thread at a time."""

    def __init__(self, arrival: torch.cuda.Event | None, finish: Callable[[], Delta]) -> None:
        """One of which `finish` makes a delta after its `arrival`; None = it has arrived."""
        self._arrival, self._finish = arrival, finish

    @property
    def arrived(self) -> bool:
        """Whether `result` need not wait. Asking waits for nothing."""
        return self._arrival is None or bool(self._arrival.query())  # type: ignore[no-untyped-call]

    @cached_property
    def result(self) -> Delta:
        """The delta; waits until it has arrived."""
        if self._arrival:
            self._arrival.synchronize()
        return self._finish()

    def then(self, function: Callable[[Delta], Delta]) -> "PendingDelta":
        """The same, with a function applied to the delta."""
        return PendingDelta(self._arrival, lambda: function(self._finish()))
