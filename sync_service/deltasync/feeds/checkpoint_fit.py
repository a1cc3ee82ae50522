"""Whether a checkpoint goes with what a log has: pure decisions."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from deltasync.core.position import line_of


class Fit(Enum):
    """How a checkpoint goes with a log."""

    FITS = "fits"  # The log goes on from it.
    AHEAD = "ahead"  # The log has lost what it has.
    FORKED = "forked"  # It is of a past that the log does not have.
    GAP = "gap"  # The log has dropped, or lost, what comes after it.


@dataclass(frozen=True)
class LogEnd:
    """What a log has of a model.

    Attributes:
        history: the id of the model's history.
        seals: the checksums of the seals it has, by version.
        dropped: the version up to which it has dropped the rows of cuts.
    """

    history: str
    seals: Mapping[int, int]
    dropped: int

    @property
    def newest(self) -> int:
        """The newest version it has; 0 where it has none."""
        return max(self.seals, default=0)


@dataclass(frozen=True)
class Fitness:
    """How a checkpoint goes with a log, and why."""

    fit: Fit
    reason: str


def fitness(version: int, history: str, seals: Mapping[int, int], log: LogEnd) -> Fitness:
    """How a checkpoint of a version of some history, which has `seals` (checksums by version), goes with a log."""
    text = f"the checkpoint of version {version}"
    if line_of(history) != line_of(log.history):
        return Fitness(Fit.FORKED, f"{text} is of another history than the log")
    if version > log.newest:
        if log.newest and seals.get(log.newest, log.seals[log.newest]) != log.seals[log.newest]:
            return Fitness(Fit.FORKED, f"{text} is of another past than version {log.newest} of the log")
        return Fitness(Fit.AHEAD, f"{text} is ahead of the log, whose newest is {log.newest}")
    if log.seals.get(version, seals[version]) != seals[version]:
        return Fitness(Fit.FORKED, f"{text} is of another past than that of the log")
    if log.dropped > version:
        return Fitness(Fit.GAP, f"{text} is older than what the log has dropped, up to version {log.dropped}")
    return Fitness(Fit.FITS, f"the log goes on from {text}")
