"""What a tracker is told."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from deltasync.core.errors import InvalidInput
from deltasync.trainer.checks import check_names
from deltasync.trainer.tracking.modes import TrackingMode

DEFAULT_CONSUMER = "default"


@dataclass(frozen=True, kw_only=True)
class TrackerOptions:
    """What to track, and for whom.

    Attributes:
        consumers: names of those who read, to begin with.
        mode: what they are given beside ids.
        delete_on_read: a read acknowledges itself at once, as in TorchRec's tracker: what it returned is not
            offered again, wherever it gets lost.
        auto_compact: stamp the rows of a step while the next one's pooled rows are on their way to other ranks,
            instead of at the step's end.
        fqns_to_skip: tables that are not tracked, each by its FQN, its name, one of its parents or any run of
            parts of its FQN.
        dense: track the parameters outside of embedding tables too, each as a small table.
        replicas: track what every rank holds alike; one rank is enough to publish it.
    """

    consumers: Sequence[str] = (DEFAULT_CONSUMER,)
    mode: TrackingMode = TrackingMode.ID_ONLY
    delete_on_read: bool = False
    auto_compact: bool = False
    fqns_to_skip: Collection[str] = ()
    dense: bool = False
    replicas: bool = True

    def __post_init__(self) -> None:
        check_names("consumers", self.consumers)
        check_names("fqns_to_skip", self.fqns_to_skip)
        if not isinstance(self.mode, TrackingMode):
            raise InvalidInput(f"mode: {self.mode!r}, expected a TrackingMode")
