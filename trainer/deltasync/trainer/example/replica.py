"""7. A replica of the demo: it scores the stream as it arrives, and writes scores and rows to files at the end.

A predictor scores an event before the trainer learns from it. To ensure that on a busy machine too, the replica
applies a release only after it has scored every batch that the release was trained on.
"""

import copy
import json
import signal
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from torch import nn

from deltasync.base.logs import log_to_stderr
from deltasync.base.process import keep_freed_memory
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import service_options
from deltasync.client import Admin, Release, Subscriber, SubscriberOptions, Written
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.trainer.example.features import Featurizer
from deltasync.trainer.example.model import ClickModel, click_batch, outputs
from deltasync.trainer.example.options import ModelOptions, StreamOptions, flags
from deltasync.trainer.example.results import Tables, auc, write_arrays
from deltasync.trainer.example.stream import play

RECENT_BATCHES = 16
"""A replica checks its AUC on the events of this number of batches."""
_CHECK_SECONDS = 0.5


class ScoredFirst(TorchTarget):
    """A target that applies a release only after the batches of its step are scored.

    Attributes:
        receipts: step, seconds since its end, and bytes of each release, once it was applied.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.receipts: list[tuple[int, float, int]] = []
        self._scored, self._stopping, self._tables = 0, False, list[Any]()
        self._changed = threading.Condition()

    def apply(self, release: Release) -> Written | None:
        """See `TorchTarget`. The subscriber's thread calls this."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or release.step <= self._scored)
        written = super().apply(release)
        self._tables = release.tables
        if not release.more:
            self.receipts.append((release.step, time.time() - release.step_end_unix_ns / 1e9, release.bytes))
        return written

    def count_batch(self) -> None:
        """Record that one more batch is scored."""
        with self._changed:
            self._scored += 1
            self._changed.notify_all()

    def stop_waiting(self) -> None:
        """Apply releases at once, so that the subscriber can close."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def rows(self) -> Tables:
        """The rows of all tables, as they are in the module. For use once the subscriber is closed."""
        rows = {table.name: self.read(table, np.arange(table.rows)) for table in self._tables}
        return {name: values for name, values in rows.items() if values is not None}


class AucCheck:
    """Notices when the AUC of the last batches falls below a share of its best."""

    def __init__(self, share: float) -> None:
        self._share, self._best = share, 0.0
        self._recent = deque[tuple[NDArray[Any], NDArray[Any]]](maxlen=RECENT_BATCHES)

    def objection(self, labels: NDArray[Any], logit: NDArray[Any]) -> str:
        """Take the scores of a batch and the labels that arrived since; returns an objection, or nothing."""
        self._recent.append((labels, logit))
        if len(self._recent) < RECENT_BATCHES:
            return ""
        labels, logit = (np.concatenate(column) for column in zip(*self._recent, strict=True))
        found = auc(labels, logit)
        self._best = max(self._best, found)
        if found >= self._share * self._best:
            return ""
        return f"the AUC of the last {len(labels):,} events is {found:.3f}, its best was {self._best:.3f}"


@click.command(context_settings=CONTEXT)
@flags(StreamOptions, "stream")
@flags(ModelOptions, "sizes")
@service_options(default=None)
@click.option("--consumer", required=True, help="Consumer of this replica.")
@click.option("--replica", required=True, help="Name of this replica.")
@click.option(
    "--freeze-at", type=int, required=True, help="From this event on, also score with a frozen copy of the model."
)
@click.option("--object-below", type=float, help="Object once the AUC is below this share of its best.")
@click.option("--results", type=click.Path(path_type=Path), required=True, help="Folder for scores and rows.")
def main(
    stream: StreamOptions,
    sizes: ModelOptions,
    freeze_at: int,
    object_below: float | None,
    results: Path,
    **settings: Any,
) -> None:
    """Score a stream with the newest rows until SIGTERM."""
    log_to_stderr()
    keep_freed_memory()  # Makes large releases faster.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    target = ScoredFirst(ClickModel(sizes).eval())
    check = None if object_below is None else AucCheck(object_below)
    featurizer, frozen, scores = Featurizer(sizes), None, list[Tables]()
    with ExitStack() as stack:
        subscriber = stack.enter_context(Subscriber(SubscriberOptions(**settings), target))
        stack.callback(target.stop_waiting)
        stack.enter_context(suppress(KeyboardInterrupt))
        for events, _ in play(stream, sizes):
            features = featurizer.features(events)
            batch = click_batch(features)
            with target.reading() as reading:
                if frozen is None and features.index[-1] >= freeze_at:
                    frozen = copy.deepcopy(reading.module)
                logit = outputs(reading.module, batch).numpy()
            versions = np.full(len(features), reading.version)
            scored: Tables = {
                "index": features.index,
                "label": features.label,
                "logit": logit,
                "version": versions,
            }
            scores.append(scored | {"frozen": outputs(frozen, batch).numpy() if frozen else logit})
            target.count_batch()
            subscriber.check()
            if check and (objection := check.objection(features.label, logit)):
                Admin(settings["service"]).object(settings["consumer"], objection)
                check = None
        while True:
            subscriber.check()
            time.sleep(_CHECK_SECONDS)
    name = settings["replica"]
    columns = {key: np.concatenate([each[key] for each in scores]) for key in scores[0]}
    write_arrays(results, f"scores-{name}", columns)
    write_arrays(results, f"tables-{name}", target.rows())
    (results / f"{name}.json").write_text(json.dumps(target.receipts))


if __name__ == "__main__":
    main()
