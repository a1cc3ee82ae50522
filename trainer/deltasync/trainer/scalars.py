"""Numbers of a training run, for whoever tracks it: TensorBoard, or a function. No step waits for any of it."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from deltasync.client import Endpoint
from deltasync.client.status import fetch_lag
from deltasync.core.errors import DeltasyncError
from deltasync.trainer.checks import check_whole
from deltasync.trainer.sync import DeltaSync

logger = logging.getLogger(__name__)

# Called with the number of steps, and numbers by name, in a thread for that alone.
Callback: TypeAlias = Callable[[int, Mapping[str, float]], None]
Number: TypeAlias = torch.Tensor | float


@dataclass(frozen=True, kw_only=True)
class ScalarOptions:
    """What is told how often.

    Attributes:
        every: steps between.
        http: where the service answers HTTP; needed for lag alone.
        consumers: those whose lag is told.
    """

    every: int = 10
    http: Endpoint | str = ""
    consumers: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_whole("every", self.every)


@dataclass(frozen=True)
class _Sample:
    """What is known of a step, and tensors that may still be computed when `ready` is recorded."""

    step: int
    known: Mapping[str, float]
    numbers: Mapping[str, Number]
    ready: torch.cuda.Event | None

    @classmethod
    def of(cls, sync: DeltaSync, numbers: Mapping[str, Number]) -> "_Sample":
        """Now, in the thread that trains."""
        kept = {name: each.detach() if isinstance(each, torch.Tensor) else each for name, each in numbers.items()}
        ready = None
        if any(isinstance(each, torch.Tensor) and each.is_cuda for each in kept.values()):
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        return cls(sync.tracker.steps, sync.metrics(), kept, ready)

    def read(self) -> dict[str, float]:
        """All numbers, once they are there."""
        if self.ready:
            self.ready.synchronize()
        return {**{name: float(each) for name, each in self.numbers.items()}, **self.known}


class Scalars:
    """Tells callbacks how training and publishing go: what the trainer says itself, and `DeltaSync.metrics`.

        with Scalars(sync, [TensorBoard(folder)]) as scalars:
            for ...:
                loss = ...
                sync.step()
                scalars.step(loss=loss)

    Attributes:
        dropped: samples that were left out, since callbacks were still busy with one before.
    """

    def __init__(
        self, sync: DeltaSync, callbacks: Sequence[Callback], options: ScalarOptions | None = None
    ) -> None:
        self.dropped = 0
        self._sync, self._callbacks, self._options = sync, list(callbacks), options or ScalarOptions()
        self._moved = threading.Condition()
        self._sample: _Sample | None = None
        self._closed = False
        self._failing = set[object]()
        self._thread = threading.Thread(target=self._run, name="deltasync-scalars", daemon=True)
        self._thread.start()

    def step(self, **numbers: Number) -> None:
        """Note that a step is complete, and what is known of it, say `loss`: tensors of one element are not waited
        for, and read in another thread.
        """
        if self.due:
            sample = _Sample.of(self._sync, numbers)
            with self._moved:
                self.dropped += self._sample is not None
                self._sample = sample
                self._moved.notify()

    @property
    def due(self) -> bool:
        """Whether the last step is one that is told."""
        return self._sync.tracker.steps % self._options.every == 0

    def close(self) -> None:
        """Tell what is left, and wait until that is done."""
        with self._moved:
            self._closed = True
            self._moved.notify()
        self._thread.join()
        for each in self._callbacks:
            if close := getattr(each, "close", None):
                close()

    def __enter__(self) -> "Scalars":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The thread that tells.

    def _run(self) -> None:
        while True:
            with self._moved:
                self._moved.wait_for(lambda: self._sample or self._closed)
                sample, self._sample = self._sample, None
            if sample is None:
                return
            numbers = {**sample.read(), **self._lag()}
            for each in self._callbacks:
                self._try(each, partial(each, sample.step, numbers))

    def _lag(self) -> dict[str, float]:
        found = dict[str, float]()
        for name in self._options.consumers:
            self._try(name, partial(self._add_lag, name, found))
        return found

    def _add_lag(self, consumer: str, found: dict[str, float]) -> None:
        lag = fetch_lag(Endpoint.of_http(self._options.http), consumer)["lag"]
        found.update({f"lag/{consumer}_{name}": float(lag[name]) for name in ("versions", "rows", "seconds")})

    def _try(self, what: object, call: Callable[[], Any]) -> None:
        """Whatever a callback raises ends neither training nor the others; it is logged when it begins."""
        try:
            call()
            self._failing.discard(what)
        except Exception as error:
            if what not in self._failing:
                known = isinstance(error, DeltasyncError)
                logger.warning("scalars: %s has failed: %s", what, error, exc_info=None if known else error)
            self._failing.add(what)


class TensorBoard:
    """A callback that writes TensorBoard's event files."""

    def __init__(self, folder: Path | str) -> None:
        """Write into a folder: one of its own for each rank.

        Raises:
            ImportError: `tensorboard` is not installed: `pip install 'deltasync[tensorboard]'`.
        """
        from torch.utils.tensorboard import SummaryWriter  # Takes a second, and is not installed everywhere.

        self._writer: Any = SummaryWriter(str(folder))

    def __call__(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write numbers after a step."""
        for name, value in numbers.items():
            self._writer.add_scalar(name if "/" in name else f"{_group(name)}/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _group(name: str) -> str:
    return "train" if name == "loss" else "deltasync"
