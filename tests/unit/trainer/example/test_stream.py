"""Streams of events: cut into batches, played as they arrive, drawn from a seed, read from a file of ratings."""

import gzip
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.base.errors import InvalidInput
from deltasync.trainer.example.options import ModelOptions, StreamOptions
from deltasync.trainer.example.results import auc
from deltasync.trainer.example.stream import Events, batches, count_events, play, read_ratings, synthetic

ROOT = Path(__file__).parents[4]
EXCERPT = ROOT / "tests/fixtures/movietweetings/ratings.dat"
WHOLE = Path(os.environ.get("MOVIETWEETINGS_100K", ROOT.parent / "shared/data/movietweetings-100k/ratings.dat"))
SMALL = ModelOptions(users=50, items=40)
DEFAULT = ModelOptions()


def first(n: int, sizes: ModelOptions = DEFAULT) -> Events:
    (found,) = batches(StreamOptions(events=n, batch_size=n), sizes)
    return found


def ratings(folder: Path, text: str) -> Path:
    path = folder / "ratings"
    path.write_bytes(text.encode())
    return path


@given(events=st.integers(1, 20_000), size=st.integers(2, 9_000))
def test_batches_have_the_given_size_and_keep_every_event(events: int, size: int) -> None:
    cut = list(batches(StreamOptions(events=events, batch_size=size), SMALL))
    assert np.concatenate([batch["index"] for batch in cut]).tolist() == list(range(events))
    assert all(len(batch) == size for batch in cut[:-1])
    assert 0 < len(cut[-1]) <= size


@pytest.mark.parametrize(("asked", "found"), [(None, 3), (2, 2), (99, 3)])
def test_stream_ends_with_a_shorter_file(tmp_path: Path, asked: int | None, found: int) -> None:
    path = ratings(tmp_path, "1::1::5::1\n1::2::5::2\n1::3::5::3\n")
    assert count_events(StreamOptions(data=f"ratings:{path}", events=asked), SMALL) == found


@pytest.mark.parametrize("spec", ["", "synthetic:", "ratings", "ratings:", "movies:x"])
def test_error_for_unknown_data_names_both_forms(spec: str) -> None:
    with pytest.raises(InvalidInput, match=f"unknown data '{spec}'; give 'synthetic' or 'ratings:PATH'"):
        count_events(StreamOptions(data=spec), SMALL)


def test_late_reader_gets_every_event_with_its_time(tmp_path: Path) -> None:
    start = tmp_path / "start"
    start.write_text("1000.0")
    stream = StreamOptions(events=10, events_per_second=4.0, batch_size=4, start_file=start)
    played = [(len(batch), arrival) for batch, arrival in play(stream, SMALL)]
    assert played == [(4, 1000.75), (4, 1001.75), (2, 1002.25)]
    assert [arrival for _, arrival in play(stream, SMALL, past=1)] == [999.75, 1000.75, 1001.25]


def test_synthetic_stream_is_the_same_each_time() -> None:
    one, other = first(10_000, SMALL), first(10_000, SMALL)
    np.testing.assert_array_equal(one, other)
    blocks = list(itertools.islice(synthetic(50, 40), 2))
    assert not np.array_equal(blocks[0]["user"], blocks[1]["user"])


def test_stale_model_is_clearly_worse_than_a_fresh_one() -> None:
    events = first(100_000)
    half = slice(50_000, None)
    fresh, frozen = (_online_scores(events, until)[half] for until in (100_000, 50_000))
    assert auc(events["label"][half], fresh) > 0.72
    assert auc(events["label"][half], fresh) - auc(events["label"][half], frozen) > 0.05


def _online_scores(events: Events, learn_until: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Scores of an online model of one bias per user and item, each before it learns from the event."""
    users, items = np.zeros(events["user"].max() + 1), np.zeros(events["item"].max() + 1)
    scores = np.empty(len(events))
    for start in range(0, len(events), 64):
        batch = events[start : start + 64]
        score = scores[start : start + 64] = users[batch["user"]] + items[batch["item"]]
        if start < learn_until:
            step = 0.15 * (batch["label"] - 1 / (1 + np.exp(-score)))
            np.add.at(users, batch["user"], step)
            np.add.at(items, batch["item"], step)
    return scores


def test_ratings_are_sorted_by_time_and_ties_keep_their_order(tmp_path: Path) -> None:
    events = read_ratings(ratings(tmp_path, "1::7::5::30\n1::8::3::10\n2::9::4::30\n3::7::1::10\n"))
    assert events.tolist() == [(0, 1, 8, 10, 0), (1, 3, 7, 10, 0), (2, 1, 7, 30, 1), (3, 2, 9, 30, 1)]


@pytest.mark.parametrize("separator", ["::", ",", "\t"])
@pytest.mark.parametrize("header", ["", "userId::movieId::rating::timestamp\n", "\ufeffuserId::movieId::r::t\n"])
@pytest.mark.parametrize("end", ["\n", "\n\n\n", "\r\n"])
def test_ratings_are_separated_by_colons_commas_or_tabs(
    tmp_path: Path, separator: str, header: str, end: str
) -> None:
    text = f"{header}{2**63 - 1}::7::5::30\n2::8::3.5::10{end}"
    events = read_ratings(ratings(tmp_path, text.replace("::", separator)))
    assert events.tolist() == [(0, 2, 8, 10, 0), (1, 2**63 - 1, 7, 30, 1)]


@pytest.mark.parametrize(
    ("given_ratings", "labels"), [((3, 4, 5), [0, 1, 1]), ((5, 7, 8), [0, 0, 1]), ((0.5, 3.5, 5.0), [0, 0, 1])]
)
def test_high_ratings_count_as_liked(tmp_path: Path, given_ratings: tuple[float, ...], labels: list[int]) -> None:
    text = "".join(f"1::{item}::{rating}::{item}\n" for item, rating in enumerate(given_ratings))
    assert read_ratings(ratings(tmp_path, text))["label"].tolist() == labels


@pytest.mark.parametrize(
    "line",
    [
        *("", "1::2::3", "1::2::3::4::5", "AX3::2::3::4", "-1::2::3::4", f"{2**63}::2::3::4", "1::2.0::3::4"),
        *("1::2::good::4", "1::2::nan::4", "1::2::inf::4", "1::2::3::4.5", "1::2::3::1588687728923"),
    ],
)
def test_wrong_line_is_an_error_with_its_number(tmp_path: Path, line: str) -> None:
    path = ratings(tmp_path, f"1::2::3::4\n{line}\n1::2::3::4\n")
    with pytest.raises(InvalidInput) as refused:
        read_ratings(path)
    assert str(refused.value).startswith(f"{path}, line 2: {line!r}, expected user::item::rating::timestamp")


@pytest.mark.parametrize("text", ["", "userId,movieId,rating,timestamp\n"])
def test_file_without_ratings_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidInput, match="no ratings"):
        read_ratings(ratings(tmp_path, text))


def test_file_of_another_kind_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ratings.gz").write_bytes(gzip.compress(b"1::2::3::4\n" * 9))
    with pytest.raises(InvalidInput, match=r"ratings.gz.*expected user::item::rating::timestamp"):
        read_ratings(tmp_path / "ratings.gz")


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(InvalidInput, match=f"{path.name}: cannot be read"):
            read_ratings(path)


@pytest.mark.parametrize(
    ("path", "sizes", "liked"), [(EXCERPT, (2000, 369, 1018), 0.5145), (WHOLE, (100_000, 16_554, 10_506), 0.505)]
)
def test_movietweetings_are_read(path: Path, sizes: tuple[int, int, int], liked: float) -> None:
    if not path.exists():
        pytest.skip(f"needs the ratings at {path}, or where MOVIETWEETINGS_100K says")
    events = read_ratings(path)
    assert (len(events), len(np.unique(events["user"])), len(np.unique(events["item"]))) == sizes
    assert (np.diff(events["timestamp"]) >= 0).all()
    assert events["label"].mean() == pytest.approx(liked, abs=0.001)
