"""The processes of a service over HTTP, and what each of them has."""

from dataclasses import dataclass

from fastapi import APIRouter

from deltasync.service.service import Service
from deltasync.status.overview import unowned_models


@dataclass(frozen=True)
class ProcessLine:
    """A process of the service, in a list.

    `alive` is false if it went silent for longer than the lease without saying goodbye. `models` are the models
    that it owns. `here` marks the process that answers; its line has in `unowned` the models that no process has.
    `confirmed` says whether the process that answers may answer for its models. `started_unix_ns` is when the
    process started, by its own clock, 0 if unknown.
    """

    process: str
    grpc: str
    http: str
    here: bool
    alive: bool
    draining: bool
    confirmed: bool
    models: list[str]
    unowned: list[str]
    started_unix_ns: int


def process_lines(service: Service) -> list[ProcessLine]:
    """The processes of the service, as this one sees them: those that are alive first."""
    owners = service.owners
    names = sorted({*owners.models(), *service.models})
    owned = {name: owner.process for name in names if (owner := owners.owner_of(name))}
    alive, unowned = owners.processes(), unowned_models(service)
    return [
        ProcessLine(
            process=each.name,
            grpc=each.grpc,
            http=each.http,
            here=each.name == owners.me.name,
            alive=each in alive,
            draining=each.draining,
            confirmed=owners.confirmed,
            models=[name for name, process in owned.items() if process == each.name],
            unowned=unowned if each.name == owners.me.name else [],
            started_unix_ns=each.started,
        )
        for each in (*alive, *owners.gone())
    ]


def process_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/processes")
    async def processes() -> list[ProcessLine]:
        """All processes of the service, where each answers, and the models that each owns."""
        return process_lines(service)

    return router
