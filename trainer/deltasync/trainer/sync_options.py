"""Options and statistics of publishing a model."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from deltasync.base.arguments import check_name
from deltasync.base.errors import InvalidInput
from deltasync.client import Endpoint, Part, Position
from deltasync.trainer.checks import check_names, check_whole

_CUTS_IN_STATS = 100_000

# The metrics of `DeltaSync.metrics`, by name.
COUNTERS = {
    "cuts": "Sealed cuts of this rank.",
    "rows": "Rows of its sealed parts.",
    "bytes": "Bytes of ids and values of its sealed parts.",
    "absorbed": "Cuts that were skipped because the previous cut was not sealed yet.",
    "refusals": "Number of times that publishing was refused or impossible.",
    "connections": "Connections to the service.",
    "step_seconds": "Seconds of the training thread in DeltaSync.step.",
    "tracking_seconds": "Seconds of all threads in tracking changed rows.",
}
GAUGES = {
    "version": "The last sealed version, as far as this rank knows.",
    "publish_seconds": "Seconds from the last sealed cut's rows in host memory to its seal.",
    "unpublished_steps": "Steps since the last sealed cut.",
    "unpublished_seconds": "Seconds since the end of the last published step; 0 if nothing is unpublished.",
    "refused_seconds": "Seconds since publishing was first refused; 0 if it is not refused now.",
    "connected": "1 while the service answers.",
    "failed_attempts": "Attempts to connect since the service stopped answering.",
    "disconnected_seconds": "Seconds since the service stopped answering.",
}


class OnRefusal(Enum):
    """What a step does if publishing is refused or impossible, for example because a row has NaN."""

    CONTINUE = "continue"
    """Training continues, rows stay marked, and a later step tries to publish them (see `DeltaSync.trouble`). The
    step raises the error only if the service refuses the run for good (`RunRefused`)."""
    RAISE = "raise"
    """The step raises the error."""


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """What to publish, where, and how often. All options except `service` must be the same on all ranks.

    Attributes:
        service: the gRPC endpoint of the service, or its address HOST:PORT.
        model: name of the model.
        publish_every: steps between cuts. While the previous cut is not sealed, a cut is skipped, and the next
            one publishes its rows.
        on_refusal: what a step does if publishing is refused or impossible. `flush` and `close` always raise.
        dense: whether to also publish parameters and buffers outside embedding tables.
        fqns_to_skip: tables not to publish, each by its FQN, its name, one of its parents or any consecutive parts
            of its FQN. Rows from an earlier run stay in the service.
        start_over: publish this model's rows although the service's model was rolled back and this run does not go
            on from that version or an earlier one. Set it for one start, if you know that the rows are good.
        verify: for debugging a model: compare all rows with a copy at every cut, and raise if changed rows would
            not be published (see `TrackerOptions.verify`). Ignores `on_refusal`.
    """

    service: Endpoint | str
    model: str
    publish_every: int = 10
    on_refusal: OnRefusal = OnRefusal.CONTINUE
    dense: bool = True
    fqns_to_skip: Collection[str] = ()
    verify: bool = False
    start_over: bool = False

    def __post_init__(self) -> None:
        Endpoint.of_grpc(self.service)
        check_name("model", self.model)
        check_whole("publish_every", self.publish_every)
        check_names("fqns_to_skip", self.fqns_to_skip)
        if not isinstance(self.on_refusal, OnRefusal):
            raise InvalidInput(f"on_refusal: {self.on_refusal!r}, expected an OnRefusal")

    @property
    def of_all_ranks(self) -> dict[str, Any]:
        """The options that must be the same on all ranks."""
        return {name: value for name, value in vars(self).items() if name != "service"}


@dataclass
class SyncStats:
    """Statistics of this rank's publishing.

    Attributes:
        cuts: version, step and end of the step (nanoseconds since 1970) of the last 100,000 sealed cuts.
        sealed: number of sealed cuts.
        published_step: step of the last sealed cut, or of a checkpoint that was loaded later; 0 at first.
        absorbed: cuts that were skipped because the previous cut was not sealed yet.
        refusals: number of times that publishing was refused or impossible.
        rows: rows of the sealed parts.
        bytes: bytes of ids and values of the sealed parts.
        publish_seconds: time from the last sealed cut's rows in host memory to its seal.
        step_seconds: time of the training thread in `DeltaSync.step`.
    """

    cuts: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=_CUTS_IN_STATS), repr=False)
    sealed: int = 0
    published_step: int = 0
    absorbed: int = 0
    refusals: int = 0
    rows: int = 0
    bytes: int = 0
    publish_seconds: float = 0.0
    step_seconds: float = 0.0

    def add(self, position: Position, part: Part, seconds: float) -> None:
        """Count a sealed part, which took `seconds`."""
        self.publish_seconds = seconds
        self.cuts.append((position.number, part.step, part.step_end_unix_ns))
        self.sealed, self.published_step = self.sealed + 1, part.step
        self.rows += sum(map(len, part.rows))
        self.bytes += part.nbytes
