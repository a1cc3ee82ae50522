"""Streams of events: cut into batches, played as they arrive, drawn from a seed, read from a file of ratings."""

import bz2
import gzip
import io
import itertools
import lzma
import os
import re
import tarfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.base.errors import InvalidInput
from deltasync.trainer.example.options import ModelOptions, StreamOptions
from deltasync.trainer.example.report import auc
from deltasync.trainer.example.stream import RatingEvents, batches, count_events, play, read_ratings, synthetic

ROOT = Path(__file__).parents[4]
EXCERPT = ROOT / "tests/fixtures/movietweetings/ratings.dat"
WHOLE = ROOT.parent / "shared/data/movietweetings-100k/ratings.dat"
CSV_HEADER = "userId,movieId,rating,timestamp\n"
SMALL = ModelOptions(users=50, items=40)
DEFAULT = ModelOptions()


def first(n: int, sizes: ModelOptions = DEFAULT) -> RatingEvents:
    (found,) = batches(StreamOptions(events=n, batch_size=n), sizes)
    return found


def ratings(folder: Path, text: str) -> Path:
    path = folder / "ratings"
    path.write_bytes(text.encode())
    return path


@given(events=st.integers(1, 20_000), size=st.integers(2, 9_000))
def test_batches_have_the_size_asked_for_and_keep_every_event(events: int, size: int) -> None:
    cut = list(batches(StreamOptions(events=events, batch_size=size), SMALL))
    assert np.concatenate([batch.index for batch in cut]).tolist() == list(range(events))
    assert all(len(batch) == size for batch in cut[:-1])
    assert 0 < len(cut[-1]) <= size


def test_items_change_as_fast_as_the_stream_drifts() -> None:
    usual, slow = (
        next(batches(StreamOptions(events=8000, batch_size=8000, drift=drift), SMALL)) for drift in (1.0, 1e-9)
    )
    assert np.array_equal(usual.item, first(8000, SMALL).item)
    assert np.array_equal(usual.user, slow.user)
    assert not np.array_equal(usual.label, slow.label)


def test_a_synthetic_stream_never_ends_unless_told() -> None:
    endless = batches(StreamOptions(batch_size=5000), SMALL)
    assert [len(batch) for batch in itertools.islice(endless, 3)] == [5000] * 3
    assert count_events(StreamOptions(events=77), SMALL) == 77


@pytest.mark.parametrize(("asked", "found"), [(None, 3), (2, 2), (99, 3)])
def test_a_file_that_has_fewer_events_just_ends(tmp_path: Path, asked: int | None, found: int) -> None:
    path = ratings(tmp_path, "1::1::5::1\n1::2::5::2\n1::3::5::3\n")
    assert count_events(StreamOptions(data=f"ratings:{path}", events=asked), SMALL) == found


@pytest.mark.parametrize("spec", ["", "synthetic:", "ratings", "ratings:", "movies:x"])
def test_an_unknown_stream_names_both_forms(spec: str) -> None:
    with pytest.raises(InvalidInput, match=f"unknown data '{spec}'; give 'synthetic' or 'ratings:PATH'"):
        count_events(StreamOptions(data=spec), SMALL)


def test_events_arrive_at_their_times_and_none_is_skipped_by_a_late_reader(tmp_path: Path) -> None:
    start = tmp_path / "start"
    start.write_text("1000.0")
    stream = StreamOptions(events=10, events_per_second=4.0, batch_size=4, start_file=start)
    played = [(len(batch), arrival) for batch, arrival in play(stream, SMALL)]
    assert played == [(4, 1000.75), (4, 1001.75), (2, 1002.25)]
    assert [arrival for _, arrival in play(stream, SMALL, past=1)] == [999.75, 1000.75, 1001.25]


def test_a_batch_is_waited_for_until_its_last_event_arrives() -> None:
    stream = StreamOptions(events=4, events_per_second=100.0, batch_size=4)
    [(_, arrival)] = play(stream, SMALL)
    assert time.time() >= arrival


def test_events_are_in_range_typed_and_in_time_order() -> None:
    events = first(1000, SMALL)
    assert [getattr(events, each.name).dtype for each in fields(RatingEvents)] == [np.int64] * 4 + [np.float32]
    assert (np.diff(events.timestamp) == 30).all()
    assert 0 <= events.user.min() <= events.user.max() < SMALL.users
    assert 0 <= events.item.min() <= events.item.max() < SMALL.items
    assert set(np.unique(events.label)) == {0.0, 1.0}


def test_every_process_draws_the_same_stream() -> None:
    one, other = first(10_000, SMALL), first(10_000, SMALL)
    for each in fields(RatingEvents):
        np.testing.assert_array_equal(getattr(one, each.name), getattr(other, each.name))
    blocks = list(itertools.islice(synthetic(50, 40), 2))
    assert not np.array_equal(blocks[0].user, blocks[1].user)


def test_popularity_moves_over_the_items() -> None:
    events = first(500_000, replace(DEFAULT, items=1000))
    early, late = events.item[:10_000], events.item[-10_000:]
    top = np.bincount(early, minlength=1000).argsort()[-20:]
    assert np.isin(early, top).mean() > 5 * np.isin(late, top).mean()


def test_a_stale_model_is_clearly_worse_than_a_fresh_one() -> None:
    events = first(100_000)
    half = slice(50_000, None)
    fresh, frozen = (_online_scores(events, until)[half] for until in (100_000, 50_000))
    assert auc(events.label[half], fresh) > 0.72
    assert auc(events.label[half], fresh) - auc(events.label[half], frozen) > 0.05


def _online_scores(events: RatingEvents, learn_until: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Scores of an online model of one bias per user and item, each before it learns from the event."""
    users, items = np.zeros(events.user.max() + 1), np.zeros(events.item.max() + 1)
    scores = np.empty(len(events))
    for start in range(0, len(events), 64):
        batch = events[start : start + 64]
        score = scores[start : start + 64] = users[batch.user] + items[batch.item]
        if start < learn_until:
            step = 0.15 * (batch.label - 1 / (1 + np.exp(-score)))
            np.add.at(users, batch.user, step)
            np.add.at(items, batch.item, step)
    return scores


def test_a_file_becomes_time_ordered_and_ties_keep_the_order_of_the_file(tmp_path: Path) -> None:
    events = read_ratings(ratings(tmp_path, "1::7::5::30\n1::8::3::10\n2::9::4::30\n3::7::1::10\n"))
    assert events.index.tolist() == [0, 1, 2, 3]
    assert events.timestamp.tolist() == [10, 10, 30, 30]
    assert events.user.tolist() == [1, 3, 1, 2]
    assert events.item.tolist() == [8, 7, 7, 9]
    assert events.label.tolist() == [0, 0, 1, 1]
    assert events.label.dtype == np.float32


@pytest.mark.parametrize("separator", ["::", ",", "\t"])
@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize("end", ["\n", "\n\n\n", "\r\n"])
def test_fields_are_apart_by_colons_commas_or_tabs(tmp_path: Path, separator: str, header: bool, end: str) -> None:
    lines = ["userId::movieId::rating::timestamp"] * header + [f"{2**63 - 1}::7::5::30", "2::8::3.5::10"]
    text = "".join(line + end.replace("\n\n", "") for line in lines) + end
    events = read_ratings(ratings(tmp_path, text.replace("::", separator)))
    assert (events.user.tolist(), events.item.tolist()) == ([2, 2**63 - 1], [8, 7])
    assert (events.label.tolist(), events.timestamp.tolist()) == ([0, 1], [10, 30])


@pytest.mark.parametrize(
    ("given_ratings", "labels"), [((3, 4, 5), [0, 1, 1]), ((5, 7, 8), [0, 0, 1]), ((0.5, 3.5, 5.0), [0, 0, 1])]
)
def test_what_counts_as_liked(tmp_path: Path, given_ratings: tuple[float, ...], labels: list[int]) -> None:
    text = "".join(f"1::{item}::{rating}::{item}\n" for item, rating in enumerate(given_ratings))
    assert read_ratings(ratings(tmp_path, text)).label.tolist() == labels


NUMBERED = (
    "is not a whole number from 0 to 9223372036854775807: number the {}s first, for example with pandas.factorize"
)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("1::2::3", "'1::2::3' has 3 fields, expected 4"),
        ("1::2::3::4::5", "'1::2::3::4::5' has 5 fields, expected 4"),
        ("1,2,3,4", "'1,2,3,4' has 1 field, expected 4"),
        ("", "'' has 1 field, expected 4"),
        ("AX3::2::3::4", f"user 'AX3' {NUMBERED.format('user')}"),
        ("-1::2::3::4", f"user '-1' {NUMBERED.format('user')}"),
        ("1_0::2::3::4", f"user '1_0' {NUMBERED.format('user')}"),
        ("9223372036854775808::2::3::4", f"user '9223372036854775808' {NUMBERED.format('user')}"),
        ("1::-2::3::4", f"item '-2' {NUMBERED.format('item')}"),
        ("1::2.0::3::4", f"item '2.0' {NUMBERED.format('item')}"),
        ("1::2::good::4", "rating 'good' is not a finite number"),
        ("1::2::nan::4", "rating 'nan' is not a finite number"),
        ("1::2::inf::4", "rating 'inf' is not a finite number"),
        ("1::2::::4", "rating '' is not a finite number"),
        ("1::2::3::4.5", "timestamp '4.5' is not a whole number of seconds since 1970"),
        ("1::2::3::2020-01-01", "timestamp '2020-01-01' is not a whole number of seconds since 1970"),
        (
            "1::2::3::1588687728923",
            "timestamp '1588687728923' is not in seconds since 1970: divide milliseconds by 1000",
        ),
    ],
)
def test_a_bad_line_is_named_with_its_value_and_what_to_do(tmp_path: Path, line: str, what: str) -> None:
    path = ratings(tmp_path, f"1::2::3::4\n{line}\n1::2::3::4\n")
    with pytest.raises(InvalidInput) as refused:
        read_ratings(path)
    expected = "expected 'user::item::rating::timestamp' in numbers"
    assert str(refused.value) == f"{path}, line 2: {what}; {expected}"


@pytest.mark.parametrize(
    "text",
    [
        "userId,movieId,rating,timestamp\n2,8,3.5,10\n1,7,5.0,30\n",
        '"","userId","movieId","rating","timestamp"\r\n"1","2","8","3.5","10"\r\n"2","1","7","5.0","30"\r\n',
        "user_id,parent_asin,rating,timestamp,history\n2,8,3.5,10,\n1,7,5.0,30,8\n",
        'asin,reviewerID,overall,unixReviewTime,text\n8,2,3.5,10,"a, b\nc"\n7,1,5.0,30,d\n',
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n2\t8\t3.5\t10.0\n1\t7\t5.0\t30.0\n",
        "item_id:token\tuser_id:token\ttimestamp:float\trating:float\n8\t2\t10\t3.5\n7\t1\t30\t5\n",
    ],
    ids=["movielens", "quoted, numbered", "amazon 2023", "amazon reviews", "recbole", "another order"],
)
@pytest.mark.parametrize("begin", ["", "\ufeff"], ids=["", "byte order mark"])
@pytest.mark.parametrize("packed", [False, True], ids=["text", "gzip"])
def test_a_header_says_where_the_columns_are(tmp_path: Path, text: str, begin: str, packed: bool) -> None:
    path = ratings(tmp_path, begin + text)
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    events = read_ratings(path)
    assert (events.user.tolist(), events.item.tolist()) == ([2, 1], [8, 7])
    assert (events.label.tolist(), events.timestamp.tolist()) == ([0, 1], [10, 30])


def test_a_header_that_lacks_a_column_says_what_to_call_it(tmp_path: Path) -> None:
    path = ratings(tmp_path, "user_id:token\titem_id:token\ttimestamp:float\n2\t8\t10\n")
    with pytest.raises(InvalidInput, match=r"line 1: 'user_id.*' names no rating; call that column one of rating"):
        read_ratings(path)


def zip_of(content: bytes) -> bytes:
    with zipfile.ZipFile(packed := io.BytesIO(), "w") as archive:
        archive.writestr("ratings.dat", content)
    return packed.getvalue()


def tar_of(content: bytes) -> bytes:
    with tarfile.open(fileobj=(packed := io.BytesIO()), mode="w") as archive:
        (member := tarfile.TarInfo("ratings.dat")).size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


@pytest.mark.parametrize(
    ("pack", "what"),
    [
        (zip_of, "a zip archive, not a file of ratings; unpack it with unzip"),
        (bz2.compress, "compressed with bzip2, not a file of ratings; unpack it with bunzip2"),
        (lzma.compress, "compressed with xz, not a file of ratings; unpack it with unxz"),
        (
            lambda text: b"\x28\xb5\x2f\xfd" + text,
            "compressed with zstd, not a file of ratings; unpack it with unzstd",
        ),
        (lambda text: b"PAR1" + text + b"PAR1", "a Parquet file, not a file of ratings; write user, item, rating"),
        (tar_of, "a tar archive, not a file of ratings; unpack it with tar"),
        (lambda text: gzip.compress(tar_of(text)), "a tar archive, not a file of ratings; unpack it with tar"),
        (lambda text: gzip.compress(gzip.compress(text)), "gzip in gzip, not a file of ratings; unpack it once"),
        (lambda text: gzip.compress(text)[:-9], "damaged gzip data .*; copy or download it again"),
        (lambda text: text.decode().encode("utf-16"), "text in UTF-16, not a file of ratings; convert it: iconv"),
        (lambda text: text.decode().encode("utf-16-be"), "binary data or text in UTF-16, not a file of ratings"),
        (lambda text: text.decode().encode("utf-32"), "text in UTF-32, not a file of ratings; convert it: iconv"),
        (
            lambda _: b'{"overall": 5.0, "reviewerID": "A1"}\n',
            "JSON, not a file of ratings; write user, item, rating",
        ),
        (lambda _: b"<!DOCTYPE html>\n", "HTML or XML, not a file of ratings; download"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, pack: Callable[[bytes], bytes], what: str) -> None:
    path = tmp_path / "ratings"
    path.write_bytes(pack(b"1::2::3::4\n" * 9))
    with pytest.raises(InvalidInput, match=f"^{re.escape(str(path))}: {what}"):
        read_ratings(path)


def test_a_quote_that_stays_open_is_named(tmp_path: Path) -> None:
    path = ratings(tmp_path, '1,2,3,4\n"1,2,3,4\n' + "1,2,3,4\n" * 20_000)
    with pytest.raises(InvalidInput, match="close the quote that is open"):
        read_ratings(path)


@pytest.mark.parametrize("text", ["", CSV_HEADER])
def test_a_file_without_ratings_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidInput, match="holds no ratings"):
        read_ratings(ratings(tmp_path, text))


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(InvalidInput, match=f"{path.name}: cannot be read"):
            read_ratings(path)


def test_the_first_lines_of_movietweetings() -> None:
    events = read_ratings(EXCERPT)
    assert (len(events), len(np.unique(events.user)), len(np.unique(events.item))) == (2000, 369, 1018)
    assert (np.diff(events.timestamp) >= 0).all()
    assert events.label.sum() == 1029


def test_the_movietweetings_file() -> None:
    movies = Path(os.environ.get("MOVIETWEETINGS_100K", WHOLE))
    if not movies.exists():
        pytest.skip(f"needs the 100,000 ratings at {movies}, or where MOVIETWEETINGS_100K says")
    events = read_ratings(movies)
    assert (len(events), len(np.unique(events.user)), len(np.unique(events.item))) == (100_000, 16_554, 10_506)
    assert (np.diff(events.timestamp) >= 0).all()
    assert events.label.mean() == pytest.approx(0.505, abs=0.001)
