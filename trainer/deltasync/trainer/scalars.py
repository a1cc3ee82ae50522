"""Report metrics of a training run to TensorBoard or other callbacks, without delaying steps."""

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
from deltasync.client.connection import ForkGuard
from deltasync.trainer.checks import check_names, check_positive, check_whole
from deltasync.trainer.sync import DeltaSync
from deltasync.trainer.sync_options import COUNTERS, GAUGES

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Called with the number of steps, and numbers by name, in a separate thread.
Callback: TypeAlias = Callable[[int, Mapping[str, float]], None]
Number: TypeAlias = torch.Tensor | float

# Sums in `DeltaSync.metrics`, and the names of their growth per step, which callbacks get instead.
SUMS = {name: f"{name}_per_step" for name in ("step_seconds", "tracking_seconds")}
# Timeout of a request for lag, which delays the other numbers of a sample.
_LAG_SECONDS = 2.0
_OURS = {*COUNTERS, *GAUGES, *SUMS.values()}


@dataclass(frozen=True, kw_only=True)
class ScalarOptions:
    """Which numbers callbacks get, and how often.

    Attributes:
        every: steps between two calls.
        service: HTTP endpoint of the service, with role `read`; only needed for lag.
        consumers: names of consumers whose lag to report.
        close_seconds: how long `Scalars.close` waits for callbacks.
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
    """The HTTP endpoint with a short timeout, since the service may be down."""
    endpoint = Endpoint.of_http(service)
    return replace(endpoint, timeout_seconds=min(endpoint.timeout_seconds, _LAG_SECONDS))


@dataclass(frozen=True)
class _Reading:
    """A snapshot of a number. A number on a GPU is being copied to host memory until `arrived`."""

    number: Number
    arrived: torch.cuda.Event | None = None

    @classmethod
    def of(cls, number: Number) -> "_Reading":
        """Take a snapshot without waiting, in the training thread."""
        if not isinstance(number, torch.Tensor):
            return cls(number)
        copy = number.detach().to("cpu", non_blocking=True, copy=True)
        if not number.is_cuda:
            return cls(copy)
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(number.device))
        return cls(copy, arrived)

    def read(self) -> float:
        """Wait for the copy; returns the number."""
        if self.arrived:
            self.arrived.synchronize()
        return float(self.number)


@dataclass(frozen=True)
class _Sample:
    """The numbers of a step: the metrics of publishing, and the trainer's own numbers."""

    step: int
    metrics: Mapping[str, float]
    readings: Mapping[str, _Reading]

    @classmethod
    def of(cls, sync: DeltaSync, numbers: Mapping[str, Number]) -> "_Sample":
        """Take a sample in the training thread."""
        readings = {name: _Reading.of(each) for name, each in numbers.items()}
        return cls(sync.tracker.steps, sync.metrics(), readings)

    def since(self, before: "_Sample") -> dict[str, float]:
        """The metrics of publishing, with each sum as its growth per step since an earlier sample."""
        metrics, steps = dict(self.metrics), self.step - before.step
        for name, per_step in SUMS.items():
            growth = metrics.pop(name) - before.metrics[name]
            metrics.update({per_step: growth / steps} if steps > 0 else {})
        return metrics


class Scalars:
    """Calls callbacks with numbers of training and publishing.

    They get the trainer's own numbers and `DeltaSync.metrics`, with sums of seconds as seconds per step.

        with Scalars(sync, [TensorBoard(folder)]) as scalars:
            for ...:
                loss = ...
                sync.step()
                scalars.step(loss=loss)

    Attributes:
        dropped: number of samples left out because callbacks were busy with an earlier one.
    """

    def __init__(
        self, sync: DeltaSync, callbacks: Sequence[Callback], options: ScalarOptions | None = None
    ) -> None:
        self.dropped = 0
        self._fork_guard = ForkGuard("Scalars")
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
        """Record a complete step with its numbers, for example `loss`.

        A number may be a tensor with one element, which another thread reads.

        Raises:
            ServiceUnavailable: this is a forked process.
        """
        self._fork_guard.check()
        if self.due:
            sample = _Sample.of(self._sync, numbers)
            with self._moved:
                self.dropped += self._sample is not None
                self._sample = sample
                self._moved.notify()

    @property
    def due(self) -> bool:
        """Whether callbacks get the numbers of the last step."""
        return self._sync.tracker.steps % self._options.every == 0

    def close(self) -> None:
        """Call callbacks with the last sample, and close them.

        Waits `close_seconds` at most, and logs a callback that takes longer. Does nothing in a forked process.
        """
        if self._fork_guard.left:
            return
        with self._moved:
            self._closed = True
            self._moved.notify()
        self._thread.join(self._options.close_seconds)
        if self._thread.is_alive():
            self._log_unreported()

    def __enter__(self) -> "Scalars":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log_unreported(self) -> None:
        with self._moved:
            steps = [each.step for each in (self._telling, self._sample) if each]
        left = f": {are(len(steps), 'step')} not reported: {', '.join(map(str, steps))}" if steps else ""
        text = "scalars: %s takes more than %g s%s"
        logger.warning(text, self._busy_with, self._options.close_seconds, left)

    # Everything below runs in the thread of the callbacks.

    def _run(self) -> None:
        while sample := self._next():
            self._tell(sample)
        for name, each in self._callbacks.items():
            if close := getattr(each, "close", None):
                self._try(f"closing {name}", close)

    def _next(self) -> _Sample | None:
        """The next sample; None after `close`."""
        with self._moved:
            self._telling = None
            self._moved.wait_for(lambda: self._sample or self._closed)
            self._telling, self._sample = self._sample, None
            return self._telling

    def _tell(self, sample: _Sample) -> None:
        numbers = {name: self._try(f"number {name!r}", each.read) for name, each in sample.readings.items()}
        read = {name: each for name, each in numbers.items() if each is not None}
        read |= sample.since(self._before)
        for consumer in self._options.consumers:
            read |= self._try(f"lag of {consumer!r}", partial(self._lag, consumer)) or {}
        for name, each in self._callbacks.items():
            self._try(name, partial(each, sample.step, read))
        self._before = sample

    def _lag(self, consumer: str) -> dict[str, float]:
        lag = fetch_lag(_checked(self._options.service), consumer)["lag"]
        return {f"lag/{consumer}_{name}": float(lag[name]) for name in ("versions", "rows", "seconds")}

    def _try(self, what: str, call: Callable[[], T]) -> T | None:
        """Call a function. Errors are logged once and stop neither training nor other numbers."""
        self._busy_with = what
        try:
            answer = call()
        except Exception as error:
            if what not in self._failing:
                expected = isinstance(error, DeltasyncError)
                logger.warning("scalars: %s failed: %s", what, error, exc_info=None if expected else error)
            self._failing.add(what)
            return None
        self._failing.discard(what)
        return answer


class TensorBoard:
    """A callback that writes TensorBoard's event files."""

    def __init__(self, folder: Path | str) -> None:
        """Write into a folder. Each rank needs its own.

        Raises:
            ImportError: `tensorboard` is not installed: `pip install 'deltasync[tensorboard]'`.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter  # Slow to import, and an optional dependency.
        except ImportError as error:
            raise ImportError("tensorboard is not installed: pip install 'deltasync[tensorboard]'") from error
        self._writer: Any = SummaryWriter(str(folder))

    def __call__(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        for name, value in numbers.items():
            group = "" if "/" in name else "deltasync/" if name in _OURS else "train/"
            self._writer.add_scalar(f"{group}{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _name(callback: Callback) -> str:
    return str(getattr(callback, "__name__", type(callback).__name__))
