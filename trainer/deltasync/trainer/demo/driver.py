"""Asks predictors for the scores of a stream of events, over HTTP, as these arrive, and keeps what they answer."""

import http
import http.client
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from deltasync.cli.config import CONTEXT
from deltasync.core.logs import log_to_stderr
from deltasync.trainer.clicks.events import Events
from deltasync.trainer.clicks.features import Features, Featurizer
from deltasync.trainer.clicks.stream_options import managed_option, stream_options, take_stream_options
from deltasync.trainer.demo.prediction import Prediction, request_of
from deltasync.trainer.demo.processes import DemoFailed
from deltasync.trainer.demo.stopping import Stop, play, stop_on_signals

_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 60.0
_COLUMNS = ("index", "label")


class RemotePredictor:
    """A predictor that is asked on one connection.

    Attributes:
        seconds: how long it took for each answer.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.seconds: list[float] = []
        self._connection = http.client.HTTPConnection(address, timeout=_ANSWER_SECONDS)

    def ready(self) -> bool:
        """Whether it says so."""
        return self._ask("GET", "/ready", b"")[0] == http.HTTPStatus.OK

    def predict(self, request: bytes) -> Prediction:
        """Its answer to a request.

        Raises:
            DemoFailed: it refuses.
        """
        begun = time.monotonic()
        status, body = self._ask("POST", "/predict", request)
        self.seconds.append(time.monotonic() - begun)
        if status != http.HTTPStatus.OK:
            raise DemoFailed(f"{self.name} answers {status}: {body.decode(errors='replace')}")
        return Prediction.model_validate_json(body)

    def _ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        try:
            return self._ask_once(method, path, body)
        except ConnectionError:  # A connection that nobody uses is closed after some seconds.
            self._connection.close()
            return self._ask_once(method, path, body)

    def _ask_once(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        self._connection.request(method, path, body, {"Content-Type": "application/json"})
        with self._connection.getresponse() as answer:
            return answer.status, answer.read()


class Driver:
    """Asks some predictors, all at the same time, for the scores of a stream, batch by batch."""

    def __init__(self, predictors: Sequence[RemotePredictor], featurizer: Featurizer) -> None:
        self._predictors = predictors
        self._featurizer = featurizer
        self._threads = ThreadPoolExecutor(len(predictors))
        self._batches: list[Features] = []
        self._answers: list[list[Prediction]] = []

    def score(self, events: Events) -> None:
        """Ask for the scores of a batch."""
        self._batches.append(self._featurizer.features(events))
        self._answers.append(self._ask())

    def write(self, folder: Path) -> None:
        """Ask for the scores of the last batch once more; write all that was answered into `folder`.

        Of each predictor: `scores-NAME.npz`, index, label and logit of all events, `outputs-NAME.npz`, index and
        logit of those of the last batch, and `answers-NAME.json`, seconds and age of each answer.
        """
        if not self._batches:
            return
        events = {name: np.concatenate([getattr(each, name) for each in self._batches]) for name in _COLUMNS}
        for predictor, outputs, *answers in zip(self._predictors, self._ask(), *self._answers, strict=True):
            logit = np.concatenate([_logits(each) for each in answers])
            last: dict[str, Any] = {"index": self._batches[-1].index, "logit": _logits(outputs)}
            facts = {"seconds": predictor.seconds, "age_seconds": [each.age_seconds for each in answers]}
            np.savez(folder / f"scores-{predictor.name}.npz", allow_pickle=False, logit=logit, **events)
            np.savez(folder / f"outputs-{predictor.name}.npz", allow_pickle=False, **last)
            (folder / f"answers-{predictor.name}.json").write_text(json.dumps(facts))

    def _ask(self) -> list[Prediction]:
        request = request_of(self._batches[-1])
        return list(self._threads.map(lambda each: each.predict(request), self._predictors))


def _logits(prediction: Prediction) -> NDArray[np.float32]:
    return np.array(prediction.scores, np.float32)


@click.command(context_settings=CONTEXT)
@stream_options
@managed_option
@click.option("--predictor", "names", multiple=True, required=True, help="Its name; may be repeated.")
@click.option("--results", type=click.Path(path_type=Path), required=True, help="Folder for scores.")
def main(names: Sequence[str], results: Path, **settings: Any) -> None:
    """Ask predictors for the scores of a stream; on SIGTERM, for those of the last batch again.

    Where a predictor answers is in NAME.http in the folder of results, once it listens.
    """
    log_to_stderr()
    stream = take_stream_options(settings)
    stop = stop_on_signals()
    with suppress(Stop):
        predictors = [_opened(results, name, stop) for name in names]
        driver = Driver(predictors, Featurizer(stream.features))
        for events in play(stream, stop):
            driver.score(events)
        stop.wait()
        driver.write(results)


def _opened(folder: Path, name: str, stop: threading.Event) -> RemotePredictor:
    """A predictor, once it is ready."""
    file = folder / f"{name}.http"
    while not file.exists():
        _pause(stop)
    predictor = RemotePredictor(name, file.read_text())
    while not predictor.ready():
        _pause(stop)
    return predictor


def _pause(stop: threading.Event) -> None:
    if stop.wait(_POLL_SECONDS):
        raise Stop


if __name__ == "__main__":
    main()
