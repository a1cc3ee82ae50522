"""The HTTP side, for operators and their tools."""

from dataclasses import dataclass

from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from deltasync.api.access import Access
from deltasync.api.access_routes import AccessMiddleware
from deltasync.api.caller import may_read
from deltasync.api.consumer_routes import consumer_routes
from deltasync.api.delete_routes import delete_routes
from deltasync.api.http_errors import answer_errors, error_responses
from deltasync.api.model_routes import model_routes
from deltasync.api.peers import PeersMiddleware
from deltasync.api.process_routes import process_routes
from deltasync.api.snapshot_routes import snapshot_routes
from deltasync.api.tls_options import TlsOptions
from deltasync.core.errors import ServiceUnavailable
from deltasync.core.words import listed
from deltasync.service.service import Service
from deltasync.status.answers import Answers


@dataclass(frozen=True)
class TableLine:
    """A table, in a list.

    `bytes` are those of its values. `ranks_differ` says that ranks of the trainer have different rows of it, as of
    a buffer: those of the first are published. `refused` says why the last cut was, if it was for rows of it.
    """

    model: str
    table: str
    rows: int
    dim: int
    dtype: str
    bytes: int
    head: int
    kind: str
    ranks_differ: bool
    refused: str


class _Metrics(Response):
    """Metrics, as Prometheus reads them."""

    media_type = CONTENT_TYPE_LATEST


def create_app(service: Service, access: Access, tls: TlsOptions | None = None) -> FastAPI:
    """The application; it shares the service's event loop."""
    app = FastAPI(
        title="deltasync",
        description="How far every consumer is behind.",
        docs_url="/docs",
        responses=error_responses(),
        redirect_slashes=False,  # Which would send who asks, and their token, to the host that they have named.
    )
    app.add_middleware(PeersMiddleware, service=service, tls=tls)
    app.add_middleware(AccessMiddleware, access=access)  # Last: it sees a request first.
    answer_errors(app)
    answers = Answers(service)
    app.include_router(consumer_routes(service, answers))
    app.include_router(delete_routes(service))
    app.include_router(model_routes(service))
    app.include_router(process_routes(service))
    app.include_router(snapshot_routes(service))

    @app.get("/tables")
    async def tables() -> list[TableLine]:
        """All tables of all models."""
        return [line for name in sorted(service.models) for line in _lines(service, name)]

    @app.get("/livez", response_class=PlainTextResponse)
    async def livez() -> str:
        """The process answers."""
        return "ok\n"

    @app.get("/readyz", response_class=PlainTextResponse)
    async def readyz() -> str:
        """The service takes streams. What only one model or one consumer lacks is said after the ok, to those who
        may read; and where others reach the service although it lets in anybody, to all.
        """
        if reason := _not_ready(service):
            raise ServiceUnavailable(reason if may_read() else "the service is not ready")
        lacks = (access.trouble, *service.shortcomings, *_risks(service)) if may_read() else ()
        return "".join(f"{line}\n" for line in ("ok", access.exposure, *lacks) if line)

    @app.get("/metrics", response_class=_Metrics)
    async def metrics() -> Response:
        """Everything above as Prometheus metrics."""
        return _Metrics(await answers.metrics())

    return app


def _risks(service: Service) -> list[str]:
    """How what is acknowledged could be lost, and what keeps snapshots from being made, in words."""
    snapshots = service.snapshots.troubles if service.snapshots else []
    return [*(f"accepted: {each}" for each in service.logs.accepted_risks), *snapshots]


def _not_ready(service: Service) -> str:
    """Why the service takes no streams, or can keep nothing of what they bring; empty if it can."""
    if service.draining.is_set():
        return "the service is shutting down"
    if service.compiling:
        return "still compiling for this machine; the log says how far it is"
    if not service.owners.confirmed:
        return "the other processes have not heard of this one: brokers do not answer, or have just been asked"
    trouble = service.volumes.trouble and f"nothing new can be written: {service.volumes.trouble}"
    if service.recovering:
        return "; ".join(filter(None, [f"still recovering: {listed(service.recovering)}", trouble]))
    if trouble:
        return trouble
    return "the log is full: its tables are being flushed" if service.logs.refusing else ""


def _lines(service: Service, name: str) -> list[TableLine]:
    """The tables of a model."""
    model, differing = service.models[name], service.coordinators[name].differing
    sealer = service.coordinators[name].sealer
    reasons = [sealer.refusal.reason if sealer.refusal else "", sealer.quarantine]
    return [
        TableLine(
            model=name,
            table=t.name,
            rows=t.rows,
            dim=t.dim,
            dtype=str(t.dtype),
            bytes=t.nbytes,
            head=model.seals.newest_version,
            kind=t.kind.value,
            ranks_differ=t.name in differing,
            refused=next((reason for reason in reasons if repr(t.name) in reason), ""),
        )
        for t in (table.spec for table in model.tables)
    ]
