import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.trainer.clicks.events import DataError, Events
from deltasync.trainer.clicks.stream import Pace, batches, limit, open_stream, paced
from deltasync.trainer.clicks.synthetic import SyntheticOptions


def blocks(*sizes: int) -> Iterator[Events]:
    start = 0
    for size in sizes:
        index = np.arange(start, start + size, dtype=np.int64)
        label = np.zeros(size, dtype=np.float32)
        yield Events(index=index, user=index, item=index, timestamp=index, label=label)
        start += size


def indices(stream: Iterator[Events]) -> list[int]:
    return [index for block in stream for index in block.index.tolist()]


class Clock:
    """A clock that moves only by sleeping, and never sleeps quite as long as asked at first."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds / 2 if seconds > 0.25 else seconds


@given(sizes=st.lists(st.integers(0, 20), max_size=10), size=st.integers(1, 25))
def test_batches_have_the_size_asked_for_and_keep_every_event(sizes: list[int], size: int) -> None:
    cut = list(batches(blocks(*sizes), size))
    assert indices(iter(cut)) == list(range(sum(sizes)))
    assert all(len(batch) == size for batch in cut[:-1])
    assert all(0 < len(batch) <= size for batch in cut)


def test_a_batch_is_ready_as_soon_as_its_events_are() -> None:
    source = blocks(4, 4)
    assert len(next(batches(source, 3))) == 3
    assert len(next(source)) == 4


@given(sizes=st.lists(st.integers(0, 20), max_size=10), n=st.integers(0, 250))
def test_limit_keeps_the_first_events(sizes: list[int], n: int) -> None:
    assert indices(limit(blocks(*sizes), n)) == list(range(min(n, sum(sizes))))


def test_limit_asks_for_no_block_beyond_the_last_event() -> None:
    source = blocks(4, 4)
    assert indices(limit(source, 4)) == [0, 1, 2, 3]
    assert len(next(source)) == 4


@pytest.mark.parametrize("cut", [lambda: batches(blocks(1), 0), lambda: limit(blocks(1), -1)])
def test_sizes_are_checked_at_once(cut: object) -> None:
    assert callable(cut)
    with pytest.raises(ValueError, match="must"):
        cut()


def test_arrival_is_evenly_spaced() -> None:
    pace = Pace(start_unix=1000.0, events_per_second=4.0)
    assert [pace.arrival(index) for index in (0, 1, 8)] == [1000.0, 1000.25, 1002.0]


def test_paced_waits_for_the_last_event_of_each_batch() -> None:
    clock = Clock(1000.0)
    pace = Pace(start_unix=1000.0, events_per_second=4.0)
    times = [clock.now for _ in paced(blocks(4, 4, 2), pace, clock, clock.sleep)]
    assert times == pytest.approx([1000.75, 1001.75, 1002.25])
    assert len(clock.slept) > len(times)


def test_paced_gives_a_late_reader_everything_without_sleeping() -> None:
    clock = Clock(2000.0)
    pace = Pace(start_unix=1000.0, events_per_second=4.0)
    assert indices(paced(blocks(4, 4, 2), pace, clock, clock.sleep)) == list(range(10))
    assert clock.slept == []


@pytest.mark.parametrize(
    ("field", "start", "speed"),
    [
        ("start_unix", math.nan, 1.0),
        ("start_unix", math.inf, 1.0),
        ("events_per_second", 0.0, 0.0),
        ("events_per_second", 0.0, math.nan),
        ("events_per_second", 0.0, math.inf),
    ],
)
def test_pace_is_checked(field: str, start: float, speed: float) -> None:
    with pytest.raises(ValueError, match=field):
        Pace(start_unix=start, events_per_second=speed)


def test_open_synthetic_never_ends_unless_told() -> None:
    small = SyntheticOptions(users=5, items=5, block=10)
    endless = open_stream("synthetic", synthetic=small)
    assert indices(itertools.islice(endless, 3)) == list(range(30))
    assert indices(open_stream("synthetic", events=25, synthetic=small)) == list(range(25))


@pytest.mark.parametrize(("asked", "given_"), [(None, 3), (2, 2), (99, 3)])
def test_open_ratings(tmp_path: Path, asked: int | None, given_: int) -> None:
    path = tmp_path / "a:b"
    path.write_text("1::1::5::1\n1::2::5::2\n1::3::5::3\n")
    assert indices(open_stream(f"ratings:{path}", events=asked)) == list(range(given_))
    [block] = open_stream(f"ratings:{path}", like_from=6)
    assert block.label.tolist() == [0, 0, 0]


@pytest.mark.parametrize("spec", ["", "synthetic:", "ratings", "ratings:", "movies:x"])
def test_an_unknown_spec_names_both_forms(spec: str) -> None:
    with pytest.raises(DataError, match=f"unknown data '{spec}'; give 'synthetic' or 'ratings:PATH'"):
        open_stream(spec)
