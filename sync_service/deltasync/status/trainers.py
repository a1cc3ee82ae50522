"""The ranks that publish."""

from dataclasses import dataclass
from typing import Literal

from deltasync.core.steady_clock import steady_ns
from deltasync.publish.coordinator import RankSession
from deltasync.service.service import Service

RankState = Literal["connected", "away", "finished"]


@dataclass(frozen=True)
class TrainerLine:
    """A rank of a run that publishes a model, in a list.

    Attributes:
        model: which.
        run: the run's id.
        ranks: how many it has.
        rank: this one's number.
        process: which process that is, as it says itself.
        connected: whether it is there.
        finished: whether it has said goodbye. A rank that has not, and is not connected, is lost.
        since_seconds: for how long it has been there, or away.
        left: why its last stream ended; empty while it is there.
        tables: how many it publishes.
    """

    model: str
    run: str
    ranks: int
    rank: int
    process: str
    connected: bool
    finished: bool
    since_seconds: float
    left: str
    tables: int


def rank_state(session: RankSession) -> RankState:
    """Whether a rank is there, has gone without a goodbye, or has finished."""
    return "finished" if session.finished else "away" if session.ended else "connected"


def trainer_lines(service: Service) -> list[TrainerLine]:
    """Those of all models, also those that have gone since the service started. In the event loop."""
    return [line for name in sorted(service.models) for line in _lines(service, name)]


def _lines(service: Service, name: str) -> list[TrainerLine]:
    coordinator, now = service.coordinators[name], steady_ns()
    return [
        TrainerLine(
            model=name,
            run=coordinator.run_id,
            ranks=coordinator.run.world_size if coordinator.run else 0,
            rank=rank,
            process=each.process,
            connected=not each.ended,
            finished=each.finished,
            since_seconds=round((now - each.since_ns) / 1e9, 3),
            left=each.left,
            tables=len(each.tables),
        )
        for rank, each in sorted(coordinator.sessions.items())
    ]
