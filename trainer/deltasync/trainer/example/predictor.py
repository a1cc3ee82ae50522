"""A predictor to copy: it scores events over HTTP, with quantised tables that it updates in place.

python -m deltasync.trainer.example.predictor --service localhost:50051 --consumer predictors --managed

`POST /predict` scores events. A load balancer asks `/ready`, a supervisor `/livez`, and Prometheus `/metrics`.
"""

import asyncio
import json
import math
import os
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal, Protocol, cast

import click
import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, FailFast, Field, ValidationError
from starlette.requests import ClientDisconnect
from torch import nn

from deltasync.base.decision import Decision
from deltasync.base.logs import log_to_stderr
from deltasync.base.process import keep_freed_memory
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import service_options
from deltasync.client import (
    DeltasyncError,
    InvalidInput,
    Position,
    Release,
    ServiceUnavailable,
    Subscriber,
    SubscriberOptions,
    ValueType,
    Written,
)
from deltasync.client.targets.target import Reading
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.core.seal import seconds_behind
from deltasync.trainer.example.features import DENSE_FEATURES, SPARSE_FEATURES, Features
from deltasync.trainer.example.model import QUANTISED, ClickBatch, ClickModel, click_batch, outputs, quantised
from deltasync.trainer.example.options import ModelOptions, flags

MOST_EVENTS = 1024
"""Maximum number of events in a request."""
MOST_BYTES = 1 << 20
"""Maximum size of a request's body."""
MOST_WAITING = 100
"""Maximum number of requests that wait for a thread. It refuses more at once, rather than answer too late."""
DRAIN_SECONDS = 15
_BODY_SECONDS = 10.0
_SINGLE = SPARSE_FEATURES[:-1]
# Far above any real value, but small enough to multiply two of them in float32.
_LARGEST = 1e6

# Use FailFast, because listing a hundred thousand wrong entries would block all threads for a second.
_Id = Annotated[int, Field(ge=0, lt=2**63)]
_Value = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST, allow_inf_nan=False)]


class PredictionEvent(BaseModel):
    """The features of one event. Ignores other fields, because a client may send new features before the model
    uses them.
    """

    dense: list[_Value] = Field(min_length=len(DENSE_FEATURES), max_length=len(DENSE_FEATURES))
    user: _Id
    item: _Id
    cross: _Id
    hour: _Id
    history: Annotated[list[_Id], Field(max_length=100), FailFast()]


class PredictionRequest(BaseModel):
    """Events to score."""

    events: Annotated[list[PredictionEvent], Field(min_length=1, max_length=MOST_EVENTS), FailFast()]


class Prediction(BaseModel):
    """Scores, and the version of the model that made all of them.

    Attributes:
        scores: log odds of a click for each event.
        version: the model's version number.
        kept: the name of this version, if the consumer follows a kept one; otherwise empty.
        step: the trainer's step of that version; null if unknown.
        age_seconds: time since the newest event that it was trained on, or since its step ended; null if unknown.
        age_of: the start of `age_seconds`: `event` or `step`.
        worker: the id of the process that answered.
    """

    scores: list[float]
    version: int
    kept: str
    step: int | None
    age_seconds: float | None
    age_of: Literal["event", "step"]
    worker: int


class Served(BaseModel):
    """The version that a predictor serves, and its name if the consumer follows a kept one."""

    version: int
    kept: str


def request_of(features: Features) -> bytes:
    """The request body for these events."""
    history = np.split(features.history, np.cumsum(features.history_lengths)[:-1])
    columns = {"dense": features.dense.tolist(), "history": [items.tolist() for items in history]}
    columns |= {name: features.ids[name].tolist() for name in _SINGLE}
    events = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return json.dumps({"events": events}).encode()


def batch_of(body: bytes, ids: Mapping[str, int]) -> ClickBatch:
    """Parse a `PredictionRequest` whose ids are below `ids` for each feature; InvalidInput names the problem."""
    try:
        events = PredictionRequest.model_validate_json(body, strict=True).events
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidInput(f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}") from error
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


class ReplicaState(Protocol):
    """The state of a replica, such as that of a `Subscriber`."""

    @property
    def ready(self) -> bool:
        """See `Subscriber`."""

    @property
    def readiness(self) -> Decision:
        """See `Subscriber`."""

    @property
    def version(self) -> Position:
        """See `Subscriber`."""

    @property
    def event_time_unix_ns(self) -> int | None:
        """See `Subscriber`."""

    def check(self) -> None:
        """See `Subscriber`."""


class ServedModel(ABC):
    """A model that a replica keeps fresh, and the predictor's metrics for Prometheus."""

    def __init__(self, *, one_process: bool = True) -> None:
        """Create the metrics.

        Args:
            one_process: whether one process answers all requests. Several would each count their own.
        """
        self.registry = CollectorRegistry()
        self.predict_seconds = Histogram(
            "predictor_predict_seconds",
            "Time per request, including waits for a release.",
            registry=self.registry if one_process else None,
        )

    @abstractmethod
    def scores(self, batch: ClickBatch) -> tuple[torch.Tensor, Reading]:
        """Log odds of the events, and the version of the model that made all of them."""

    @abstractmethod
    def newest(self) -> Reading:
        """The version that is served."""

    def watch(self, replica: ReplicaState) -> None:
        """Add metrics of a replica."""

        def age() -> float:
            behind = seconds_behind(replica.event_time_unix_ns, time.time_ns())
            return math.nan if behind is None else behind

        for name, text, value in (
            ("ready", "1 while /ready answers 200.", lambda: replica.ready),
            ("version", "The model version that is served.", lambda: replica.version.number),
            ("event_age_seconds", "Age of the newest event that this version has seen; NaN if unknown.", age),
        ):
            Gauge(f"predictor_{name}", text, registry=self.registry).set_function(value)


class MeteredTarget(TorchTarget, ServedModel):
    """A target with the predictor's metrics."""

    def __init__(self, module: nn.Module) -> None:
        TorchTarget.__init__(self, module)
        ServedModel.__init__(self)
        self.rows = Counter(
            "predictor_rows_applied", "Rows of releases, including deletes.", registry=self.registry
        )
        self.apply_seconds = Histogram(
            "predictor_apply_seconds", "Time to apply a release.", registry=self.registry
        )

    def scores(self, batch: ClickBatch) -> tuple[torch.Tensor, Reading]:
        """See `ServedModel`. Several threads may call this."""
        with self.reading() as reading:
            return outputs(cast("ClickModel", reading.module), batch), reading

    def apply(self, release: Release) -> Written | None:
        """See `TorchTarget.apply`. Returns its result, which proves that the rows were written."""
        with self.apply_seconds.time():
            written = super().apply(release)
        self.rows.inc(sum(len(each.ids) for each in release.rows))
        return written


def predict(source: ServedModel, ids: Mapping[str, int], body: bytes) -> Prediction:
    """Answer a request with one version of the model. Several threads call this at the same time."""
    batch = batch_of(body, ids)
    with torch.inference_mode():
        scores, reading = source.scores(batch)
    if not scores.isfinite().all():
        raise DeltasyncError(f"version {reading.version} of the model gives scores that are not finite")
    return Prediction(
        scores=scores.tolist(),
        version=reading.version,
        kept=reading.kept,
        step=reading.step,
        age_seconds=reading.age_seconds,
        age_of="step" if reading.event_time_unix_ns is None else "event",
        worker=os.getpid(),
    )


def create_app(source: ServedModel, replica: ReplicaState, ids: Mapping[str, int], threads: int) -> FastAPI:
    """The HTTP application. Its event loop answers probes while forwards run in threads."""
    source.watch(replica)
    app = FastAPI(title="predictor")
    forwards, places = ThreadPoolExecutor(threads, "forward"), asyncio.Semaphore(threads + MOST_WAITING)

    @app.exception_handler(DeltasyncError)
    async def refuse(_request: Request, error: DeltasyncError) -> JSONResponse:
        status = 422 if isinstance(error, InvalidInput) else 503
        return JSONResponse({"detail": str(error)}, status)

    @app.get("/ready")
    async def ready() -> Served:
        """Say whether to send requests here, and which version answers them; a 503 says why not."""
        if not replica.ready:
            raise ServiceUnavailable(f"not ready: {replica.readiness.reason}")
        served = source.newest()
        return Served(version=served.version, kept=served.kept)

    @app.post("/predict")
    async def answer(request: Request) -> Prediction:
        """Score events; the answer includes the version that made the scores, and its age."""
        await ready()
        body = await _body(request)
        if places.locked():
            raise ServiceUnavailable(f"busy: {MOST_WAITING} requests are already waiting; try again later")
        async with places:
            with source.predict_seconds.time():
                return await asyncio.get_running_loop().run_in_executor(forwards, predict, source, ids, body)

    @app.get("/livez")
    async def livez() -> str:
        """Say whether to leave the process running, ready or not; a 500 says why not."""
        try:
            replica.check()
        except Exception as error:  # Whatever the error is, a new process may fix it.
            raise HTTPException(500, f"the subscriber has stopped: {error}") from error
        return "alive"

    @app.get("/metrics")
    async def scrape() -> Response:
        """The metrics, for Prometheus."""
        return Response(generate_latest(source.registry), media_type=CONTENT_TYPE_LATEST)

    return app


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BYTES:
                    raise HTTPException(413, f"body: more than {MOST_BYTES} bytes")
    except TimeoutError as error:
        raise HTTPException(408, f"body: not complete after {_BODY_SECONDS:.0f} s") from error
    except ClientDisconnect as error:
        raise InvalidInput("body: incomplete, because the client has disconnected") from error
    return bytes(body)


@click.command(context_settings=CONTEXT)
@flags(ModelOptions, "sizes")
@service_options(default=None)
@click.option("--consumer", default="predictors", help="Consumer of this replica.")
@click.option("--replica", default=socket.gethostname, show_default="host name", help="Name of this replica.")
@click.option("--checkpoints", default="", metavar="URL", help="Start with the newest checkpoint at this URL.")
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
    # Run several forwards in parallel, each on one core. Torch would use all cores (OMP_NUM_THREADS) for each.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    target = MeteredTarget(quantised(ClickModel(sizes).eval(), ValueType(value_type)))
    with Subscriber(SubscriberOptions(**settings), target) as subscriber:
        app = create_app(target, subscriber, sizes.ids, threads)
        drain = DRAIN_SECONDS
        uvicorn.run(
            app, host=host, port=http_port, log_config=None, access_log=False, timeout_graceful_shutdown=drain
        )


if __name__ == "__main__":
    main()
