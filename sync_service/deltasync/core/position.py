"""Positions in a history, whether a replica can continue from one, and ids of runs."""

import re
import uuid
from dataclasses import dataclass, field

from deltasync.base.decision import Decision


@dataclass(frozen=True)
class Position:
    """A position in one history: a version of a model, or a release of a view; 0 means "holds nothing".

    `seal` is the checksum of its seal (`Seal.checksum`), or 0 if unknown. `can_continue` compares it. Positions
    with equal history and number are equal even if only one of them knows the seal.
    """

    history: str = ""
    number: int = 0
    seal: int = field(default=0, compare=False)

    def is_sealed_as(self, other: "Position") -> bool:
        """Whether both have the same number and the same known seal, and thus the same past."""
        return self.seal != 0 and (self.number, self.seal) == (other.number, other.seal)


NOWHERE = Position()

# A trainer begins another run when it is resharded or returns to a checkpoint. The ids show that these runs belong
# together, so that a superseded trainer cannot return under another run. Nobody chooses an id of this form by
# accident.
_LATER_RUN = re.compile(r"([0-9a-f]{32})\+[1-9][0-9]*")


def can_continue(
    held: Position,
    history: str,
    head: int,
    seal: int,
    *,
    unit: str = "version",
    acknowledged: Position = NOWHERE,
) -> Decision:
    """Decide whether a replica can continue from its position; otherwise it needs every row.

    Args:
        held: the position that the replica reports.
        history: the history of the feed.
        head: the newest number in it.
        seal: the checksum of the seal of `held.number` in it; 0 if unknown.
        unit: what its numbers count: `version` or `release`.
        acknowledged: the replica's offset, which belongs to this past like everything in the log.
    """
    if held.number == 0:
        return Decision(False, "the replica holds nothing")
    text = f"the replica holds {unit} {held.number}"
    if held.seal and held.seal == seal:  # The past is the same, whatever the name of the history.
        return Decision(True, text)
    # After a log went back, offsets may be beyond its head, and their rows no longer exist.
    is_there = acknowledged.history == history and held.number <= head
    if seal == 0 and is_there and held.is_sealed_as(acknowledged):
        return Decision(True, text)
    if held.seal and seal and line_of(held.history) == line_of(history):
        return Decision(False, f"{text}, which is not in the service's history")
    if held.history != history:
        return Decision(False, f"the replica holds history {held.history}, the service history {history}")
    if held.number > head:
        return Decision(False, f"{text}, but the newest is {head}")
    if held.seal:
        return Decision(False, f"{text}, which is too old to compare with the service's history")
    return Decision(True, text)


def is_discarded(held: Position, history: str, head: int, seal: int) -> bool:
    """Whether a position belongs to a past that a history discarded, so that later rows may be missing.

    The arguments are those of `can_continue`. A position of another line is always discarded. If the position is
    older than the known seals, this cannot be decided, and the result is False.
    """
    if held.number == 0:
        return False
    if held.seal and seal:
        return held.seal != seal
    return held.number > head or line_of(held.history) != line_of(history)


def line_of(history: str) -> str:
    """The part of a history's id that all its epochs share."""
    return history.partition(".")[0]


def next_epoch(history: str) -> str:
    """The id of a new epoch of a history after a restore. No replica has a position in it yet."""
    return f"{line_of(history)}.{uuid.uuid4().hex[:16]}"


def reaches(held: Position, wanted: Position) -> bool:
    """Whether a position equals another one or comes after it, as far as known."""
    if held.is_sealed_as(wanted):
        return True
    discarded = held.number == wanted.number and held.seal and wanted.seal
    return held.history == wanted.history and held.number >= wanted.number and not discarded


def later_run_id(first: str, number: int) -> str:
    """The id of a trainer's run after `number` others, from the id of its first run (32 hexadecimal digits)."""
    return f"{first}+{number}" if number else first


def first_run_id(run: str) -> str:
    """The id of the first run of a trainer, from the id of any of its runs."""
    match = _LATER_RUN.fullmatch(run)
    return match[1] if match else run
