"""Numbers of a training run, for whoever tracks it: TensorBoard, or a function. No step waits for any of it."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from deltasync.base.errors import DeltasyncError
from deltasync.base.words import are
from deltasync.client import Endpoint
from deltasync.client.admin import fetch_lag
from deltasync.client.connection import Home
from deltasync.trainer.checks import check_names, check_positive, check_whole
from deltasync.trainer.sync import DeltaSync
from deltasync.trainer.sync_metrics import COUNTERS, GAUGES

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Called with the number of steps, and numbers by name, in a thread for that alone.
Callback: TypeAlias = Callable[[int, Mapping[str, float]], None]
Number: TypeAlias = torch.Tensor | float

# Of `DeltaSync.metrics`: sums that only grow, by what is told instead.
SUMS = {name: f"{name}_per_step" for name in ("step_seconds", "tracking_seconds")}
# All else that is known waits for it, in the thread that tells.
_LAG_SECONDS = 2.0
_OURS = {*COUNTERS, *GAUGES, *SUMS.values()}


@dataclass(frozen=True, kw_only=True)
class ScalarOptions:
    """What is told how often.

    Attributes:
        every: steps between.
        service: where the service answers HTTP, with the right to read its status; needed for lag alone.
        consumers: those whose lag is told.
        close_seconds: how long `Scalars.close` waits for callbacks at most.
    """

    every: int = 10
    service: Endpoint | str = ""
    consumers: Sequence[str] = ()
    close_seconds: float = 10.0

    def __post_init__(self) -> None:
        check_whole("every", self.every)
        check_names("consumers", self.consumers)
        check_positive("close_seconds", self.close_seconds)
        if self.consumers:
            _checked(self.service)


def _checked(service: Endpoint | str) -> Endpoint:
    """An endpoint to ask for lag, of a service that may be away."""
    endpoint = Endpoint.of_http(service)
    return replace(endpoint, timeout_seconds=min(endpoint.timeout_seconds, _LAG_SECONDS))


@dataclass(frozen=True)
class _Reading:
    """A number as it is now. One on a GPU is on its way to host memory until `arrived`."""

    number: Number
    arrived: torch.cuda.Event | None = None

    @classmethod
    def of(cls, number: Number) -> "_Reading":
        """In the thread that trains, which waits for nothing."""
        if not isinstance(number, torch.Tensor):
            return cls(number)
        copy = number.detach().to("cpu", non_blocking=True, copy=True)
        if not number.is_cuda:
            return cls(copy)
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(number.device))
        return cls(copy, arrived)

    def read(self) -> float:
        """The number, once it is there."""
        if self.arrived:
            self.arrived.synchronize()
        return float(self.number)


@dataclass(frozen=True)
class _Sample:
    """What is known of a step: what publishing says, and what the trainer does."""

    step: int
    known: Mapping[str, float]
    readings: Mapping[str, _Reading]

    @classmethod
    def of(cls, sync: DeltaSync, numbers: Mapping[str, Number]) -> "_Sample":
        """Now, in the thread that trains."""
        readings = {name: _Reading.of(each) for name, each in numbers.items()}
        return cls(sync.tracker.steps, sync.metrics(), readings)

    def since(self, before: "_Sample") -> dict[str, float]:
        """What is known, with sums per step since an earlier sample; without them, where there was no step."""
        found, steps = dict(self.known), self.step - before.step
        for name, told in SUMS.items():
            grown = found.pop(name) - before.known[name]
            found.update({told: grown / steps} if steps > 0 else {})
        return found


class Scalars:
    """Tells callbacks how training and publishing go: what the trainer says itself, and `DeltaSync.metrics`, of
    which seconds that add up are told per step.

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
        self._home = Home("Scalars")
        self._sync, self._options = sync, options or ScalarOptions()
        self._callbacks = {f"callback {n} ({_name(each)})": each for n, each in enumerate(callbacks, 1)}
        self._moved = threading.Condition()
        self._sample: _Sample | None = None
        self._closed = False
        self._before = _Sample.of(sync, {})
        self._telling: _Sample | None = None
        self._busy_with = ""
        self._failing = set[str]()
        self._thread = threading.Thread(target=self._run, name="deltasync-scalars", daemon=True)
        self._thread.start()

    def step(self, **numbers: Number) -> None:
        """Note that a step is complete, and what is known of it, say `loss`: tensors of one element are not waited
        for, and read in another thread.

        Raises:
            ServiceUnavailable: this process was forked since.
        """
        self._home.check()
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
        """Tell what is left, and close callbacks. Where one takes too long, that is logged and left to it. In a
        process that was forked since, do nothing.
        """
        if self._home.left:
            return
        with self._moved:
            self._closed = True
            self._moved.notify()
        self._thread.join(self._options.close_seconds)
        if self._thread.is_alive():
            self._say_untold()

    def __enter__(self) -> "Scalars":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say_untold(self) -> None:
        with self._moved:
            steps = [each.step for each in (self._telling, self._sample) if each]
        left = f": {are(len(steps), 'step')} left untold: {', '.join(map(str, steps))}" if steps else ""
        text = "scalars: %s takes more than %g s%s"
        logger.warning(text, self._busy_with, self._options.close_seconds, left)

    # The thread that tells.

    def _run(self) -> None:
        while sample := self._next():
            self._tell(sample)
        for name, each in self._callbacks.items():
            if close := getattr(each, "close", None):
                self._try(f"closing {name}", close)

    def _next(self) -> _Sample | None:
        """The next sample; None once there will be no more."""
        with self._moved:
            self._telling = None
            self._moved.wait_for(lambda: self._sample or self._closed)
            self._telling, self._sample = self._sample, None
            return self._telling

    def _tell(self, sample: _Sample) -> None:
        numbers = {name: self._try(f"number {name!r}", each.read) for name, each in sample.readings.items()}
        found = {name: each for name, each in numbers.items() if each is not None}
        found |= sample.since(self._before)
        for consumer in self._options.consumers:
            found |= self._try(f"lag of {consumer!r}", partial(self._lag, consumer)) or {}
        for name, each in self._callbacks.items():
            self._try(name, partial(each, sample.step, found))
        self._before = sample

    def _lag(self, consumer: str) -> dict[str, float]:
        lag = fetch_lag(_checked(self._options.service), consumer)["lag"]
        return {f"lag/{consumer}_{name}": float(lag[name]) for name in ("versions", "rows", "seconds")}

    def _try(self, what: str, call: Callable[[], T]) -> T | None:
        """Whatever is raised ends neither training nor what else is told; it is logged when it begins."""
        self._busy_with = what
        try:
            answer = call()
        except Exception as error:
            if what not in self._failing:
                known = isinstance(error, DeltasyncError)
                logger.warning("scalars: %s has failed: %s", what, error, exc_info=None if known else error)
            self._failing.add(what)
            return None
        self._failing.discard(what)
        return answer


class TensorBoard:
    """A callback that writes TensorBoard's event files."""

    def __init__(self, folder: Path | str) -> None:
        """Write into a folder: one of its own for each rank.

        Raises:
            ImportError: `tensorboard` is not installed: `pip install 'deltasync[tensorboard]'`.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter  # Takes a second, and is not installed everywhere.
        except ImportError as error:
            raise ImportError("there is no tensorboard: pip install 'deltasync[tensorboard]'") from error
        self._writer: Any = SummaryWriter(str(folder))

    def __call__(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write numbers after a step."""
        for name, value in numbers.items():
            group = "" if "/" in name else "deltasync/" if name in _OURS else "train/"
            self._writer.add_scalar(f"{group}{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _name(callback: Callback) -> str:
    return str(getattr(callback, "__name__", type(callback).__name__))
