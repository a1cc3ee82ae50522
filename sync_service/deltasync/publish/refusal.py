"""The last cut, where it was refused for what is in it."""

from dataclasses import dataclass, field

from deltasync.core.steady_clock import steady_ns


@dataclass(frozen=True)
class Refusal:
    """When a cut was refused, by `steady_ns`, and why."""

    reason: str
    at_ns: int = field(default_factory=steady_ns)
