"""Modes: what a consumer is given beside the ids of changed rows."""

from dataclasses import dataclass
from enum import Enum

import torch

from deltasync.core.errors import InvalidInput
from deltasync.trainer.tracking.shards import TrackedShard, TrackedTable


class TrackingMode(Enum):
    """What a consumer is given beside ids, named as in TorchRec's tracker. Values are those of the current step.

    Modes with first values cost a copy of what is read, in host memory, for each consumer.
    """

    ID_ONLY = "id_only"
    """Nothing."""
    EMBEDDING_LAST = "embedding_last"
    """Current rows."""
    EMBEDDING = "embedding"
    """Current rows, and the first since the consumer's cursor."""
    MOMENTUM_LAST = "momentum_last"
    """The fused optimizer's current momentum."""
    MOMENTUM_DIFF = "momentum_diff"
    """The fused optimizer's current momentum, and the first since the consumer's cursor."""
    ROWWISE_ADAGRAD = "rowwise_adagrad"
    """As MOMENTUM_DIFF, for row-wise Adagrad alone: its sum of squared gradients."""


@dataclass(frozen=True)
class _Contents:
    momentum: bool
    first: bool


_CONTENTS = {
    TrackingMode.EMBEDDING_LAST: _Contents(momentum=False, first=False),
    TrackingMode.EMBEDDING: _Contents(momentum=False, first=True),
    TrackingMode.MOMENTUM_LAST: _Contents(momentum=True, first=False),
    TrackingMode.MOMENTUM_DIFF: _Contents(momentum=True, first=True),
    TrackingMode.ROWWISE_ADAGRAD: _Contents(momentum=True, first=True),
}


def keeps_first(mode: TrackingMode) -> bool:
    """Whether consumers of the mode keep first values."""
    return mode in _CONTENTS and _CONTENTS[mode].first


def has_rows(mode: TrackingMode) -> bool:
    """Whether consumers of the mode are given current rows."""
    return mode in _CONTENTS and not _CONTENTS[mode].momentum


def sources(table: TrackedTable, mode: TrackingMode) -> list[torch.Tensor]:
    """The live tensors a mode reads a table's rows from, by shard; none for ids only.

    Raises:
        InvalidInput: the table has no such state.
    """
    if mode not in _CONTENTS:
        return []
    if not _CONTENTS[mode].momentum:
        return [tracked.weight for tracked in table.shards]
    return [_momentum(table, tracked, mode) for tracked in table.shards]


def _momentum(table: TrackedTable, tracked: TrackedShard, mode: TrackingMode) -> torch.Tensor:
    if tracked.momentum is None:
        raise InvalidInput(
            f"mode {mode.value!r}: table {table.name!r} has no momentum in a fused optimizer; "
            f"skip it (fqns_to_skip) or use another mode"
        )
    if mode is TrackingMode.ROWWISE_ADAGRAD and not tracked.rowwise_adagrad:
        raise InvalidInput(
            f"mode {mode.value!r}: the fused optimizer of table {table.name!r} is another one; "
            f"skip it (fqns_to_skip) or use {TrackingMode.MOMENTUM_DIFF.value!r}"
        )
    return tracked.momentum
