"""Points of a history, and whether a replica can go on from one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """A point of one history: of a model's a version, of a view's a release; 0 means "holds nothing"."""

    history: str = ""
    number: int = 0


@dataclass(frozen=True)
class Decision:
    """A yes or no, and why."""

    yes: bool
    reason: str


def resume(held: Position, history: str, head: int, *, unit: str = "version") -> Decision:
    """Whether a replica that holds `held` can go on from there; otherwise it needs everything.

    Args:
        held: what the replica says that it holds.
        history: the history of the feed.
        head: the newest number in it.
        unit: what numbers of this history count.
    """
    if held.number == 0:
        return Decision(False, "the replica holds nothing")
    if held.history != history:
        return Decision(False, f"the replica holds history {held.history}, the service history {history}")
    if held.number > head:
        return Decision(False, f"the replica holds {unit} {held.number}, the newest one is only {head}")
    return Decision(True, f"the replica holds {unit} {held.number}")
