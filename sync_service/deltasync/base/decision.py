"""The result of a decision."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """A yes or no, and why."""

    yes: bool
    reason: str
