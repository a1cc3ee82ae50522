"""A model with a tracker that is read as for publishing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from deltasync.trainer.tracking.tracked_model import TrackerOptions, TrackingMode
from deltasync.trainer.tracking.tracker import Tracker


@contextmanager
def tracked(model: nn.Module, read_every: int) -> Iterator[tuple[Tracker, Callable[[], None]]]:
    """A tracker that is read every `read_every` steps, as for publishing, and the function to call after each."""
    tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST, dense=True))

    def after_step() -> None:
        tracker.step()
        if tracker.steps % read_every == 0:
            tracker.acknowledge(tracker.get_delta())

    yield tracker, after_step
    tracker.close()
