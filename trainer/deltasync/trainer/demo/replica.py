"""A predictor replica: scores every event as it arrives, with the rows it holds at that moment.

python -m deltasync.trainer.demo.replica --service localhost:50051 --consumer predictors
"""

import logging
import threading
from pathlib import Path
from typing import Any

import click
import numpy as np

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import service_options
from deltasync.client import Release, Subscriber, SubscriberOptions
from deltasync.client.torch_target import TorchTarget
from deltasync.core.logs import log_to_stderr
from deltasync.core.process import keep_freed_memory
from deltasync.core.rows import Ids, Values
from deltasync.core.tables import TableSpec
from deltasync.trainer.clicks.events import Events
from deltasync.trainer.clicks.features import Featurizer
from deltasync.trainer.clicks.model import ClickModel
from deltasync.trainer.clicks.model_state import ModelState
from deltasync.trainer.clicks.stream_options import managed_option, stream_options, take_stream_options
from deltasync.trainer.demo.receipts import Receipts
from deltasync.trainer.demo.scorer import Scorer
from deltasync.trainer.demo.stopping import Stop, play, stop_on_signals

_CHECK_SECONDS = 0.5


class Replica:
    """Scores a stream, and takes releases in between."""

    def __init__(self, model: ClickModel, scorer: Scorer, stop: threading.Event, hold_releases: bool) -> None:
        self._model = model
        self.target = TorchTarget(model)
        self.scorer = scorer
        self._receipts = Receipts()
        self._stop = stop
        self._hold_releases = hold_releases
        self._scoring = threading.Condition()

    def apply(self, release: Release) -> None:
        """Apply a release; if releases are held, wait first until every batch that it was trained on is scored.

        A predictor has to score an event before the trainer learns from it, however busy the processor is. Called
        by the subscriber's thread; scoring happens in the main thread.
        """
        with self._scoring:
            while self._hold_releases and self.scorer.batches < release.step and not self._stop.is_set():
                self._scoring.wait(_CHECK_SECONDS)
            self.target.apply(release)
            self._receipts.note(release)

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """Some rows of a table, for its checksum."""
        return self.target.read(table, ids)

    def score(self, events: Events) -> None:
        """Score a batch."""
        with self._scoring:
            self.scorer.score(events)
            self._scoring.notify_all()

    def write(self, folder: Path, name: str) -> None:
        """Write scores, tables, state, outputs and the times of the releases into `folder`."""
        with self._scoring:
            state = ModelState.of(self._model)
            held = self.target.tables()
            tables = {table: held[table].numpy() for table in held.keys() - state.buffers.keys()}
            np.savez(folder / f"tables-{name}.npz", allow_pickle=False, **tables)
            state.save(folder / f"state-{name}.npz")
            np.savez(folder / f"scores-{name}.npz", allow_pickle=False, **self.scorer.columns())
            np.savez(folder / f"outputs-{name}.npz", allow_pickle=False, **self.scorer.last_outputs())
            self._receipts.write(folder / f"{name}.json")


@click.command(context_settings=CONTEXT)
@stream_options
@managed_option
@service_options(default=None)
@click.option("--consumer", default="predictors", help="The consumer it belongs to.")
@click.option("--replica", default="replica-0", help="Its name inside the consumer's fleet.")
@click.option("--freeze-at", type=int, default=None, help="Also score with a copy frozen at this event.")
@click.option("--hold-releases", is_flag=True, help="For evaluation: apply a release once its events are scored.")
@click.option("--results", type=click.Path(path_type=Path), default=None, help="Folder for scores and tables.")
def main(results: Path | None, freeze_at: int | None, hold_releases: bool, **settings: Any) -> None:
    """Score a stream of events with the newest rows there are, until SIGTERM."""
    log_to_stderr()
    keep_freed_memory()
    stream = take_stream_options(settings)
    model = ClickModel(stream.model).eval()
    stop = stop_on_signals()
    scorer = Scorer(model, Featurizer(stream.features), freeze_at, keep=results is not None)
    replica = Replica(model, scorer, stop, hold_releases)
    with Subscriber(SubscriberOptions(**settings), replica) as subscriber:
        try:
            for events in play(stream, stop):
                replica.score(events)
            while not stop.wait(_CHECK_SECONDS):
                subscriber.check()
        except Stop:
            logging.getLogger(__name__).info("stopped before the end of the stream")
        subscriber.check()
    if results:
        replica.write(results, settings["replica"])


if __name__ == "__main__":
    main()
