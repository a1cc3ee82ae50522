"""What a reader of a target sees, and of which version it is."""

import time
from dataclasses import dataclass, field
from typing import Literal

from deltasync.core.errors import DeltasyncError, InvalidInput
from deltasync.core.event_time import seconds_behind
from deltasync.core.position import Position

Reads = Literal["pause", "copies"]


class TornTarget(DeltasyncError):
    """A target cannot be read: a release was not written to its end, or its first copy is still arriving."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Which version a target's rows are of, all of them.

    Attributes:
        position: the one that the last release took the target to; empty before any.
        version: the model's version that it was made of; 0 before any.
        step: the trainer's step of that version; None before any release.
        step_end_unix_ns: when that step ended, nanoseconds since 1970; None before any release.
        event_time_unix_ns: the time of the newest event that the model had been trained on at that version,
            nanoseconds since 1970; None where the trainer does not say it.
    """

    position: Position = field(default_factory=Position)
    version: int = 0
    step: int | None = None
    step_end_unix_ns: int | None = None
    event_time_unix_ns: int | None = None

    @property
    def age_seconds(self) -> float | None:
        """Seconds since the newest event that the model had been trained on; where the trainer does not say it,
        since its step ended; None where neither is known. By the clock of this machine, and never negative.
        """
        known = self.step_end_unix_ns if self.event_time_unix_ns is None else self.event_time_unix_ns
        return seconds_behind(known, time.time_ns())


def number_of_copies(reads: str) -> int:
    """How many copies of its rows a target keeps.

    Raises:
        InvalidInput: no such way of reading.
    """
    copies = {"pause": 1, "copies": 2}
    if reads not in copies:
        raise InvalidInput(f"reads: {reads!r}, expected one of {', '.join(copies)}")
    return copies[reads]
