"""A replica of the demo: it scores the stream as it arrives, and writes its scores and final rows to files.

A predictor must score an event before the trainer learns from it. To ensure that on a busy machine too, the demo's
replicas only apply a release after scoring every batch that it was trained on. With `--most-behind` they also wait
for a slow trainer.
"""

import copy
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import click
import numpy as np
import uvicorn
from numpy.typing import NDArray
from torch import nn

from deltasync.base.logs import log_to_stderr
from deltasync.base.process import keep_freed_memory, listening_socket
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import service_options
from deltasync.client import (
    Admin,
    Release,
    SharedReader,
    SharedTarget,
    Subscriber,
    SubscriberOptions,
    ValueType,
    Written,
)
from deltasync.client.shared.layout import folder_of
from deltasync.client.targets.local import LocalTarget
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.trainer.example.compare import Tables, save_state
from deltasync.trainer.example.features import Features, Featurizer
from deltasync.trainer.example.model import QUANTISED, ClickModel, click_batch, outputs, quantised, served_rows
from deltasync.trainer.example.options import ModelOptions, StreamOptions, arguments, flags
from deltasync.trainer.example.predictor import MeteredTarget, create_app, request_of
from deltasync.trainer.example.processes import DemoFailed
from deltasync.trainer.example.report import auc
from deltasync.trainer.example.stream import play

_CHECK_SECONDS, _ANSWER_SECONDS = 0.5, 60.0
# A replica checks its AUC on the events of the last batches.
RECENT_BATCHES = 16
Logits = NDArray[np.float32]


class DelayedTarget:
    """Makes a target apply a release only after its batches are scored, and none of a step after `last_step`.

    With `most_behind` a batch waits for a release that lacks at most this many of the scored batches, until the
    model is rolled back.

    Attributes:
        receipts: version, step and unix nanoseconds of each release `applied`, and `received_bytes`.
    """

    def __init__(
        self, *args: Any, last_step: float = math.inf, most_behind: float = math.inf, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.receipts: dict[str, Any] = {"applied": [], "received_bytes": []}
        self._last_step, self._scored, self._stopping = last_step, 0, False
        self._most_behind, self._newest = most_behind, 0
        self._moved = threading.Condition()

    def apply(self, release: Release) -> Written | None:
        """Wait until the batches of a release are scored, then apply it. The subscriber's thread calls this."""
        with self._moved:
            if release.step < self._newest:  # The model was rolled back, and its trainer does not go on.
                self._most_behind = math.inf
            self._newest = release.step
            self._moved.notify_all()
            self._moved.wait_for(lambda: self._stopping or release.step <= min(self._scored, self._last_step))
        written: Written | None = super().apply(release)  # type: ignore[misc]
        if not release.more:
            self.receipts["applied"].append((release.position.number, release.step, time.time_ns()))
            self.receipts["received_bytes"].append(release.bytes)
        return written

    def wait_for_release(self) -> None:
        """Wait until the next batch may be scored."""
        with self._moved:
            self._moved.wait_for(lambda: self._stopping or self._scored <= self._newest + self._most_behind)

    def count_batch(self) -> None:
        """Note that one more batch is scored."""
        with self._moved:
            self._scored += 1
            self._moved.notify_all()

    def stop(self) -> None:
        """Stop delaying releases, so that the subscription can close."""
        with self._moved:
            self._stopping = True
            self._moved.notify_all()


class HeldTarget(DelayedTarget, MeteredTarget):
    """A predictor's target. Each reading scores one batch."""

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """See `TorchTarget.reading`. Before the first release, the weights are those of the trainer's start."""
        self.wait_for_release()
        with LocalTarget.reading(self) as reading:
            yield reading
        self.count_batch()


class HeldMirror(DelayedTarget, SharedTarget):
    """The target of a mirror, whose workers score the batches."""


class InProcess:
    """Scores batches in this process, and from event `freeze_at` on also with a frozen copy of the model."""

    def __init__(self, target: HeldTarget, freeze_at: int | None) -> None:
        self._target, self._freeze_at, self._frozen = target, freeze_at, None
        self.answers = None

    def scores(self, features: Features) -> dict[str, NDArray[Any]]:
        """Log odds from the current rows, as `logit`, their `version`, and log odds of the frozen copy."""
        batch = click_batch(features)
        with self._target.reading() as reading:
            found: dict[str, NDArray[Any]] = {"logit": outputs(reading.module, batch).numpy()}
            found["version"] = np.full(len(features), reading.version)
            if self._freeze_at is not None:
                if self._frozen is None and features.index[-1] >= self._freeze_at:
                    self._frozen = copy.deepcopy(reading.module)
                found["frozen"] = outputs(self._frozen, batch).numpy() if self._frozen else found["logit"]
        return found


class OverHttp:
    """Scores batches with a predictor over HTTP, and measures its response times."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.answers: dict[str, list[float]] = {"seconds": [], "age_seconds": []}

    def says(self, path: str) -> bool:
        """Whether it answers a probe with 200."""
        try:
            return self._ask("GET", path)[0] == 200
        except OSError:
            return False

    def scores(self, features: Features) -> dict[str, Logits]:
        """Log odds from the current rows, as `logit`; DemoFailed if the predictor refuses."""
        begun = time.monotonic()
        answer = self.answer(features)
        self.answers["seconds"].append(time.monotonic() - begun)
        self.answers["age_seconds"].append(answer["age_seconds"])
        return {"logit": np.array(answer["scores"], np.float32)}

    def answer(self, features: Features) -> dict[str, Any]:
        """The answer for a batch; DemoFailed if the predictor refuses."""
        status, body = self._ask("POST", "/predict", request_of(features))
        if status != 200:
            raise DemoFailed(f"the predictor answered {status}: {body.decode(errors='replace')}")
        answer: dict[str, Any] = json.loads(body)
        return answer

    def _ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_SECONDS)
        with closing(connection):
            connection.request(method, path, body, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                return response.status, response.read()


def serve(target: HeldTarget, subscriber: Subscriber, sizes: ModelOptions, stack: ExitStack) -> OverHttp:
    """Run the example predictor in this process."""
    # Use one thread, like the model whose outputs the answers are compared with.
    app = create_app(target, subscriber, sizes.ids, threads=1)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    listener = stack.enter_context(listening_socket("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    stack.callback(thread.join)
    stack.callback(setattr, server, "should_exit", True)
    thread.start()
    return OverHttp(listener.getsockname()[1])


class Workers(OverHttp):
    """Scores batches with worker processes over a mirror, whose target is in this process."""

    def __init__(
        self, mirror: str, workers: int, target: HeldMirror, sizes: ModelOptions, stack: ExitStack
    ) -> None:
        with listening_socket("127.0.0.1", 0) as listener:
            super().__init__(listener.getsockname()[1])
        command = [sys.executable, "-m", "deltasync.trainer.example.workers", mirror, "--workers", str(workers)]
        process = subprocess.Popen([*command, "--http-port", str(self._port), *arguments(sizes)])
        stack.callback(process.wait)
        stack.callback(process.terminate)
        self._target, self._workers = target, workers
        while not self.says("/livez"):  # Before it subscribes, because the demo starts when it has the model.
            if process.poll() is not None:
                raise DemoFailed(f"the workers ended with status {process.returncode}")
            time.sleep(_CHECK_SECONDS)

    def scores(self, features: Features) -> dict[str, Logits]:
        """See `OverHttp`."""
        found = super().scores(features)
        self._target.count_batch()
        return found

    def scores_of_all(self, features: Features) -> dict[str, Logits]:
        """The log odds that every worker answers; DemoFailed if they differ, or a worker does not answer."""
        scores, ends = dict[int, list[float]](), time.monotonic() + _ANSWER_SECONDS
        with ThreadPoolExecutor(4 * self._workers) as threads:
            while len(scores) < self._workers:
                # The system chooses who answers, so ask all of them at the same time.
                for each in threads.map(self.answer, [features] * 4 * self._workers):
                    scores[each["worker"]] = each["scores"]
                if time.monotonic() > ends:
                    raise DemoFailed(f"{len(scores)} of {self._workers} workers answered")
        logits = [np.array(each, np.float32) for each in scores.values()]
        if any(each.tobytes() != logits[0].tobytes() for each in logits):
            raise DemoFailed("the workers' answers differ")
        return {"logit": logits[0]}


class AucCheck:
    """Raises an objection once the AUC of the last batches is below a share of its best.

    Attributes:
        objected_at: the number of events that were scored before the objection; None without one.
    """

    def __init__(self, raise_objection: Callable[[str], None], share: float) -> None:
        self._raise_objection, self._share = raise_objection, share
        self._recent = deque[tuple[Logits, Logits]](maxlen=RECENT_BATCHES)
        self._best = 0.0
        self.objected_at: int | None = None

    def add(self, features: Features, logit: Logits) -> None:
        """Take the scores of a batch, and the labels that arrived since."""
        self._recent.append((features.label, logit))
        if len(self._recent) < RECENT_BATCHES or self.objected_at is not None:
            return
        labels, logits = (np.concatenate(column) for column in zip(*self._recent, strict=True))
        found = auc(labels, logits)
        self._best = max(self._best, found)
        if found < self._share * self._best:
            reason = f"the AUC of the last {len(labels):,} events is {found:.3f}, its best was {self._best:.3f}"
            self._raise_objection(reason)
            self.objected_at = int(features.index[-1]) + 1


@click.command(context_settings=CONTEXT)
@flags(StreamOptions, "stream")
@flags(ModelOptions, "sizes")
@service_options(default=None)
@click.option("--consumer", required=True, help="Consumer of this replica.")
@click.option("--replica", required=True, help="Name of this replica.")
@click.option(
    "--value-type",
    type=click.Choice([each.value for each in QUANTISED]),
    help="Run a predictor that answers over HTTP from tables quantised to this type.",
)
@click.option(
    "--workers", type=click.IntRange(1), help="Run a mirror, and predictors in so many processes over it."
)
@click.option(
    "--freeze-at", type=int, help="From this event on, also score with a frozen copy, or apply no release."
)
@click.option(
    "--most-behind", type=int, help="Wait for a release that lacks at most this many of the scored batches."
)
@click.option("--object-below", type=float, help="Object once the AUC is below this share of its best.")
@click.option("--results", type=click.Path(path_type=Path), required=True, help="Folder for scores and rows.")
def main(
    stream: StreamOptions,
    sizes: ModelOptions,
    value_type: str | None,
    workers: int | None,
    freeze_at: int | None,
    most_behind: int | None,
    object_below: float | None,
    results: Path,
    **settings: Any,
) -> None:
    """Score a stream with the newest rows until SIGTERM."""
    log_to_stderr()
    keep_freed_memory()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    model, mirror = ClickModel(sizes).eval(), f"demo-{os.getpid()}"
    if value_type:
        model = quantised(model, ValueType(value_type))
    check = None
    if object_below is not None:
        check = AucCheck(partial(Admin(settings["service"]).object, settings["consumer"]), object_below)
    featurizer, batches, scores = Featurizer(sizes), list[Features](), list[dict[str, NDArray[Any]]]()
    with ExitStack() as stack:
        scorer: Workers | OverHttp | InProcess
        if workers:
            stack.callback(shutil.rmtree, folder_of(mirror))
            held = HeldMirror(mirror, settings["consumer"])
            stack.callback(held.close)
            scorer = Workers(mirror, workers, held, sizes, stack)
            subscriber = _subscribed(held, stack, on_readiness=held.note_readiness, **settings)
        else:
            last_step = freeze_at // stream.batch_size if value_type and freeze_at else math.inf
            behind = math.inf if most_behind is None else most_behind
            target = HeldTarget(model, last_step=last_step, most_behind=behind)
            subscriber = _subscribed(target, stack, **settings)
            scorer = serve(target, subscriber, sizes, stack) if value_type else InProcess(target, freeze_at)
        with suppress(KeyboardInterrupt):
            while isinstance(scorer, OverHttp) and not scorer.says("/ready"):
                time.sleep(_CHECK_SECONDS)
            for events, _ in play(stream, sizes):
                batches.append(featurizer.features(events))
                scores.append(scorer.scores(batches[-1]))
                if check:
                    check.add(batches[-1], scores[-1]["logit"])
            (results / f"scored-{settings['replica']}").touch()
            while True:
                subscriber.check()
                time.sleep(_CHECK_SECONDS)
        last = scorer.scores_of_all(batches[-1]) if isinstance(scorer, Workers) else scorer.scores(batches[-1])
        if workers:
            rows, receipts = mirrored_rows(mirror), held.receipts
        else:
            rows = served_rows(model) if value_type else own_rows(target, model)
            receipts = target.receipts
    # Write everything for the comparison: scores, outputs of the final rows for the last batch, and the rows.
    name = settings["replica"]
    columns = {key: np.concatenate([getattr(each, key) for each in batches]) for key in ("index", "label")}
    columns |= {key: np.concatenate([each[key] for each in scores]) for key in last}
    np.savez(results / f"scores-{name}.npz", allow_pickle=False, **columns)
    np.savez(results / f"outputs-{name}.npz", logit=last["logit"])
    np.savez(results / f"tables-{name}.npz", allow_pickle=False, **rows)
    save_state(model, results / f"state-{name}.pt")
    facts = receipts | {"answers": scorer.answers, "objected_at": check.objected_at if check else None}
    (results / f"{name}.json").write_text(json.dumps(facts))


def _subscribed(target: HeldTarget | HeldMirror, stack: ExitStack, **settings: Any) -> Subscriber:
    subscriber = stack.enter_context(Subscriber(SubscriberOptions(**settings), target))
    stack.callback(target.stop)
    return subscriber


def own_rows(target: TorchTarget, model: nn.Module) -> Tables:
    """The rows of a model that is not quantised, without its buffers."""
    buffers = dict(model.named_buffers())
    return {key: rows.numpy() for key, rows in target.tables().items() if key not in buffers}


def mirrored_rows(mirror: str) -> Tables:
    """The rows in the memory of a mirror."""
    with SharedReader(mirror).reading() as reading:
        return {name: rows.copy() for name, rows in reading.tables.items()}


if __name__ == "__main__":
    main()
