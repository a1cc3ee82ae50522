"""Points of a history, whether a replica can go on from one, and ids of the runs that make history."""

import re
import uuid
from dataclasses import dataclass, field

from deltasync.base.decision import Decision


@dataclass(frozen=True)
class Position:
    """A point of one history: of a model's a version, of a view's a release; 0 means "holds nothing".

    `seal` is the checksum of its seal (`Seal.checksum`), or 0 where it is not known: whoever goes on from a
    position looks at it (`resume`), while two that name one point are equal, though only one of them may know it.
    """

    history: str = ""
    number: int = 0
    seal: int = field(default=0, compare=False)

    def is_sealed_as(self, other: "Position") -> bool:
        """Whether both have the same number and the same seal, which is known: so they have the same past."""
        return self.seal != 0 and (self.number, self.seal) == (other.number, other.seal)


NOWHERE = Position()

# A trainer begins another run when it is resharded or goes back to a checkpoint. The ids show that the runs are of
# one trainer: one that was superseded cannot return under another run. Nobody chooses an id of this form by
# chance.
_LATER_RUN = re.compile(r"([0-9a-f]{32})\+[1-9][0-9]*")


def resume(
    held: Position,
    history: str,
    head: int,
    seal: int,
    *,
    unit: str = "version",
    acknowledged: Position = NOWHERE,
) -> Decision:
    """Whether a replica that holds `held` can go on from there; otherwise it needs everything.

    Args:
        held: what the replica says that it holds.
        history: the history of the feed.
        head: the newest number in it.
        seal: the checksum of the seal that `held.number` has in it; 0 where that is not known.
        unit: what numbers of this history count.
        acknowledged: the replica's offset, which is of this past, as all that the log has.
    """
    if held.number == 0:
        return Decision(False, "the replica holds nothing")
    text = f"the replica holds {unit} {held.number}"
    if held.seal and held.seal == seal:  # The same past, whatever the history is called.
        return Decision(True, text)
    # A log that went back has offsets that are beyond its head: nobody has their rows any more.
    is_there = acknowledged.history == history and held.number <= head
    if seal == 0 and is_there and held.is_sealed_as(acknowledged):
        return Decision(True, text)
    if held.seal and seal and line_of(held.history) == line_of(history):
        return Decision(False, f"{text}, of a past that this history does not have")
    if held.history != history:
        return Decision(False, f"the replica holds history {held.history}, the service history {history}")
    if held.number > head:
        return Decision(False, f"{text}, the newest one is only {head}")
    if held.seal:
        return Decision(False, f"{text}, and nothing shows any more that it is of this past")
    return Decision(True, text)


def is_discarded(held: Position, history: str, head: int, seal: int) -> bool:
    """Whether a position is of a past that a history does not have: what was published after it, is not there.

    The arguments are those of `resume`; a position of another line is none of this past. Where it is older than
    the seals that are known, nobody can say: no.
    """
    if held.number == 0:
        return False
    if held.seal and seal:
        return held.seal != seal
    return held.number > head or line_of(held.history) != line_of(history)


def line_of(history: str) -> str:
    """What all epochs of a history have in common."""
    return history.partition(".")[0]


def next_epoch(history: str) -> str:
    """The id of the epoch that a history begins when it is restored: nobody has a position of it yet."""
    return f"{line_of(history)}.{uuid.uuid4().hex[:16]}"


def reaches(held: Position, wanted: Position) -> bool:
    """Whether a position is another one, or comes after it, as far as it can be known."""
    if held.is_sealed_as(wanted):
        return True
    discarded = held.number == wanted.number and held.seal and wanted.seal
    return held.history == wanted.history and held.number >= wanted.number and not discarded


def later_run_id(first: str, number: int) -> str:
    """The id of a trainer's later run, made from the id of its first one (32 hexadecimal digits).

    Args:
        first: the id of the first run.
        number: how many runs the trainer began since.
    """
    return f"{first}+{number}" if number else first


def first_run_id(run: str) -> str:
    """The id of the first run of the trainer whose run has this id."""
    found = _LATER_RUN.fullmatch(run)
    return found[1] if found else run
