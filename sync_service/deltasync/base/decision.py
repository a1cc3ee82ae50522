"""What a pure decision returns: yes or no, and why."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """A yes or no, and why."""

    yes: bool
    reason: str
