"""Whether a snapshot goes with what a log has: pure decisions."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from deltasync.snapshots.manifest import Manifest


class Fit(Enum):
    """How a snapshot goes with a log."""

    FITS = "fits"  # The log goes on from it.
    AHEAD = "ahead"  # The log has lost what it has.
    FORKED = "forked"  # It is of a past that the log does not have.
    GAP = "gap"  # The log has dropped what comes after it.


@dataclass(frozen=True)
class LogEnd:
    """What a log has of a model.

    Attributes:
        seals: the checksums of the seals it has, by version.
        cut: the version up to which it has dropped the rows of cuts.
    """

    seals: Mapping[int, int]
    cut: int

    @property
    def newest(self) -> int:
        """The newest version it has; 0 where it has none."""
        return max(self.seals, default=0)


@dataclass(frozen=True)
class Fitness:
    """How a snapshot goes with a log, and why."""

    fit: Fit
    reason: str


def fitness(manifest: Manifest, seals: Mapping[int, int], log: LogEnd) -> Fitness:
    """How a snapshot, which has `seals` (checksums by version), goes with a log."""
    text = f"the snapshot of version {manifest.version}"
    if manifest.version > log.newest:
        if log.newest and seals.get(log.newest) != log.seals[log.newest]:
            return Fitness(Fit.FORKED, f"{text} is of another past than version {log.newest} of the log")
        return Fitness(Fit.AHEAD, f"{text} is ahead of the log, whose newest is {log.newest}")
    if log.seals.get(manifest.version, manifest.seal) != manifest.seal:
        return Fitness(Fit.FORKED, f"{text} is of another past than that of the log")
    if log.cut > manifest.version:
        return Fitness(Fit.GAP, f"{text} is older than what the log has dropped, up to version {log.cut}")
    return Fitness(Fit.FITS, f"the log goes on from {text}")
