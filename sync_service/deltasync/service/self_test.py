"""The results of a service's probe."""

from dataclasses import dataclass, field

from deltasync.base.clock import steady_ns
from deltasync.base.words import duration

# Name of the probe's model and of its consumer. In a cluster, each process adds its own name.
PROBE = "deltasync-probe"

# A row that takes longer counts as a failure.
PATIENCE_SECONDS = 10.0


def probe_of(process: str) -> str:
    """Name of the model and consumer of a process's probe; a single process has the empty name."""
    return f"{PROBE}-{process}" if process else PROBE


@dataclass
class ProbeStatus:
    """The results of a probe. Written by its own thread, read by any.

    Attributes:
        name: name of its model and consumer.
        every_seconds: interval between rows.
        seconds: time from publishing the last row until the replica had it; None before the first.
        since_ns: when that row arrived, or else when the probe began, by `steady_ns`.
        turns: number of rows that arrived.
        failures: number of rows that did not arrive in time.
        failure: why the last row did not arrive; empty if it did.
        shortcoming: why its consumer cannot be created; empty if it can.
    """

    name: str = PROBE
    every_seconds: float = 0.0
    seconds: float | None = None
    since_ns: int = field(default_factory=steady_ns)
    turns: int = 0
    failures: int = 0
    failure: str = ""
    shortcoming: str = ""

    def note(self, seconds: float) -> None:
        """Record that a row has arrived."""
        self.seconds = seconds
        self.since_ns = steady_ns()
        self.failure = ""
        self.turns += 1

    def note_failure(self, failure: str) -> None:
        """Record that a row has not arrived."""
        self.failures += 1
        self.failure = failure

    @property
    def trouble(self) -> str:
        """Why the probe fails; empty if a row has arrived recently."""
        if reasons := "; ".join(filter(None, (self.failure, self.shortcoming))):
            return reasons
        if self.seconds is None:
            return "no row has arrived yet"
        late = self.age_seconds > self.every_seconds + PATIENCE_SECONDS
        return f"no row has arrived for {duration(self.age_seconds)}" if late else ""

    @property
    def age_seconds(self) -> float:
        """Seconds since the last row arrived, or since the probe began."""
        return round((steady_ns() - self.since_ns) / 1e9, 3)
