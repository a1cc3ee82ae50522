"""Asks the demo's predictors over HTTP for the scores of the stream, as it arrives, and keeps their answers."""

import http.client
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import numpy as np

from deltasync.cli.config import CONTEXT
from deltasync.core.logs import log_to_stderr
from deltasync.trainer.example.features import Features, Featurizer
from deltasync.trainer.example.options import ModelOptions, StreamOptions, flags
from deltasync.trainer.example.predictor import request_of
from deltasync.trainer.example.processes import DemoFailed
from deltasync.trainer.example.stream import play

_POLL_SECONDS, _ANSWER_SECONDS = 0.05, 60.0


class RemotePredictor:
    """A predictor, and what it has answered."""

    def __init__(self, folder: Path, name: str) -> None:
        """Wait until the predictor has written where it listens, and is ready."""
        self.name, file = name, folder / f"{name}.http"
        while not file.exists() or self._ask(file.read_text(), "GET", "/ready")[0] != http.HTTPStatus.OK:
            time.sleep(_POLL_SECONDS)
        self._address = file.read_text()
        self.logits: list[Any] = []
        self.seconds: list[float] = []
        self.age_seconds: list[float] = []

    def predict(self, request: bytes) -> None:
        """Ask for scores, and keep them.

        Raises:
            DemoFailed: the predictor refuses.
        """
        begun = time.monotonic()
        status, body = self._ask(self._address, "POST", "/predict", request)
        if status != http.HTTPStatus.OK:
            raise DemoFailed(f"{self.name} answers {status}: {body.decode(errors='replace')}")
        self.seconds.append(time.monotonic() - begun)
        answer = json.loads(body)
        self.age_seconds.append(answer["age_seconds"])
        self.logits.append(np.array(answer["scores"], np.float32))

    @staticmethod
    def _ask(address: str, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(address, timeout=_ANSWER_SECONDS)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def write(self, folder: Path, batches: list[Features]) -> None:
        """Write the scores of all batches, and those of the last one, which was asked for once more."""
        index, label = (np.concatenate([getattr(each, name) for each in batches]) for name in ("index", "label"))
        *scores, last = self.logits
        np.savez(folder / f"scores-{self.name}.npz", index=index, label=label, logit=np.concatenate(scores))
        np.savez(folder / f"outputs-{self.name}.npz", index=batches[-1].index, logit=last)
        facts = {"seconds": self.seconds, "age_seconds": self.age_seconds}
        (folder / f"answers-{self.name}.json").write_text(json.dumps(facts))


@click.command(context_settings=CONTEXT)
@flags(StreamOptions, "stream")
@flags(ModelOptions, "sizes")
@click.option("--predictor", "names", multiple=True, required=True, help="Its name; may be repeated.")
@click.option("--results", type=click.Path(path_type=Path), required=True, help="Folder for scores.")
def main(stream: StreamOptions, sizes: ModelOptions, names: tuple[str, ...], results: Path) -> None:
    """Ask predictors for the scores of a stream; on SIGTERM, ask for those of the last batch again."""
    log_to_stderr()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    featurizer, batches = Featurizer(sizes), list[Features]()
    with suppress(KeyboardInterrupt), ThreadPoolExecutor(len(names)) as threads:
        predictors = [RemotePredictor(results, name) for name in names]
        for events, _ in play(stream, sizes):
            batches.append(featurizer.features(events))
            list(threads.map(lambda each: each.predict(request_of(batches[-1])), predictors))
        with suppress(KeyboardInterrupt):
            signal.pause()
        for each in predictors:
            each.predict(request_of(batches[-1]))
            each.write(results, batches)


if __name__ == "__main__":
    main()
