"""The processes of a service over HTTP, and what each of them has."""

from dataclasses import dataclass

from fastapi import APIRouter

from deltasync.service.service import Service


@dataclass(frozen=True)
class ProcessLine:
    """A process of the service, in a list.

    `models` are those that it owns; `confirmed` says whether the one that answers may answer for its own;
    `started_unix_ns` is when it started, by its own clock, 0 where that is not known.
    """

    process: str
    grpc: str
    http: str
    here: bool
    draining: bool
    confirmed: bool
    models: list[str]
    started_unix_ns: int


def process_lines(service: Service) -> list[ProcessLine]:
    """The processes that are alive, as this one sees them."""
    owners = service.owners
    names = sorted({*owners.models(), *service.models})
    owned = {name: owner.process for name in names if (owner := owners.owner_of(name))}
    return [
        ProcessLine(
            process=each.name,
            grpc=each.grpc,
            http=each.http,
            here=each.name == owners.me.name,
            draining=each.draining,
            confirmed=owners.confirmed,
            models=[name for name, process in owned.items() if process == each.name],
            started_unix_ns=each.started,
        )
        for each in owners.processes()
    ]


def process_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/processes")
    async def processes() -> list[ProcessLine]:
        """All processes of the service that are alive, and the models that each owns."""
        return process_lines(service)

    return router
