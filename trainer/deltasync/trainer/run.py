"""This rank's training run in the service: its publisher, and the versions that it has published.

For the training thread.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deltasync.base.errors import InvalidInput
from deltasync.client import Position, Publisher, PublisherOptions
from deltasync.core.position import later_run_id
from deltasync.core.seal import newest_event_time
from deltasync.core.tables import TableSpec
from deltasync.trainer.checks import check_format
from deltasync.trainer.distributed.agreement import Agreement
from deltasync.trainer.sync_options import SyncOptions
from deltasync.trainer.tracking.tracker import Tracker
from deltasync.trainer.tracking.tracker_state import PUBLISHED

# The tracker's consumer that publishes.
CONSUMER = "publisher"
# If the service has lost more versions than this, the trainer sends every row.
_MOST = 1024
FORMAT = 1


class TrainingRun:
    """The run of this trainer in the service. It begins when this first connects.

    After a resharding or a loaded checkpoint, the trainer continues under a new run id with the same first part,
    and with nearly the same start time. A run of another trainer that began in between therefore still counts as
    the later one.
    """

    def __init__(
        self, options: SyncOptions, tables: Sequence[TableSpec], tracker: Tracker, agreement: Agreement
    ) -> None:
        self.publisher: Publisher | None = None  # None before `connect` and after `disconnect`.
        self.position = Position()  # The run builds on it.
        self.versions = PublishedVersions()  # For going back to an earlier one.
        self._options, self._tables = options, list(tables)
        self._tracker, self._agreement = tracker, agreement
        self._announced = self._earlier_connections = 0
        self._first_id, self._started_unix_ns = "", 0
        self._later = -1  # How often the run has begun again.

    @property
    def connections(self) -> int:
        """Number of connections that this rank has made."""
        now = self.publisher.connection.connections if self.publisher else 0
        return self._earlier_connections + now

    def connect(self) -> Publisher:
        """Return the publisher, or make one. All ranks call this together, while no cut is in progress.

        After a resharding, ranks have other shards, and announce them under a new run id.
        """
        if self._announced != self._tracker.attachments:
            self.disconnect()
            self._announced = self._tracker.attachments
            if not self._first_id:
                self._first_id, self._started_unix_ns = self._agreement.new_run()
            self._later += 1
        if self.publisher is None:
            options = PublisherOptions(
                service=self._options.service,
                model=self._options.model,
                run=later_run_id(self._first_id, self._later),
                run_started_unix_ns=self._started_unix_ns + self._later,
                rank=self._agreement.rank,
                world_size=self._agreement.world_size,
                continues=self.position,
                takes_deletes=True,
                start_over=self._options.start_over,
            )
            shards = [tracked.shard for table in self._tracker.tables for tracked in table.shards]
            self.publisher = Publisher(options, self._tables, shards)
        return self.publisher

    def go_on_from(self, position: Position, versions: "PublishedVersions") -> None:
        """Continue from a checkpoint under a new run id, because this run may have published later versions."""
        self.disconnect()
        self.position = position
        self.versions = versions
        self._announced = 0

    def finish(self) -> None:
        """Tell the service that this rank has finished, and close the connection."""
        if self.publisher:
            self.publisher.close()
        self.disconnect()

    def disconnect(self) -> None:
        """Close the connection and drop a part that is not sealed."""
        if self.publisher:
            self.publisher.abort()
            self._earlier_connections += self.publisher.connection.connections
        self.publisher = None


class StallDetector:
    """Detects that another rank waits for a cut that this rank has finished.

    The service repeats its answer to a part of a sealed cut. If it has lost that cut, it waits instead for the
    parts of ranks that already have their answer. A service that both ranks can reach answers within
    `patience_seconds`.
    """

    def __init__(self, patience_seconds: float = 60.0, now: Callable[[], float] = time.monotonic) -> None:
        self._patience_seconds, self._now = patience_seconds, now
        self._since: float | None = None

    @property
    def stalled(self) -> bool:
        """Whether this rank has waited so long that the ranks must publish again."""
        return self._since is not None and self._now() - self._since >= self._patience_seconds

    def update(self, *, waits: bool) -> None:
        """Record whether this rank has no part in flight and waits for another rank."""
        if not waits:
            self._since = None
        elif self._since is None:
            self._since = self._now()


# -- checkpoints


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
        key = (position.number, position.seal)
        cursors = (cursor for number, seal, cursor in reversed(self._versions) if (number, seal) == key)
        return next(cursors, None) if position.seal else None

    def save(self) -> torch.Tensor:
        """The versions for a checkpoint: int64 [n, 3] of number, seal (its bits) and cursor."""
        rows = np.array(self._versions, np.uint64).reshape(-1, 3)
        return torch.from_numpy(rows.view(np.int64))

    @classmethod
    def of_all(cls, states: Sequence[Mapping[str, Any]]) -> "PublishedVersions":
        """The versions that all ranks of a checkpoint share, with cursors for a tracker that has loaded it."""
        clock = max(int(state["tracker"]["clock"]) for state in states)
        by_rank = [_cursors(state, clock - int(state["tracker"]["clock"])) for state in states]
        shared = [key for key in by_rank[0] if all(key in each for each in by_rank)]
        return cls((number, seal, min(each[number, seal] for each in by_rank)) for number, seal in shared)


def _cursors(state: Mapping[str, Any], shift: int) -> dict[tuple[int, int], int]:
    """The cursor at each version of a rank, on a clock that is `shift` ahead of the rank's own."""
    rows = state["versions"].numpy()
    seals = rows[:, 1].copy().view(np.uint64)
    return {(int(row[0]), int(seal)): int(row[2]) + shift for row, seal in zip(rows, seals, strict=True)}


@dataclass(frozen=True)
class SyncState:
    """The state of one rank, or the combined state of all ranks of a checkpoint."""

    position: Position  # The last sealed position; `Position()` if ranks share none.
    versions: PublishedVersions  # The published versions.
    event_time_unix_ns: int | None  # The time of the newest event that the model was trained on; None if unknown.

    def save(self, tracker: Mapping[str, Any], rank: int = 0, world_size: int = 1) -> dict[str, Any]:
        """The state with that of the rank's tracker, as tensors and plain values, for `of_all`."""
        return {
            "format": FORMAT,
            "rank": rank,
            "world_size": world_size,
            "tracker": tracker,
            "history": self.position.history,
            "version": self.position.number,
            "seal": self.position.seal,
            "versions": self.versions.save(),
            "event_time_unix_ns": self.event_time_unix_ns,
        }

    @classmethod
    def of_version(cls, position: Position, event_time_unix_ns: int | None) -> "SyncState":
        """The state of a rank whose model has the rows of a version; see `tracker_state.published`."""
        versions = PublishedVersions([(position.number, position.seal, PUBLISHED)])
        return cls(position, versions, event_time_unix_ns)

    @classmethod
    def of_all(cls, states: Sequence[Mapping[str, Any]]) -> "SyncState":
        """Combine the states of all ranks of a checkpoint. Call `check_states` first."""
        versions = PublishedVersions.of_all(states)
        positions = [Position(state["history"], state["version"], state["seal"]) for state in states]
        lowest = min(positions, key=lambda position: position.number)
        # Positions differ if the checkpoint was saved while a cut was being sealed.
        shared = all(each == lowest for each in positions) or versions.cursor_at(lowest) is not None
        newest = newest_event_time(state["event_time_unix_ns"] for state in states)
        return cls(lowest if shared else Position(), versions, newest)


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
