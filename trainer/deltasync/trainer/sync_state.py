"""The part of a checkpoint that says which versions of a model were published."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deltasync.base.errors import InvalidInput
from deltasync.client import Position
from deltasync.core.seal import newest_event_time
from deltasync.trainer.checks import check_format
from deltasync.trainer.tracking.tracker_state import PUBLISHED

# The tracker's consumer that publishes.
CONSUMER = "publisher"
# If the service has lost more versions than this, the trainer sends every row.
_MOST = 1024
FORMAT = 1


@dataclass(frozen=True)
class SyncState:
    """The state of one rank, or the combined state of all ranks of a checkpoint.

    Attributes:
        position: the last sealed position; `Position()` if ranks share none.
        versions: the published versions.
        event_time_unix_ns: the time of the newest event that the model was trained on; None if unknown.
    """

    position: Position
    versions: "PublishedVersions"
    event_time_unix_ns: int | None

    def save(self) -> dict[str, Any]:
        """The state as tensors and plain values, for `of_all`."""
        return {
            "history": self.position.history,
            "version": self.position.number,
            "seal": self.position.seal,
            "versions": self.versions.save(),
            "event_time_unix_ns": self.event_time_unix_ns,
        }

    @classmethod
    def of_all(cls, states: Sequence[Mapping[str, Any]]) -> "SyncState":
        """Combine the states of all ranks of a checkpoint. Call `check_states` first."""
        versions = PublishedVersions.of_all(states)
        positions = [_position(state) for state in states]
        lowest = min(positions, key=lambda position: position.number)
        # Positions differ if the checkpoint was saved while a cut was being sealed.
        shared = all(each == lowest for each in positions) or versions.cursor_at(lowest) is not None
        newest = newest_event_time(state["event_time_unix_ns"] for state in states)
        return cls(lowest if shared else Position(), versions, newest)


def published_state(
    position: Position, event_time_unix_ns: int | None, tracker: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of a rank whose model has the rows of a version; see `tracker_state.published`."""
    versions = PublishedVersions([(position.number, position.seal, PUBLISHED)])
    state = SyncState(position, versions, event_time_unix_ns).save()
    return {"format": FORMAT, "rank": 0, "world_size": 1, "tracker": tracker, **state}


def check_states(saved: Sequence[Mapping[str, Any]]) -> None:
    """Check that these are the states of all ranks of one checkpoint."""
    if isinstance(saved, Mapping):
        raise InvalidInput("expected a list with the states of all ranks, got one state")
    for state in saved:
        check_format("a state of DeltaSync", state.get("format"), FORMAT)
    ranks = sorted((state["rank"], state["world_size"]) for state in saved)
    if not ranks or ranks != [(rank, len(saved)) for rank in range(len(saved))]:
        saved_by = ", ".join(f"{rank} of {world_size}" for rank, world_size in ranks)
        raise InvalidInput(f"expected the states of all ranks of one checkpoint, got rank {saved_by or 'none'}")


def _position(state: Mapping[str, Any]) -> Position:
    return Position(state["history"], state["version"], state["seal"])


class PublishedVersions:
    """Number, seal and tracker cursor of the last 1,024 published versions, oldest first.

    If the service has lost later versions, or ranks were saved at different ones, a trainer continues from an
    earlier version and sends the rows that have changed since then.
    """

    def __init__(self, versions: Iterable[tuple[int, int, int]] = ()) -> None:
        self._versions = deque[tuple[int, int, int]](versions, _MOST)

    def add(self, position: Position, cursor: int) -> None:
        """Add a sealed version, which has all rows that the tracker had stamped up to `cursor`."""
        if self._versions and cursor <= self._versions[-1][2]:  # The tracker's clock has started again.
            self._versions.clear()
        self._versions.append((position.number, position.seal, cursor))

    def cursor_at(self, position: Position) -> int | None:
        """The tracker's cursor at a version; None if the version is unknown."""
        cursors = (cursor for number, seal, cursor in reversed(self._versions) if (number, seal) == _key(position))
        return next(cursors, None) if position.seal else None

    def save(self) -> torch.Tensor:
        """The versions for a checkpoint: int64 [n, 3] of number, seal (its bits) and cursor."""
        rows = np.array(self._versions, object).reshape(-1, 3)
        seals = rows[:, 1].astype(np.uint64).view(np.int64)
        return torch.from_numpy(
            np.stack([rows[:, 0].astype(np.int64), seals, rows[:, 2].astype(np.int64)], axis=1)
        )

    @classmethod
    def of_all(cls, states: Sequence[Mapping[str, Any]]) -> "PublishedVersions":
        """The versions that all ranks of a checkpoint share, with cursors for a tracker that has loaded it."""
        clock = max(int(state["tracker"]["clock"]) for state in states)
        by_rank = [_cursors(state, clock - int(state["tracker"]["clock"])) for state in states]
        shared = [key for key in by_rank[0] if all(key in each for each in by_rank)]
        return cls((number, seal, min(each[number, seal] for each in by_rank)) for number, seal in shared)


def _key(position: Position) -> tuple[int, int]:
    return position.number, position.seal


def _cursors(state: Mapping[str, Any], shift: int) -> dict[tuple[int, int], int]:
    """The cursor at each version of a rank, on a clock that is `shift` ahead of the rank's own."""
    rows = state["versions"].numpy()
    seals = rows[:, 1].copy().view(np.uint64)
    return {(int(row[0]), int(seal)): int(row[2]) + shift for row, seal in zip(rows, seals, strict=True)}
