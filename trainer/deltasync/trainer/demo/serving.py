"""The example predictor as the demo runs it: it holds releases back, and leaves behind what it held in the end."""

import math
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import numpy as np
import uvicorn
from torch import nn

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import service_options
from deltasync.client import Release, Subscriber, SubscriberOptions, ValueType
from deltasync.core.listener import listening_socket
from deltasync.core.logs import log_to_stderr
from deltasync.core.process import keep_freed_memory
from deltasync.trainer.clicks.model import ClickModel
from deltasync.trainer.clicks.model_state import ModelState
from deltasync.trainer.clicks.stream_options import managed_option, size_options, take_model_options
from deltasync.trainer.demo.predictor import create_app
from deltasync.trainer.demo.predictor_metrics import MeteredTarget, PredictorMetrics
from deltasync.trainer.demo.quantised import quantised, served_rows, value_type_option
from deltasync.trainer.demo.receipts import Receipts


class HeldTarget(MeteredTarget):
    """Takes a release once every batch that it was trained on has been scored, and none of a step after the last.

    A predictor has to score an event before the trainer learns from it, however busy the processor is. Each
    reading is of one batch, which a step is trained on.
    """

    def __init__(self, module: nn.Module, metrics: PredictorMetrics, last_step: float = math.inf) -> None:
        super().__init__(module, metrics)
        self.receipts = Receipts()
        self._last_step = last_step
        self._scored = 0
        self._stopping = False
        self._moved = threading.Condition()

    def apply(self, release: Release) -> None:
        """Apply a release when it may be. Called by the subscriber's thread."""
        with self._moved:
            self._moved.wait_for(lambda: self._stopping or release.step <= min(self._scored, self._last_step))
        super().apply(release)
        self.receipts.note(release)

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """See `TorchTarget.reading`."""
        with super().reading() as reading:
            yield reading
        with self._moved:
            self._scored += 1
            self._moved.notify_all()

    def stop(self) -> None:
        """Hold nothing back any longer, so that the subscription can be closed."""
        with self._moved:
            self._stopping = True
            self._moved.notify_all()


@click.command(context_settings=CONTEXT)
@size_options
@managed_option
@service_options(default=None)
@click.option("--consumer", required=True, help="The consumer it belongs to.")
@click.option("--replica", required=True, help="Its name inside the consumer's fleet.")
@value_type_option
@click.option("--last-step", type=float, default=math.inf, help="Take no release of a later step.")
@click.option(
    "--results", type=click.Path(path_type=Path), required=True, help="Folder for what it leaves behind."
)
def main(value_type: str, last_step: float, results: Path, **settings: Any) -> None:
    """Score events over HTTP until SIGTERM; where, is in NAME.http in the folder of results."""
    log_to_stderr()
    keep_freed_memory()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options, metrics = take_model_options(settings), PredictorMetrics()
    model = quantised(ClickModel(options).eval(), ValueType(value_type))
    target = HeldTarget(model, metrics, last_step)
    with Subscriber(SubscriberOptions(**settings), target) as subscriber:
        metrics.watch(subscriber)
        # One request at a time, on as many cores as the model that its answers are compared with.
        app = create_app(target, subscriber, options.ids, metrics, threads=1)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        with listening_socket("127.0.0.1", 0) as listener, suppress(KeyboardInterrupt):
            _announce(results / f"{settings['replica']}.http", listener)
            server.run(sockets=[listener])
        target.stop()
        subscriber.check()
    _leave(results, settings["replica"], model, target)


def _announce(file: Path, listener: socket.socket) -> None:
    """Write where it listens, atomically."""
    file.with_suffix(".new").write_text(f"127.0.0.1:{listener.getsockname()[1]}")
    file.with_suffix(".new").rename(file)


def _leave(folder: Path, name: str, model: ClickModel, target: HeldTarget) -> None:
    np.savez(folder / f"tables-{name}.npz", allow_pickle=False, **served_rows(model))
    ModelState.of(model).save(folder / f"state-{name}.npz")
    target.receipts.write(folder / f"{name}.json")


if __name__ == "__main__":
    main()
