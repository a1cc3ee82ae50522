"""Options of the tracker."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from deltasync.base.errors import InvalidInput
from deltasync.trainer.checks import check_names

DEFAULT_CONSUMER = "default"


class TrackingMode(Enum):
    """The values that reads return in addition to ids, named as in TorchRec's tracker."""

    ID_ONLY = "id_only"
    """Nothing."""
    EMBEDDING_LAST = "embedding_last"
    """Current rows."""
    EMBEDDING = "embedding"
    """Current rows, and first values: those at the consumer's cursor. Each consumer costs a copy of all rows in
    host memory."""


@dataclass(frozen=True, kw_only=True)
class TrackerOptions:
    """What to track, and for whom.

    Attributes:
        consumers: names of the first consumers; `add_consumer` adds more.
        mode: what their reads return in addition to ids.
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
