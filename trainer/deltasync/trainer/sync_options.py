"""What to publish of a model, and what was published."""

from collections import deque
from dataclasses import dataclass, field

from deltasync.client import Endpoint
from deltasync.trainer.checks import check_whole

_CUTS_IN_STATS = 100_000


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """What to publish, where to and how often.

    Attributes:
        service: where the service answers gRPC; an address alone is HOST:PORT.
        model: name of the set of tables.
        publish_every: steps between cuts. Where the last cut is not sealed by then, this one is left out: the next
            one publishes its rows.
        dense: whether to publish the parameters and buffers outside of embedding tables too.
        verify: to debug a model: compare all rows with a copy at every cut, and raise where some have changed that
            would not be published (`TrackerOptions.verify`).
    """

    service: Endpoint | str
    model: str
    publish_every: int = 10
    dense: bool = True
    verify: bool = False

    def __post_init__(self) -> None:
        Endpoint.of_grpc(self.service)
        check_whole("publish_every", self.publish_every)


@dataclass
class SyncStats:
    """What was published so far, by this rank.

    Attributes:
        cuts: version, step and end of the step (nanoseconds since 1970) of the last 100,000 sealed cuts.
        absorbed: cuts that were left out because the one before was not sealed yet.
        rows: rows of the sealed parts.
        bytes: bytes of their ids and values.
        step_seconds: time that the thread that trains has spent in `DeltaSync.step`.
    """

    cuts: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=_CUTS_IN_STATS))
    absorbed: int = 0
    rows: int = 0
    bytes: int = 0
    step_seconds: float = 0.0
