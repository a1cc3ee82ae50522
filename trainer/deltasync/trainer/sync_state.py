"""What ranks add to a checkpoint beside their trackers' states: what was published of the model by then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltasync.client import Position
from deltasync.core.errors import InvalidInput
from deltasync.core.event_time import newest_event_time
from deltasync.trainer.checks import check_format
from deltasync.trainer.published_versions import PublishedVersions

FORMAT = 1


@dataclass(frozen=True)
class SyncState:
    """Of one rank, or of all ranks of a checkpoint together.

    Attributes:
        position: the last sealed position; nothing where ranks do not know one that they share.
        versions: earlier ones.
        event_time_unix_ns: the time of the newest event that was trained on; None where it is not known.
    """

    position: Position
    versions: PublishedVersions
    event_time_unix_ns: int | None

    def save(self) -> dict[str, Any]:
        """As `of_all` takes it: tensors and plain values."""
        return {
            "history": self.position.history,
            "version": self.position.number,
            "seal": self.position.seal,
            "versions": self.versions.save(),
            "event_time_unix_ns": self.event_time_unix_ns,
        }

    @classmethod
    def of_all(cls, states: Sequence[Mapping[str, Any]]) -> "SyncState":
        """What all ranks of a checkpoint have saved (`check_states`)."""
        versions = PublishedVersions.of_all(states)
        positions = [_position(state) for state in states]
        lowest = min(positions, key=lambda position: position.number)
        # They differ in a checkpoint taken while a cut was being sealed.
        shared = all(each == lowest for each in positions) or versions.cursor_at(lowest) is not None
        newest = newest_event_time(state["event_time_unix_ns"] for state in states)
        return cls(lowest if shared else Position(), versions, newest)


def check_states(saved: Sequence[Mapping[str, Any]]) -> None:
    """Check that these are the states of all ranks of one checkpoint.

    Raises:
        InvalidInput: some are missing, of another checkpoint, or of a newer format.
    """
    if isinstance(saved, Mapping):
        raise InvalidInput("expected a list with the states of all ranks, got one state")
    for state in saved:
        check_format("a state of DeltaSync", state.get("format"), FORMAT)
    ranks = sorted((state["rank"], state["world_size"]) for state in saved)
    if not ranks or ranks != [(rank, len(saved)) for rank in range(len(saved))]:
        found = ", ".join(f"{rank} of {world_size}" for rank, world_size in ranks)
        raise InvalidInput(f"expected the states of all ranks of one checkpoint, got rank {found or 'none'}")


def _position(state: Mapping[str, Any]) -> Position:
    return Position(state["history"], state["version"], state["seal"])
