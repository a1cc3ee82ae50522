"""A predictor to copy: it scores events over HTTP, from quantised tables that are kept fresh in place.

python -m deltasync.trainer.demo.predictor --service localhost:50051 --consumer predictors --managed

`POST /predict` scores events. `/ready` is for who sends requests here, `/livez` for who restarts the process,
`/metrics` for Prometheus.
"""

import asyncio
import signal
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import click
import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import ClientDisconnect

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import service_options
from deltasync.client import (
    DeltasyncError,
    InvalidInput,
    ServiceUnavailable,
    Subscriber,
    SubscriberOptions,
    ValueType,
)
from deltasync.client.torch_target import TorchTarget
from deltasync.core.logs import log_to_stderr
from deltasync.core.process import keep_freed_memory
from deltasync.trainer.clicks.model import ClickModel
from deltasync.trainer.clicks.stream_options import managed_option, size_options, take_model_options
from deltasync.trainer.demo.prediction import MOST_BYTES, Prediction, batch_of
from deltasync.trainer.demo.predictor_metrics import MeteredTarget, PredictorMetrics
from deltasync.trainer.demo.quantised import quantised, value_type_option

# More requests that wait for a thread than this are refused: they would be answered too late for who asks.
MOST_WAITING = 100
_BODY_SECONDS = 10.0
DRAIN_SECONDS = 15


def predict(target: TorchTarget, ids: Mapping[str, int], body: bytes) -> Prediction:
    """Answer a request, whose body this is, with one version of the model. Called in many threads at once.

    Raises:
        InvalidInput: the body is no request.
        DeltasyncError: the model holds no version whole, or gives a score that is no number.
    """
    batch = batch_of(body, ids)
    with target.reading() as reading, torch.inference_mode():
        model = cast("ClickModel", reading.module)
        scores = model.logits(batch.dense, batch.sparse)
    if not scores.isfinite().all():
        raise DeltasyncError(f"version {reading.version} of the model gives scores that are no finite numbers")
    return Prediction(
        scores=scores.tolist(),
        version=reading.version,
        step=reading.step,
        age_seconds=reading.age_seconds,
        age_of="step" if reading.event_time_unix_ns is None else "event",
    )


def create_app(
    target: TorchTarget, subscriber: Subscriber, ids: Mapping[str, int], metrics: PredictorMetrics, threads: int
) -> FastAPI:
    """The application. Its event loop answers probes while forwards run in so many threads."""
    app = FastAPI(title="predictor")
    forwards, places = ThreadPoolExecutor(threads, "forward"), asyncio.Semaphore(threads + MOST_WAITING)

    @app.exception_handler(DeltasyncError)
    async def refuse(_request: Request, error: DeltasyncError) -> JSONResponse:
        status = 422 if isinstance(error, InvalidInput) else 503
        return JSONResponse({"detail": str(error)}, status)

    @app.get("/ready")
    async def ready() -> str:
        """Whether to send requests here: 503 says why not."""
        if not subscriber.ready:
            raise ServiceUnavailable(f"not ready: {subscriber.readiness.reason}")
        return "ready"

    @app.post("/predict")
    async def answer(request: Request) -> Prediction:
        """Scores of events, with the version that made them and its age."""
        await ready()
        body = await _body(request)
        if places.locked():
            raise ServiceUnavailable(f"busy: {MOST_WAITING} requests wait already")
        async with places:
            with metrics.predict_seconds.time():
                return await asyncio.get_running_loop().run_in_executor(forwards, predict, target, ids, body)

    @app.get("/livez")
    async def livez() -> str:
        """Whether to leave the process running, ready or not: 500 says why not."""
        try:
            subscriber.check()
        except Exception as error:  # Whatever it was: a new process may mend it.
            raise HTTPException(500, f"the subscriber has stopped: {error}") from error
        return "alive"

    @app.get("/metrics")
    async def scrape() -> Response:
        """The metrics, for Prometheus."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

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
        raise HTTPException(408, f"body: not whole after {_BODY_SECONDS:.0f} s") from error
    except ClientDisconnect as error:
        raise InvalidInput("body: it ends in the middle") from error
    return bytes(body)


@click.command(context_settings=CONTEXT)
@size_options
@managed_option
@service_options(default=None)
@click.option("--consumer", default="predictors", help="The consumer it belongs to.")
@click.option(
    "--replica", default=socket.gethostname, show_default="host name", help="Its name inside the consumer's fleet."
)
@click.option(
    "--snapshots",
    default="",
    help="Folder or URL of the service's snapshots: begin with the newest.",
    metavar="URL",
)
@value_type_option
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--http-port", type=click.IntRange(1, 65535), default=8081, help="Port to listen on.")
def main(value_type: str, host: str, http_port: int, **settings: Any) -> None:
    """Score events over HTTP until SIGTERM."""
    log_to_stderr()
    keep_freed_memory()
    # As Ctrl-C: uvicorn answers what it has taken, and returns.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options, metrics = take_model_options(settings), PredictorMetrics()
    # Side by side, each on one core; torch would give all cores to each. It knows how many, by OMP_NUM_THREADS.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    target = MeteredTarget(quantised(ClickModel(options).eval(), ValueType(value_type)), metrics)
    with Subscriber(SubscriberOptions(**settings), target) as subscriber:
        metrics.watch(subscriber)
        app = create_app(target, subscriber, options.ids, metrics, threads)
        uvicorn.run(
            app,
            host=host,
            port=http_port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )


if __name__ == "__main__":
    main()
