"""A replica of the demo: it scores the stream as it arrives, and writes its scores and final rows to files.

A predictor must score an event before the trainer learns from it. To ensure that on a busy machine too, the demo's
replicas only apply a release after scoring every batch that it was trained on. With `--most-behind` they also wait
for a slow trainer.
"""

import copy
import json
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
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
from deltasync.client import Admin, Release, Subscriber, SubscriberOptions, ValueType, Written
from deltasync.trainer.example.compare import save_state
from deltasync.trainer.example.features import Features, Featurizer
from deltasync.trainer.example.model import QUANTISED, ClickModel, click_batch, outputs, quantised, served_rows
from deltasync.trainer.example.options import ModelOptions, StreamOptions, flags
from deltasync.trainer.example.predictor import MeteredTarget, create_app, request_of
from deltasync.trainer.example.processes import DemoFailed
from deltasync.trainer.example.report import auc
from deltasync.trainer.example.stream import play

_CHECK_SECONDS, _ANSWER_SECONDS = 0.5, 60.0
# A replica checks its AUC on the events of the last batches.
RECENT_BATCHES = 16
Logits = NDArray[np.float32]


class HeldTarget(MeteredTarget):
    """Applies a release only after its batches are scored, and no release of a step after `last_step`.

    Each reading scores one batch. It waits for a release that lacks at most `most_behind` of the scored batches,
    until the model is rolled back.

    Attributes:
        receipts: version, step and unix nanoseconds of each release `applied`, and `received_bytes`.
    """

    def __init__(self, module: nn.Module, last_step: float = math.inf, most_behind: float = math.inf) -> None:
        super().__init__(module)
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
        written = super().apply(release)
        if not release.more:
            self.receipts["applied"].append((release.position.number, release.step, time.time_ns()))
            self.receipts["received_bytes"].append(release.bytes)
        return written

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """See `TorchTarget.reading`."""
        with self._moved:
            self._moved.wait_for(lambda: self._stopping or self._scored <= self._newest + self._most_behind)
        with super().reading() as reading:
            yield reading
        with self._moved:
            self._scored += 1
            self._moved.notify_all()

    def stop(self) -> None:
        """Stop delaying releases, so that the subscription can close."""
        with self._moved:
            self._stopping = True
            self._moved.notify_all()


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
    """Scores batches with the example predictor in this process, over HTTP, and measures its response times."""

    def __init__(self, target: HeldTarget, subscriber: Subscriber, sizes: ModelOptions, stack: ExitStack) -> None:
        # Use one thread, like the model whose outputs the answers are compared with.
        app = create_app(target, subscriber, sizes.ids, threads=1)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        listener = stack.enter_context(listening_socket("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        stack.callback(thread.join)
        stack.callback(setattr, server, "should_exit", True)
        thread.start()
        self._port = listener.getsockname()[1]
        self.answers: dict[str, list[float]] = {"seconds": [], "age_seconds": []}

    def scores(self, features: Features) -> dict[str, Logits]:
        """Log odds from the current rows, as `logit`; DemoFailed if the predictor refuses."""
        begun, connection = time.monotonic(), HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_SECONDS)
        connection.request("POST", "/predict", request_of(features), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            status, body = response.status, response.read()
        connection.close()
        if status != 200:
            raise DemoFailed(f"the predictor answered {status}: {body.decode(errors='replace')}")
        answer = json.loads(body)
        self.answers["seconds"].append(time.monotonic() - begun)
        self.answers["age_seconds"].append(answer["age_seconds"])
        return {"logit": np.array(answer["scores"], np.float32)}


class Check:
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
    model = ClickModel(sizes).eval()
    if value_type:
        model = quantised(model, ValueType(value_type))
    last_step = freeze_at // stream.batch_size if value_type and freeze_at else math.inf
    target = HeldTarget(model, last_step, math.inf if most_behind is None else most_behind)
    check = None
    if object_below is not None:
        check = Check(partial(Admin(settings["service"]).object, settings["consumer"]), object_below)
    featurizer, batches, scores = Featurizer(sizes), list[Features](), list[dict[str, NDArray[Any]]]()
    with ExitStack() as stack:
        subscriber = stack.enter_context(Subscriber(SubscriberOptions(**settings), target))
        stack.callback(target.stop)
        over_http = OverHttp(target, subscriber, sizes, stack) if value_type else None
        scorer = over_http or InProcess(target, freeze_at)
        with suppress(KeyboardInterrupt):
            while over_http and not subscriber.ready:
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
        last = scorer.scores(batches[-1])
    # Write everything for the comparison: scores, outputs of the final rows for the last batch, and the rows.
    name = settings["replica"]
    columns = {key: np.concatenate([getattr(each, key) for each in batches]) for key in ("index", "label")}
    columns |= {key: np.concatenate([each[key] for each in scores]) for key in last}
    np.savez(results / f"scores-{name}.npz", allow_pickle=False, **columns)
    np.savez(results / f"outputs-{name}.npz", logit=last["logit"])
    buffers = dict(model.named_buffers())
    plain = {key: rows.numpy() for key, rows in target.tables().items() if key not in buffers}
    np.savez(results / f"tables-{name}.npz", allow_pickle=False, **(served_rows(model) if value_type else plain))
    save_state(model, results / f"state-{name}.pt")
    facts = target.receipts | {"answers": scorer.answers, "objected_at": check.objected_at if check else None}
    (results / f"{name}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
