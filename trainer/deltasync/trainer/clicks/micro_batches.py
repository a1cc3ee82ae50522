"""The micro-batches that each rank trains on, and the times of their events."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from deltasync.trainer.clicks.batch import as_tensordict, click_batch
from deltasync.trainer.clicks.features import Featurizer
from deltasync.trainer.clicks.stream import batches
from deltasync.trainer.clicks.stream_options import StreamOptions
from deltasync.trainer.clicks.training_options import TrainingOptions


class TimedBatches(Iterator[Any]):
    """Batches for a pipeline that takes some ahead: tells of which of them the newest event is, once trained on.

    The stream is played anew, so the time of an event is when it arrives in the play, not when it once was.

    Attributes:
        last: the last batch taken.
    """

    def __init__(self, batches: Iterator[tuple[Any, int]]) -> None:
        """`batches` come each with the time of its newest event, nanoseconds since 1970."""
        self._batches = batches
        self.last: Any = None
        self._in_flight: deque[int] = deque()

    def __next__(self) -> Any:
        self.last, event_time_unix_ns = next(self._batches)
        self._in_flight.append(event_time_unix_ns)
        return self.last

    def trained(self) -> int:
        """Note that the oldest batch under way is trained on; the time of its newest event."""
        return self._in_flight.popleft()


def micro_batches(stream: StreamOptions, training: TrainingOptions, past: int) -> Iterator[tuple[Any, int]]:
    """This rank's micro-batches after the first `past` steps, whose events only count for later features.

    Each comes with the time at which its last event arrives, nanoseconds since 1970.
    """
    pace = stream.pace(past=past)
    featurizer, rank, ranks = Featurizer(stream.features), dist.get_rank(), dist.get_world_size()
    for step, events in enumerate(stream.batches(pace)):
        for part in batches(iter([events]), stream.batch_size // training.grad_accum):
            features = featurizer.features(part)
            if step >= past and len(part) >= ranks:
                batch = click_batch(features, rank, ranks)
                arrival = round(pace.arrival(int(part.index[-1])) * 1e9)
                yield (as_tensordict(batch) if training.input == "tensordict" else batch), arrival
