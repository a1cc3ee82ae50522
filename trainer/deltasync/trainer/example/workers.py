"""The predictor as several worker processes, which serve from the shared memory of a mirror without a copy.

deltasync mirror clicks --consumer predictors
python -m deltasync.trainer.example.workers clicks --workers 4

The workers share one socket. Each answers like `predictor`, by itself. One that ends is started again.
"""

import contextlib
import signal
import time
from collections.abc import Callable
from functools import partial

import click
import torch
import uvicorn
from fastapi import FastAPI
from uvicorn.supervisors import Multiprocess

from deltasync.base.decision import Decision
from deltasync.base.logs import log_to_stderr
from deltasync.cli.config import CONTEXT
from deltasync.client import DeltasyncError, NotFound, Position, ServiceUnavailable, SharedReader, TornTarget
from deltasync.client.shared.torch_module import SharedModule
from deltasync.client.targets.target import Reading
from deltasync.trainer.example.model import ClickBatch, ClickModel
from deltasync.trainer.example.options import ModelOptions, flags
from deltasync.trainer.example.predictor import DRAIN_SECONDS, ServedModel, create_app

_LOOK_SECONDS = 0.5
# The supervisor restarts a worker that does not answer for this long, also one that still imports torch.
_START_SECONDS = 120


class MirroredModel(ServedModel):
    """A model that serves from the shared memory of a mirror, without a copy of its own."""

    def __init__(self, attach: Callable[[], SharedReader], sizes: ModelOptions) -> None:
        """Serve from the mirror to which `attach` attaches, also when its folder was removed and made anew."""
        super().__init__(one_process=False)
        self._attach, self._attached = attach, attach()
        self._model = SharedModule(ClickModel(sizes, torch.device("meta")).eval())

    @property
    def _reader(self) -> SharedReader:
        if self._attached.is_removed:
            with contextlib.suppress(DeltasyncError):  # There may be no new one yet.
                self._attached = self._attach()
        return self._attached

    def scores(self, batch: ClickBatch) -> tuple[torch.Tensor, Reading]:
        """See `ServedModel`."""
        try:
            return self._scores(batch)
        except TornTarget:  # It took longer than the mirror's limit, perhaps because the machine was busy.
            return self._scores(batch)

    def _scores(self, batch: ClickBatch) -> tuple[torch.Tensor, Reading]:
        with self._reader.reading() as reading:
            _, (_, logits, _) = self._model(reading, batch)
        return logits, reading

    def newest(self) -> Reading:
        """The version that is served; 0 before the first release."""
        try:
            return self._reader.version()
        except ServiceUnavailable:
            return Reading()

    @property
    def version(self) -> Position:
        """The position of that version."""
        return self.newest().position

    @property
    def event_time_unix_ns(self) -> int | None:
        """See `Reading`."""
        return self.newest().event_time_unix_ns

    @property
    def readiness(self) -> Decision:
        """Whether the mirror's replica is ready and has the model's tables, and why."""
        return self._model.readiness(self._reader)

    @property
    def ready(self) -> bool:
        """Whether it is ready."""
        return self.readiness.yes

    def check(self) -> None:
        """A worker can always go on: if its mirror has stopped, it waits for the next one."""


def application(mirror: str, sizes: ModelOptions) -> FastAPI:
    """The application of a worker process."""
    log_to_stderr()
    torch.set_num_threads(1)
    model = MirroredModel(partial(SharedReader, mirror), sizes)
    return create_app(model, model, sizes.ids, threads=1)


@click.command(context_settings=CONTEXT)
@click.argument("mirror")
@click.option("--workers", type=click.IntRange(1), default=2, help="Processes.")
@flags(ModelOptions, "sizes", ("users", "items", "cross_buckets", "dim", "hidden"))
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--http-port", type=click.IntRange(1, 65535), default=8081, help="Port to listen on.")
def main(mirror: str, workers: int, sizes: ModelOptions, host: str, http_port: int) -> None:
    """Score events over HTTP until SIGTERM, from the shared memory MIRROR of this host.

    Waits until there is a mirror of that name. Its consumer sends rows as they are trained, not quantised.
    """
    log_to_stderr()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config = uvicorn.Config(
        partial(application, mirror, sizes),
        factory=True,
        workers=workers,
        host=host,
        port=http_port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        timeout_worker_healthcheck=_START_SECONDS,
    )
    with contextlib.suppress(KeyboardInterrupt):
        _wait_for(mirror)
        Multiprocess(config, [config.bind_socket()]).run()


def _wait_for(mirror: str) -> None:
    told = False
    while True:
        try:
            SharedReader(mirror)
        except NotFound as error:
            if not told:
                click.echo(f"waiting for the mirror: {error}", err=True)
            told = True
            time.sleep(_LOOK_SECONDS)
        else:
            return


if __name__ == "__main__":
    main()
