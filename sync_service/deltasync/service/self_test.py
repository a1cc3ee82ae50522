"""What a service's probe has found."""

from dataclasses import dataclass, field

from deltasync.base.clock import steady_ns
from deltasync.base.words import duration

# The model that it publishes, and the consumer by which it reads that back; of several processes, of each its own.
PROBE = "deltasync-probe"

# A row that takes longer does not count as one that comes back.
PATIENCE_SECONDS = 10.0


def probe_of(process: str) -> str:
    """What the model and the consumer of a process's probe are called; one that is alone has no name."""
    return f"{PROBE}-{process}" if process else PROBE


@dataclass
class ProbeStatus:
    """What a probe has found. Written by its own thread, read by any.

    Attributes:
        name: of its model and its consumer.
        every_seconds: how often a row is to come back.
        seconds: how long it took last from publishing a row to holding it again; None before it has.
        since_ns: when that was, or else when it began, by `steady_ns`.
        turns: how often it has.
        failures: how often it has not.
        failure: why the last time it has not; empty if it has.
        shortcoming: what keeps its consumer from being made; empty if nothing does.
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
        """Note that a row has come back."""
        self.seconds = seconds
        self.since_ns = steady_ns()
        self.failure = ""
        self.turns += 1

    def note_failure(self, failure: str) -> None:
        """Note that one has not."""
        self.failures += 1
        self.failure = failure

    @property
    def trouble(self) -> str:
        """Why nobody can say that rows go all the way; empty if one has, and not too long ago."""
        if told := "; ".join(filter(None, (self.failure, self.shortcoming))):
            return told
        if self.seconds is None:
            return "no row has come back yet"
        late = self.age_seconds > self.every_seconds + PATIENCE_SECONDS
        return f"no row has come back for {duration(self.age_seconds)}" if late else ""

    @property
    def age_seconds(self) -> float:
        """How long ago a row has come back; or for how long none has."""
        return round((steady_ns() - self.since_ns) / 1e9, 3)
