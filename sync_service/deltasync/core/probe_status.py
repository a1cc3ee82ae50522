"""What a service's probe has found."""

from dataclasses import dataclass, field

from deltasync.core.steady_clock import steady_ns

# The model that it publishes, and the consumer by which it reads that back; of several processes, of each its own.
PROBE = "deltasync-probe"


@dataclass
class ProbeStatus:
    """What a probe has found. Written by its own thread, read by any.

    Attributes:
        name: of its model and its consumer.
        seconds: how long it took last from publishing a row to holding it again; None before it has.
        since_ns: when that was, or else when it began, by `steady_ns`.
        turns: how often it has.
        failures: how often it has not.
        trouble: why the last time it has not; empty if it has.
    """

    name: str = PROBE
    seconds: float | None = None
    since_ns: int = field(default_factory=steady_ns)
    turns: int = 0
    failures: int = 0
    trouble: str = ""

    def note(self, seconds: float) -> None:
        """Note that a row has come back."""
        self.seconds, self.since_ns, self.trouble = seconds, steady_ns(), ""
        self.turns += 1

    def note_failure(self, trouble: str) -> None:
        """Note that one has not."""
        self.failures += 1
        self.trouble = trouble

    @property
    def age_seconds(self) -> float:
        """How long ago a row has come back; or for how long none has."""
        return round((steady_ns() - self.since_ns) / 1e9, 3)
