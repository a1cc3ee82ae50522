"""The HTTP routes of models: who publishes them, and deleting them."""

from dataclasses import dataclass

from fastapi import APIRouter

from deltasync.api.caller import author
from deltasync.core.steady_clock import steady_ns
from deltasync.publish.refusal import Refusal
from deltasync.service.removals import Removals
from deltasync.service.service import Service


@dataclass(frozen=True)
class RankLine:
    """One rank of the run that publishes a model.

    Attributes:
        rank: its number.
        connected: whether it is there.
        finished: whether it has said goodbye. A rank that has not, and is not connected, is lost.
        since_seconds: for how long it has been there, or away.
        left: why its last stream ended; empty while it is there.
    """

    rank: int
    connected: bool
    finished: bool
    since_seconds: float
    left: str


@dataclass(frozen=True)
class RefusalLine:
    """That the last cut was refused for what was in it: how long ago, and why."""

    seconds_ago: float
    reason: str


@dataclass(frozen=True)
class ModelLine:
    """A model, its newest version, and the run that publishes it with those of its ranks that have come since the
    service started; `run` is empty before the first one.
    """

    model: str
    head: int
    run: str
    ranks: list[RankLine]
    refused: RefusalLine | None
    quarantine: str


def model_routes(service: Service) -> APIRouter:
    """The routes."""
    router, removals = APIRouter(), Removals(service)

    @router.get("/models")
    async def models() -> list[ModelLine]:
        """The models of this process, and who publishes them."""
        service.check_confirmed()
        return [_line(service, name) for name in sorted(service.models)]

    @router.delete("/models/{name}", status_code=204)
    async def delete_model(name: str) -> None:
        """Delete a model that nobody publishes and no consumer follows. Needs role admin."""
        await removals.delete_model(name, author())

    @router.delete("/models/{name}/tables/{table:path}", status_code=204)
    async def delete_table(name: str, table: str) -> None:
        """Delete a table that no connected rank publishes. Needs role admin."""
        await removals.delete_table(name, table, author())

    return router


def _line(service: Service, name: str) -> ModelLine:
    coordinator, now = service.coordinators[name], steady_ns()
    ranks = [
        RankLine(rank, not each.ended, each.finished, round((now - each.since_ns) / 1e9, 3), each.left)
        for rank, each in sorted(coordinator.sessions.items())
    ]
    head, sealer = service.models[name].seals.newest_version, coordinator.sealer
    return ModelLine(name, head, coordinator.run_id, ranks, _refused(sealer.refusal), sealer.quarantine)


def _refused(refusal: Refusal | None) -> RefusalLine | None:
    if refusal is None:
        return None
    return RefusalLine(round((steady_ns() - refusal.at_ns) / 1e9, 3), refusal.reason)
