"""What a soak is asked for."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SoakOptions:
    """What to run.

    Attributes:
        seconds: how long faults come.
        seed: of the schedule.
        mean_gap: seconds from one fault to the next.
        small: few processes and no TorchRec.
        keep: keep the folder of logs, journals and results.
    """

    seconds: float = 300.0
    seed: int = 0
    mean_gap: float = 3.5
    small: bool = False
    keep: bool = False
