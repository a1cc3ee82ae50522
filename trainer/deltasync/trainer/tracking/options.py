"""Options of the tracker."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from deltasync.base.errors import InvalidInput
from deltasync.trainer.checks import check_names
from deltasync.trainer.tracking.shards import TrackedShard, TrackedTable

DEFAULT_CONSUMER = "default"


class TrackingMode(Enum):
    """The values that reads return in addition to ids, named as in TorchRec's tracker.

    Modes with first values (the values at the consumer's cursor) cost a copy in host memory for each consumer.
    """

    ID_ONLY = "id_only"
    """Nothing."""
    EMBEDDING_LAST = "embedding_last"
    """Current rows."""
    EMBEDDING = "embedding"
    """Current rows and first rows."""
    MOMENTUM_LAST = "momentum_last"
    """The fused optimizer's current momentum."""
    MOMENTUM_DIFF = "momentum_diff"
    """The fused optimizer's current momentum and first momentum."""
    ROWWISE_ADAGRAD = "rowwise_adagrad"
    """Like MOMENTUM_DIFF, only for row-wise Adagrad: its sum of squared gradients."""


@dataclass(frozen=True, kw_only=True)
class TrackerOptions:
    """What to track, and for whom.

    Attributes:
        consumers: names of the first consumers; `add_consumer` adds more.
        mode: what their reads return in addition to ids.
        delete_on_read: acknowledge each read at once, as TorchRec's tracker does. If its rows get lost afterwards,
            the tracker does not offer them again.
        auto_compact: stamp the rows of a step during the next step, while pooled rows are sent to other ranks,
            instead of at the end of the step.
        fqns_to_skip: tables not to track, each by its FQN, its name, one of its parents or any consecutive parts
            of its FQN.
        dense: also track the parameters and buffers outside embedding tables, each as a small table.
        id_maps: also track managed collision's maps from raw ids to rows.
        replicas: also track tables and parameters of which every rank has a copy. Only one rank needs to publish
            them.
        verify: for debugging a model: keep a copy of every row, compare all rows at every read, and raise
            `Contradiction` with the rows that have changed without a mark. Costs the memory of a second model, and
            the time to read both.
    """

    consumers: Sequence[str] = (DEFAULT_CONSUMER,)
    mode: TrackingMode = TrackingMode.ID_ONLY
    delete_on_read: bool = False
    auto_compact: bool = False
    fqns_to_skip: Collection[str] = ()
    dense: bool = False
    id_maps: bool = False
    replicas: bool = True
    verify: bool = False

    def __post_init__(self) -> None:
        check_names("consumers", self.consumers)
        check_names("fqns_to_skip", self.fqns_to_skip)
        if not isinstance(self.mode, TrackingMode):
            raise InvalidInput(f"mode: {self.mode!r}, expected a TrackingMode")

    @property
    def of_all_ranks(self) -> dict[str, Any]:
        """The options that must be the same on all ranks."""
        return {name: value for name, value in vars(self).items() if name not in ("dense", "replicas")}


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
    """Whether reads in the mode return current rows."""
    return mode in _CONTENTS and not _CONTENTS[mode].momentum


def sources(table: TrackedTable, mode: TrackingMode) -> list[torch.Tensor]:
    """The live tensors from which a mode reads a table's rows, by shard; empty for ids only.

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
            f"mode {mode.value!r}: the fused optimizer of table {table.name!r} is not row-wise Adagrad; "
            f"skip it (fqns_to_skip) or use {TrackingMode.MOMENTUM_DIFF.value!r}"
        )
    return tracked.momentum
