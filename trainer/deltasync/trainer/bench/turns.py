"""What training benchmarks take turns in, and how long a turn was."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

from torch import nn

from deltasync.trainer.tracking.modes import TrackingMode
from deltasync.trainer.tracking.options import TrackerOptions
from deltasync.trainer.tracking.tracker import Tracker


class Taken(NamedTuple):
    """Seconds, and those in which a core was at work for this rank."""

    seconds: float
    cpu_seconds: float

    @classmethod
    def now(cls) -> Self:
        """By both clocks, to be given to `since`."""
        return cls(time.perf_counter(), time.process_time())

    @classmethod
    def since(cls, started: "Taken") -> Self:
        """What has been taken by now."""
        return cls(*(now - then for now, then in zip(cls.now(), started, strict=True)))


@contextmanager
def tracked(model: nn.Module, read_every: int) -> Iterator[tuple[Tracker, Callable[[], None]]]:
    """A tracker that is read like a publishing one, every so many steps, and what is to be called after each."""
    tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST, auto_compact=True, dense=True))

    def after_step() -> None:
        tracker.step()
        if tracker.steps % read_every == 0:
            tracker.acknowledge(tracker.get_delta().token)

    yield tracker, after_step
    tracker.close()
