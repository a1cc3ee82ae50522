"""The result of a decision."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """A yes or no, and the reason."""

    yes: bool
    reason: str
