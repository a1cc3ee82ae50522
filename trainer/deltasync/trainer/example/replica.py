"""A replica of the demo. It scores the stream, or answers over HTTP, and leaves what it held in the end.

A predictor must score an event before the trainer learns from it. The demo's replicas see to that themselves,
however busy the processor is: they apply a release once they have scored every batch that it was trained on.
"""

import copy
import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import uvicorn
from torch import nn

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import service_options
from deltasync.client import Release, Subscriber, SubscriberOptions, ValueType
from deltasync.core.listener import listening_socket
from deltasync.core.logs import log_to_stderr
from deltasync.core.process import keep_freed_memory
from deltasync.trainer.example.compare import save_state
from deltasync.trainer.example.features import Featurizer
from deltasync.trainer.example.model import (
    QUANTISED,
    ClickBatch,
    ClickModel,
    click_batch,
    outputs,
    quantised,
    served_rows,
)
from deltasync.trainer.example.options import ModelOptions, StreamOptions, flags
from deltasync.trainer.example.predictor import MeteredTarget, PredictorMetrics, create_app
from deltasync.trainer.example.stream import play

_CHECK_SECONDS = 0.5


class HeldTarget(MeteredTarget):
    """Applies a release once its batches are scored, and none of a step after `last_step`.

    Each reading scores one batch.
    """

    def __init__(self, module: nn.Module, last_step: float = math.inf) -> None:
        super().__init__(module, PredictorMetrics())
        self._applied: list[tuple[int, int, int]] = []
        self._bytes: list[int] = []
        self._last_step = last_step
        self._scored = 0
        self._stopping = False
        self._moved = threading.Condition()

    def apply(self, release: Release) -> None:
        """Apply a release when its time has come. The subscriber's thread calls this."""
        with self._moved:
            self._moved.wait_for(lambda: self._stopping or release.step <= min(self._scored, self._last_step))
        super().apply(release)
        self._applied.append((release.position.number, release.step, time.time_ns()))
        self._bytes.append(release.bytes)

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """See `TorchTarget.reading`."""
        with super().reading() as reading:
            yield reading
        with self._moved:
            self._scored += 1
            self._moved.notify_all()

    @property
    def receipts(self) -> dict[str, Any]:
        """Version, step and unix nanoseconds of each release that it `applied`, and its `received_bytes`."""
        return {"applied": self._applied, "received_bytes": self._bytes}

    def stop(self) -> None:
        """Hold nothing back any longer, so that the subscription can be closed."""
        with self._moved:
            self._stopping = True
            self._moved.notify_all()


class Scorer:
    """Scores a stream, also with a copy of the model that is frozen at an event, if one is given."""

    def __init__(self, freeze_at: int | None) -> None:
        self._freeze_at, self._frozen = freeze_at, None
        self._scores: list[dict[str, torch.Tensor]] = []
        self._last: ClickBatch | None = None

    def score(self, target: HeldTarget, stream: StreamOptions, sizes: ModelOptions) -> None:
        """Score every event as it arrives, with the rows that the target holds at that moment."""
        featurizer = Featurizer(sizes)
        for events, _ in play(stream, sizes):
            self._last = batch = click_batch(featurizer.features(events))
            with target.reading() as reading:
                scores = {"index": batch.index, "label": batch.label, "logit": outputs(reading.module, batch)}
                if self._freeze_at is not None:
                    if self._frozen is None and events.index[-1] >= self._freeze_at:
                        self._frozen = copy.deepcopy(reading.module)
                    scores["frozen"] = outputs(self._frozen, batch) if self._frozen else scores["logit"]
            self._scores.append(scores)

    def write(self, folder: Path, name: str, model: ClickModel) -> None:
        """Write all scores, and what the model makes of the last batch now."""
        if self._last is not None:
            columns = {key: torch.cat([each[key] for each in self._scores]).numpy() for key in self._scores[0]}
            np.savez(folder / f"scores-{name}.npz", allow_pickle=False, **columns)
            last = {"index": self._last.index.numpy(), "logit": outputs(model, self._last).numpy()}
            np.savez(folder / f"outputs-{name}.npz", allow_pickle=False, **last)


def serve(target: HeldTarget, subscriber: Subscriber, sizes: ModelOptions, file: Path) -> None:
    """Answer over HTTP until SIGTERM; `file` says where."""
    target.metrics.watch(subscriber)
    # One request at a time, on as many cores as the model that its answers are compared with.
    app = create_app(target, subscriber, sizes.ids, target.metrics, threads=1)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    with listening_socket("127.0.0.1", 0) as listener:
        file.with_suffix(".new").write_text(f"127.0.0.1:{listener.getsockname()[1]}")
        file.with_suffix(".new").rename(file)
        server.run(sockets=[listener])


@click.command(context_settings=CONTEXT)
@flags(StreamOptions, "stream")
@flags(ModelOptions, "sizes")
@service_options(default=None)
@click.option("--consumer", required=True, help="The consumer it belongs to.")
@click.option("--replica", required=True, help="Its name in that consumer.")
@click.option(
    "--value-type",
    type=click.Choice([each.value for each in QUANTISED]),
    help="Answer over HTTP, from tables that are quantised so, instead of scoring the stream.",
)
@click.option(
    "--freeze-at", type=int, help="From this event on, score with a frozen copy too, or take no release."
)
@click.option("--results", type=click.Path(path_type=Path), required=True, help="Folder for what it leaves.")
def main(
    stream: StreamOptions,
    sizes: ModelOptions,
    value_type: str | None,
    freeze_at: int | None,
    results: Path,
    **settings: Any,
) -> None:
    """Follow a consumer until SIGTERM."""
    log_to_stderr()
    keep_freed_memory()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    name, model = settings["replica"], ClickModel(sizes).eval()
    if value_type:
        model = quantised(model, ValueType(value_type))
    target = HeldTarget(model, freeze_at // stream.batch_size if value_type and freeze_at else math.inf)
    scorer = Scorer(freeze_at)
    with Subscriber(SubscriberOptions(**settings), target) as subscriber:
        with suppress(KeyboardInterrupt):
            if value_type:
                serve(target, subscriber, sizes, results / f"{name}.http")
            else:
                scorer.score(target, stream, sizes)
            while not value_type:
                subscriber.check()
                time.sleep(_CHECK_SECONDS)
        target.stop()
        subscriber.check()
    scorer.write(results, name, model)
    save_state(model, results / f"state-{name}.pt")
    buffers = dict(model.named_buffers())
    plain = {key: rows.numpy() for key, rows in target.tables().items() if key not in buffers}
    held = served_rows(model) if value_type else plain
    np.savez(results / f"tables-{name}.npz", allow_pickle=False, **held)
    (results / f"{name}.json").write_text(json.dumps(target.receipts))


if __name__ == "__main__":
    main()
