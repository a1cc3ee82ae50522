"""Options of the tracker."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from deltasync.core.errors import InvalidInput
from deltasync.trainer.checks import check_names
from deltasync.trainer.tracking.modes import TrackingMode

DEFAULT_CONSUMER = "default"


@dataclass(frozen=True, kw_only=True)
class TrackerOptions:
    """What to track, and for whom.

    Attributes:
        consumers: their names; more can be added later.
        mode: what they are given beside ids.
        delete_on_read: a read acknowledges itself at once, as in TorchRec's tracker: its rows are not offered
            again, even if they get lost afterwards.
        auto_compact: stamp the rows of a step while the next one's pooled rows are on their way to other ranks,
            instead of at the step's end.
        fqns_to_skip: tables that are not tracked, each by its FQN, its name, one of its parents or any run of
            parts of its FQN.
        dense: track the parameters and buffers outside of embedding tables too, each as a small table.
        id_maps: track the maps from raw ids to rows that managed collision keeps.
        replicas: track tables and parameters of which every rank has a copy; one rank is enough to publish them.
        verify: keep a copy of every row, and compare all of them at every read: rows that have changed and are not
            marked raise `Contradiction`, which names them. To find out whether all writes of a model are followed;
            it costs the memory of a second model, and the time to read both.
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
        """Those that must be the same on all ranks; one may track what all have copies of."""
        return {name: value for name, value in vars(self).items() if name not in ("dense", "replicas")}
