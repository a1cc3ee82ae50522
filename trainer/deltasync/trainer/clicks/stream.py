"""Opening a stream by its name, cutting it into batches and playing it at a given speed."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deltasync.trainer.checks import check_positive
from deltasync.trainer.clicks.events import DataError, Events, concatenate
from deltasync.trainer.clicks.ratings import rating_events
from deltasync.trainer.clicks.synthetic import SyntheticOptions, synthetic_events

_RATINGS = "ratings:"


def open_stream(
    spec: str,
    *,
    events: int | None = None,
    synthetic: SyntheticOptions | None = None,
    like_from: float | None = None,
) -> Iterator[Events]:
    """Return the events `spec` names, `synthetic` or `ratings:PATH`, in blocks of any size.

    `events` ends the stream after that many; None means all, which never ends for `synthetic`. A ratings file
    that has fewer just ends. `synthetic` and `like_from` are for their kind of stream, None for defaults.
    Raises DataError for another spec or a ratings file that cannot be used.
    """
    stream = _open(spec, synthetic or SyntheticOptions(), like_from)
    return stream if events is None else limit(stream, events)


def _open(spec: str, synthetic: SyntheticOptions, like_from: float | None) -> Iterator[Events]:
    if spec == "synthetic":
        return synthetic_events(synthetic)
    if spec.startswith(_RATINGS) and spec != _RATINGS:
        return rating_events(spec.removeprefix(_RATINGS), like_from)
    raise DataError(f"unknown data {spec!r}; give 'synthetic' or 'ratings:PATH', PATH being a ratings file")


def limit(events: Iterator[Events], n: int) -> Iterator[Events]:
    """Return the first `n` events, or all if there are fewer; no block beyond them is asked for."""
    if n < 0:
        raise ValueError(f"the number of events must not be negative, not {n}")
    return _limited(events, n)


def _limited(events: Iterator[Events], left: int) -> Iterator[Events]:
    while left > 0 and (block := next(events, None)) is not None:
        yield block.take(slice(left))
        left -= len(block)


def batches(events: Iterator[Events], size: int) -> Iterator[Events]:
    """Recut the blocks into batches of exactly `size` events, the last one possibly shorter, none empty."""
    if size < 1:
        raise ValueError(f"the batch size must be at least 1, not {size}")
    return _recut(events, size)


def _recut(events: Iterator[Events], size: int) -> Iterator[Events]:
    waiting: list[Events] = []
    count = 0
    for block in events:
        waiting.append(block)
        count += len(block)
        if count >= size:
            whole = concatenate(waiting)
            cut = count - count % size
            yield from (whole.take(slice(start, start + size)) for start in range(0, cut, size))
            waiting, count = [whole.take(slice(cut, None))], count - cut
    if count:
        yield concatenate(waiting)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """When events arrive: event 0 at `start_unix` (unix seconds), then `events_per_second` evenly spaced."""

    start_unix: float
    events_per_second: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.start_unix):
            raise ValueError(f"start_unix must be a finite unix time in seconds, not {self.start_unix}")
        check_positive("events_per_second", self.events_per_second)

    def arrival(self, index: int) -> float:
        """Return the unix time, in seconds, at which event `index` of the stream arrives."""
        return self.start_unix + index / self.events_per_second


def paced(
    batches: Iterator[Events],
    pace: Pace,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Events]:
    """Yield every (non-empty) batch once its last event has arrived: sleep until then, never skip one."""
    for batch in batches:
        due = pace.arrival(int(batch.index[-1]))
        while (wait := due - clock()) > 0:
            sleep(wait)
        yield batch
