"""13. A predictor to copy. It answers over HTTP from tables of its own, which TorchRec has quantised:

python -m deltasync.trainer.example.predictor --service localhost:50051 --consumer predictors --managed

Or as several processes, which share the memory of one mirror (`deltasync mirror clicks --consumer predictors`):

MIRROR=clicks uvicorn --factory deltasync.trainer.example.predictor:over_mirror --workers 4

`POST /predict` scores events. A load balancer asks `/ready`, a supervisor `/livez`, and Prometheus `/metrics`.
"""

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import click
import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from pydantic import BaseModel, Field
from starlette.requests import Request

from deltasync.base.decision import Decision
from deltasync.base.logs import log_to_stderr
from deltasync.base.process import keep_freed_memory
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import service_options
from deltasync.client import (
    DeltasyncError,
    InvalidInput,
    NotFound,
    ServiceUnavailable,
    SharedReader,
    Subscriber,
    SubscriberOptions,
    ValueType,
)
from deltasync.client.shared.torch_module import SharedModule
from deltasync.client.targets.target import Reading
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.trainer.example.features import DENSE_FEATURES, SPARSE_FEATURES, Features
from deltasync.trainer.example.model import QUANTISED, ClickBatch, ClickModel, click_batch, outputs, quantised
from deltasync.trainer.example.options import ModelOptions, flags

DRAIN_SECONDS = 15
"""Seconds for requests that are under way at SIGTERM."""
_ATTACH_SECONDS = 0.5
_SINGLE = SPARSE_FEATURES[:-1]

_Id = Annotated[int, Field(ge=0, lt=2**63)]
_Value = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]


class PredictionEvent(BaseModel):
    """The features of one event."""

    dense: list[_Value] = Field(min_length=len(DENSE_FEATURES), max_length=len(DENSE_FEATURES))
    user: _Id
    item: _Id
    cross: _Id
    hour: _Id
    history: list[_Id] = Field(max_length=100)


class PredictionRequest(BaseModel):
    """Events to score."""

    events: list[PredictionEvent] = Field(min_length=1, max_length=1024)


class Prediction(BaseModel):
    """Log odds of a click for each event, and the version of the model that made all of them.

    `age_seconds` is the age of the newest event on which that version was trained; null if unknown.
    """

    scores: list[float]
    version: int
    age_seconds: float | None


@dataclass(frozen=True)
class Replica:
    """What the application needs of a replica. Threads call these functions.

    `check` raises the error for which the process should be replaced.
    """

    scores: Callable[[ClickBatch], tuple[torch.Tensor, Reading]]
    readiness: Callable[[], Decision]
    version: Callable[[], int]
    check: Callable[[], None]


def create_app(replica: Replica, ids: Mapping[str, int]) -> FastAPI:
    """The HTTP application, for ids below `ids` for each feature. FastAPI runs its functions in threads."""
    app, registry = FastAPI(title="predictor", strict_content_type=False), CollectorRegistry()
    version = Gauge("predictor_version", "The model version that is served.", registry=registry)
    version.set_function(replica.version)

    @app.exception_handler(DeltasyncError)
    def refuse(_request: Request, error: DeltasyncError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 422 if isinstance(error, InvalidInput) else 503)

    @app.exception_handler(RequestValidationError)
    def explain(_request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"detail": f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}"}, 422)

    @app.get("/ready")
    def ready() -> dict[str, int]:
        """Say whether to send requests here, and which version answers them; a 503 says why not."""
        if not (decision := replica.readiness()).yes:
            raise ServiceUnavailable(f"not ready: {decision.reason}")
        return {"version": replica.version()}

    @app.post("/predict")
    def predict(request: PredictionRequest) -> Prediction:
        """Score events; the answer includes the version that made the scores, and its age."""
        ready()
        batch = batch_of(request, ids)
        with torch.inference_mode():
            scores, reading = replica.scores(batch)
        return Prediction(scores=scores.tolist(), version=reading.version, age_seconds=reading.age_seconds)

    @app.get("/livez")
    def livez() -> str:
        """Say whether to leave the process running, ready or not; a 503 says why not."""
        replica.check()
        return "alive"

    @app.get("/metrics")
    def metrics() -> Response:
        """The metrics, for Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


def batch_of(request: PredictionRequest, ids: Mapping[str, int]) -> ClickBatch:
    """The events of a request; InvalidInput if an id is outside its table, where a lookup would fail."""
    events = request.events
    features = Features(
        index=np.arange(len(events)),
        label=np.zeros(len(events), np.float32),
        dense=np.array([event.dense for event in events], np.float32),
        ids={name: np.array([getattr(event, name) for event in events], np.int64) for name in _SINGLE},
        history=np.array([item for event in events for item in event.history], np.int64),
        history_lengths=np.array([len(event.history) for event in events], np.int32),
    )
    for name, values in {**features.ids, "history": features.history}.items():
        if (values >= ids[name]).any():
            raise InvalidInput(f"{name}: {values.max()}, expected ids below {ids[name]}")
    return click_batch(features)


def own_model(target: TorchTarget, subscriber: Subscriber) -> Replica:
    """A model of this process, which a subscriber keeps up to date."""

    def scores(batch: ClickBatch) -> tuple[torch.Tensor, Reading]:
        with target.reading() as reading:
            return outputs(reading.module, batch), reading

    return Replica(scores, lambda: subscriber.readiness, lambda: subscriber.version.number, subscriber.check)


def mirrored_model(reader: SharedReader, sizes: ModelOptions) -> Replica:
    """A model over the memory of a mirror, without a copy."""
    module = SharedModule(ClickModel(sizes, torch.device("meta")).eval())

    def scores(batch: ClickBatch) -> tuple[torch.Tensor, Reading]:
        with reader.reading() as reading:
            _, (_, logits, _) = module(reading, batch)
        return logits, reading

    def check() -> None:
        if reader.is_removed:
            raise ServiceUnavailable("the mirror's folder was removed: a new process attaches to the new one")

    return Replica(scores, lambda: module.readiness(reader), lambda: reader.version().version, check)


def over_mirror() -> FastAPI:
    """The application of one worker process, over the mirror that the variable MIRROR names; waits for it."""
    log_to_stderr()
    torch.set_num_threads(1)
    sizes = ModelOptions()
    while True:
        with suppress(NotFound):
            return create_app(mirrored_model(SharedReader(os.environ["MIRROR"]), sizes), sizes.ids)
        time.sleep(_ATTACH_SECONDS)


@click.command(context_settings=CONTEXT)
@flags(ModelOptions, "sizes")
@service_options(default=None)
@click.option("--consumer", default="predictors", help="Consumer of this replica.")
@click.option("--replica", default=socket.gethostname, show_default="host name", help="Name of this replica.")
@click.option(
    "--value-type",
    type=click.Choice([each.value for each in QUANTISED]),
    default=ValueType.INT8_TBE.value,
    help="Value type of the consumer, and type of the quantised tables.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--http-port", type=click.IntRange(1, 65535), default=8081, help="Port to listen on.")
def main(sizes: ModelOptions, value_type: str, host: str, http_port: int, **settings: Any) -> None:
    """Score events over HTTP until SIGTERM."""
    log_to_stderr()
    keep_freed_memory()  # Makes large releases faster.
    # SIGTERM acts like Ctrl-C: uvicorn finishes its current requests and returns.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(1)  # Requests run in parallel instead, each on one core.
    target = TorchTarget(quantised(ClickModel(sizes).eval(), ValueType(value_type)))
    with Subscriber(SubscriberOptions(**settings), target) as subscriber:
        app = create_app(own_model(target, subscriber), sizes.ids)
        drain = DRAIN_SECONDS
        uvicorn.run(
            app, host=host, port=http_port, log_config=None, access_log=False, timeout_graceful_shutdown=drain
        )


if __name__ == "__main__":
    main()
