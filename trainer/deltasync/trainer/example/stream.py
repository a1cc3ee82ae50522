"""2. Streams of click events, synthetic or from a file of ratings, played in real time."""

import itertools
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deltasync.base.errors import InvalidInput
from deltasync.trainer.example.options import ModelOptions, StreamOptions

_RATINGS = "ratings:"
_EXPECTED = "user::item::rating::timestamp, with ids from 0 to 2**63 - 1 and Unix seconds"
_START_POLL_SECONDS = 0.05

# The synthetic stream. The best possible AUC is near 0.84; a fresh model gets much closer to it than a stale one.
_QUALITY, _INCLINATION, _AFFINITY, _OFFSET = 1.8, 0.8, 0.5, -0.4  # Components of the log odds of a click.
_BLOCK = 8192  # Events drawn at once; each block has its own generator.
_FACTORS = 8  # Length of the latent vectors of users and items.
_TURNOVER = 1_000_000  # Number of events in which popularity moves once over all items.
_QUALITY_PERIOD = 250_000  # Average number of events in which the quality of an item rises and falls once.
_START_UNIX, _SECONDS_PER_EVENT = 1_700_000_000, 30.0


EVENT = np.dtype(
    [("index", "i8"), ("user", "i8"), ("item", "i8"), ("timestamp", "i8"), ("label", "f4")], align=True
)
"""Position in the stream, raw ids from 0, Unix seconds, and 1 if the user clicked or liked the item, else 0."""
Events = NDArray[np.void]
"""[n] events in time order."""


def batches(stream: StreamOptions, model: ModelOptions) -> Iterator[Events]:
    """Yield the batches of a stream without waiting; the last one may be shorter."""
    left, size = stream.events if stream.events is not None else math.inf, stream.batch_size
    waiting = np.empty(0, EVENT)
    if stream.data == "synthetic":
        blocks = synthetic(model.users, model.items)
    elif stream.data.startswith(_RATINGS) and stream.data != _RATINGS:
        blocks = iter([read_ratings(Path(stream.data.removeprefix(_RATINGS)))])
    else:
        raise InvalidInput(f"unknown data {stream.data!r}; give 'synthetic' or 'ratings:PATH', a file of ratings")
    for block in blocks:
        events = block[: int(min(left, len(block)))]
        left -= len(events)
        waiting = np.concatenate([waiting, events])
        while len(waiting) >= size:
            yield waiting[:size]
            waiting = waiting[size:]
        if not left:
            break
    if len(waiting):
        yield waiting


def count_events(stream: StreamOptions, model: ModelOptions) -> int:
    """The number of events of a finite stream."""
    if stream.data == "synthetic" and stream.events is not None:
        return stream.events
    return sum(map(len, batches(stream, model)))


def play(stream: StreamOptions, model: ModelOptions, past: int = 0) -> Iterator[tuple[Events, float]]:
    """Yield each batch once its last event has arrived, with the Unix time of that event.

    The first event arrives at the time in the start file, or now, except that `past` batches have arrived before.
    A trainer that continues from a checkpoint only needs these for the features of later events.
    """
    while stream.start_file and not stream.start_file.exists():
        time.sleep(_START_POLL_SECONDS)
    start = float(stream.start_file.read_text()) if stream.start_file else time.time()
    start -= past * stream.batch_size / stream.events_per_second
    for batch in batches(stream, model):
        arrival = start + int(batch["index"][-1]) / stream.events_per_second
        while (wait := arrival - time.time()) > 0:
            time.sleep(wait)
        yield batch, arrival


def synthetic(users: int, items: int) -> Iterator[Events]:
    """Yield blocks of an endless stream of clicks, with popularity and quality of items that change over time."""
    rng = np.random.default_rng(np.random.SeedSequence(0, spawn_key=(0,)))
    tastes = rng.normal(size=(users, _FACTORS)).astype(np.float32)
    traits = rng.normal(size=(items, _FACTORS)).astype(np.float32)
    inclination = rng.normal(0.0, _INCLINATION, users)
    phase = rng.uniform(0.0, 2 * np.pi, items)
    frequency = 2 * np.pi * rng.uniform(0.5, 1.5, items) / _QUALITY_PERIOD
    user_shares = _zipf_shares(users, exponent=1.0, shift=20.0)
    rank_shares = _zipf_shares(items, exponent=1.3, shift=5.0)
    for number in itertools.count():
        rng = np.random.default_rng(np.random.SeedSequence(0, spawn_key=(1, number)))
        index = np.arange(_BLOCK, dtype=np.int64) + number * _BLOCK
        user, rank = _draw(rng, user_shares), _draw(rng, rank_shares)
        # Even ranks are ahead of the most popular item and odd ranks behind it, so items rise before they fade.
        distance = np.where(rank % 2 == 0, rank // 2, -(rank // 2) - 1)
        item = (index * items // _TURNOVER + distance) % items
        affinity = np.einsum("nf,nf->n", tastes[user], traits[item]) * (_AFFINITY / math.sqrt(_FACTORS))
        quality = _QUALITY * np.sin(phase[item] + frequency[item] * index)
        probability = 1.0 / (1.0 + np.exp(-(quality + inclination[user] + affinity + _OFFSET)))
        block = np.empty(_BLOCK, EVENT)
        block["index"], block["user"], block["item"] = index, user, item
        block["timestamp"] = _START_UNIX + (index * _SECONDS_PER_EVENT).astype(np.int64)
        block["label"] = rng.random(_BLOCK) < probability
        yield block


def _zipf_shares(count: int, *, exponent: float, shift: float) -> NDArray[np.float64]:
    """Cumulative shares of `count` ranks with weights (rank + shift) ** -exponent."""
    weights = (np.arange(count) + shift) ** -exponent
    return np.asarray(np.cumsum(weights) / weights.sum())


def _draw(rng: np.random.Generator, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Draw a rank for each event of a block."""
    # Rounding may leave the last share below 1, so limit the result.
    return np.minimum(np.searchsorted(shares, rng.random(_BLOCK), side="right"), shares.size - 1)


def read_ratings(path: Path) -> Events:
    """Read lines of user, item, rating and timestamp, separated by `::`, tabs or commas, and sort them by time.

    The first line may be a header. Ratings from 4 count as liked, or from 8 if any rating is above 5.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="replace").rstrip().splitlines()
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read ({error.strerror}); name a file of ratings") from error
    begin = 0 if lines and lines[0][:1].isdigit() else 1
    rows = [_rating(path, number, line) for number, line in enumerate(lines[begin:], begin + 1)]
    if not rows:
        raise InvalidInput(f"{path}: no ratings, expected {_EXPECTED}")
    rows.sort(key=lambda row: row[3])  # Equal times keep the order of the file.
    events = np.empty(len(rows), EVENT)
    events["user"], events["item"], rating, events["timestamp"] = map(np.array, zip(*rows, strict=True))
    events["index"], events["label"] = np.arange(len(rows)), rating >= (8 if rating.max() > 5 else 4)
    return events


def _rating(path: Path, number: int, line: str) -> tuple[int, int, float, int]:
    try:
        user, item, rating, timestamp = re.split("::|[\t,]", line)
        row = int(user), int(item), float(rating), int(timestamp)
        if 0 <= row[0] < 2**63 and 0 <= row[1] < 2**63 and 0 <= row[2] <= 100 and 0 <= row[3] < 10**11:
            return row
    except ValueError:
        pass
    raise InvalidInput(f"{path}, line {number}: {line[:60]!r}, expected {_EXPECTED}")
