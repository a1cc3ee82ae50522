"""What to publish of a model, and what was published."""

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


class OnRefusal(Enum):
    """What a step does when publishing is refused or impossible: by a row of NaN, say, or by another run."""

    CONTINUE = "continue"
    """Training goes on, rows stay marked, and a later step publishes them if it can (`DeltaSync.trouble`)."""
    RAISE = "raise"
    """The step raises the error."""


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """What to publish, where to and how often. All but `service` must be the same on all ranks.

    Attributes:
        service: the service's gRPC endpoint; an address alone is HOST:PORT.
        model: name of the set of tables.
        publish_every: steps between cuts. If the last cut is not sealed by then, this one is left out, and the
            next one publishes its rows.
        on_refusal: what a step does when publishing is refused or impossible; `flush` and `close` always raise.
        dense: whether to publish the parameters and buffers outside of embedding tables too.
        fqns_to_skip: tables not to publish, each by its FQN, its name, one of its parents or any run of parts of
            its FQN. What an earlier run has published of them stays as it is.
        verify: to debug a model: compare all rows with a copy at every cut, and raise if changed rows would not be
            published (`TrackerOptions.verify`), whatever `on_refusal` is.
    """

    service: Endpoint | str
    model: str
    publish_every: int = 10
    on_refusal: OnRefusal = OnRefusal.CONTINUE
    dense: bool = True
    fqns_to_skip: Collection[str] = ()
    verify: bool = False

    def __post_init__(self) -> None:
        Endpoint.of_grpc(self.service)
        check_name("model", self.model)
        check_whole("publish_every", self.publish_every)
        check_names("fqns_to_skip", self.fqns_to_skip)
        if not isinstance(self.on_refusal, OnRefusal):
            raise InvalidInput(f"on_refusal: {self.on_refusal!r}, expected an OnRefusal")

    @property
    def of_all_ranks(self) -> dict[str, Any]:
        """The options that must be the same on all ranks, which cut, compare buffers and raise together."""
        return {name: value for name, value in vars(self).items() if name != "service"}


@dataclass
class SyncStats:
    """What was published so far, by this rank.

    Attributes:
        cuts: version, step and end of the step (nanoseconds since 1970) of the last 100,000 sealed cuts.
        sealed: how many there were.
        published_step: the last of their steps, or that of a checkpoint that was loaded after that; 0 before.
        absorbed: cuts that were left out because the one before was not sealed yet.
        refusals: how often publishing was refused, or impossible.
        rows: rows of the sealed parts.
        bytes: bytes of their ids and values.
        publish_seconds: how long the last sealed cut took, from its rows in host memory on.
        step_seconds: time that the thread that trains has spent in `DeltaSync.step`.
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
        """Count a sealed part; sealing took `seconds`."""
        self.publish_seconds = seconds
        self.cuts.append((position.number, part.step, part.step_end_unix_ns))
        self.sealed, self.published_step = self.sealed + 1, part.step
        self.rows += sum(map(len, part.rows))
        self.bytes += part.nbytes
