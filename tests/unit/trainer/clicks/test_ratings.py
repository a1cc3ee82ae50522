import os
from pathlib import Path

import numpy as np
import pytest

from deltasync.trainer.clicks.events import DataError, Events, concatenate
from deltasync.trainer.clicks.ratings import rating_events

ROOT = Path(__file__).parents[4]
EXCERPT = ROOT / "tests/fixtures/movietweetings/ratings.dat"
WHOLE = ROOT.parent / "shared/data/movietweetings-100k/ratings.dat"
CSV_HEADER = "userId,movieId,rating,timestamp\n"


def read(folder: Path, text: str, like_from: float | None = None) -> Events:
    path = folder / "ratings"
    path.write_text(text)
    return concatenate(list(rating_events(path, like_from)))


def test_a_user_ordered_file_becomes_time_ordered_and_ties_keep_the_file_order(tmp_path: Path) -> None:
    events = read(tmp_path, "1::7::5::30\n1::8::3::10\n2::9::4::30\n3::7::1::10\n")
    assert events.index.tolist() == [0, 1, 2, 3]
    assert events.timestamp.tolist() == [10, 10, 30, 30]
    assert events.user.tolist() == [1, 3, 1, 2]
    assert events.item.tolist() == [8, 7, 7, 9]
    assert events.label.tolist() == [0, 0, 1, 1]
    assert events.label.dtype == np.float32


def test_many_ties_keep_the_file_order(tmp_path: Path) -> None:
    events = read(tmp_path, "".join(f"{user}::1::5::{user % 3}\n" for user in range(3000)))
    assert events.user.tolist() == sorted(range(3000), key=lambda user: user % 3)


def test_csv_with_halves_and_windows_line_ends(tmp_path: Path) -> None:
    text = CSV_HEADER + "5,6,3.5,20\n9223372036854775807,7,4.0,10"
    events = read(tmp_path, text.replace("\n", "\r\n"))
    assert events.user.tolist() == [2**63 - 1, 5]
    assert events.label.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("ratings", "like_from", "labels"),
    [
        ((3, 4, 5), None, [0, 1, 1]),
        ((5, 7, 8), None, [0, 0, 1]),
        ((3, 4, 5), 4.5, [0, 0, 1]),
        ((3, 4, 10), 3, [1, 1, 1]),
        ((0.5, 3.5, 5.0), None, [0, 0, 1]),
    ],
)
def test_what_counts_as_liked(
    tmp_path: Path, ratings: tuple[float, ...], like_from: float | None, labels: list[int]
) -> None:
    text = "".join(f"1::{item}::{rating}::{item}\n" for item, rating in enumerate(ratings))
    assert read(tmp_path, text, like_from).label.tolist() == labels


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("1::2::3", r"3 field\(s\)"),
        ("1::2::3::4::5", r"5 field\(s\)"),
        ("1,2,3,4", r"1 field\(s\), the first being '1,2,3,4'"),
        ("", r"1 field\(s\), the first being ''"),
        ("x::2::3::4", "user 'x'"),
        ("-1::2::3::4", "user '-1'"),
        ("1::-2::3::4", "item '-2'"),
        ("1::9223372036854775808::3::4", "item '9223372036854775808'"),
        ("1::1_0::3::4", "item '1_0'"),
        ("1::2::nan::4", "rating 'nan'"),
        ("1::2::inf::4", "rating 'inf'"),
        ("1::2::::4", "rating ''"),
        ("1::2::3::4.5", "timestamp '4.5'"),
        ("1::2::3::\u0663", "timestamp '\u0663'"),
    ],
)
def test_a_bad_line_is_named_with_what_was_found_and_expected(tmp_path: Path, line: str, found: str) -> None:
    with pytest.raises(DataError, match=rf"ratings, line 2: found {found}.*'user::item::rating::timestamp'"):
        read(tmp_path, f"1::2::3::4\n{line}\n1::2::3::4\n")


@pytest.mark.parametrize("separator", ["::", ",", "\t"])
@pytest.mark.parametrize("header", [False, True])
def test_fields_may_be_apart_by_colons_commas_or_tabs(tmp_path: Path, separator: str, header: bool) -> None:
    lines = ["userId::movieId::rating::timestamp"] * header + ["1::7::5::30", "2::8::3.5::10"]
    events = read(tmp_path, "".join(f"{line}\n" for line in lines).replace("::", separator))
    assert (events.user.tolist(), events.item.tolist()) == ([2, 1], [8, 7])
    assert (events.label.tolist(), events.timestamp.tolist()) == ([0, 1], [10, 30])


@pytest.mark.parametrize("end", ["\n", "\n\n\n", "\r\n\r\n", "\n  \n\t\n"])
def test_blank_lines_at_the_end_are_no_ratings(tmp_path: Path, end: str) -> None:
    for separator in ("::", ",", "\t"):
        assert len(read(tmp_path, "1::2::3::4\n5::6::3::4".replace("::", separator) + end)) == 2


def test_a_blank_line_before_others_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ratings, line 2: found 1 field\(s\), the first being ''; expected"):
        read(tmp_path, "1::2::3::4\n\n\n1::2::3::4\n")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("user,item,rating,timestamp", "found user 'user', .*; expected 'user,item,rating,timestamp' in numbers"),
        ("1\t2\t3", r"found 3 field\(s\), .*; expected 'user\\titem\\trating\\ttimestamp' in numbers"),
        ("1;2;3;4", "expected 'user::item::rating::timestamp' in numbers, or the same with commas or tabs"),
    ],
)
def test_a_bad_first_line_is_told_what_it_looks_like(tmp_path: Path, line: str, expected: str) -> None:
    with pytest.raises(DataError, match=f"ratings, line 1: .*{expected}"):
        read(tmp_path, f"{line}\n1::2::3::4\n")


def test_a_bad_csv_line_counts_the_header(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 3: found rating 'good'.*'user,item,rating,timestamp'"):
        read(tmp_path, CSV_HEADER + "1,2,3,4\n1,2,good,4\n")


@pytest.mark.parametrize("text", ["", CSV_HEADER])
def test_a_file_without_ratings_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="holds no ratings"):
        read(tmp_path, text)


def test_a_missing_file_and_a_folder_are_errors_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: cannot be read"):
        rating_events(tmp_path / "nowhere")
    with pytest.raises(DataError, match="cannot be read"):
        rating_events(tmp_path)


def test_like_from_must_be_a_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="like_from"):
        read(tmp_path, "1::2::3::4\n", like_from=float("nan"))


def test_the_first_lines_of_movietweetings() -> None:
    events = concatenate(list(rating_events(EXCERPT)))
    assert len(events) == 2000
    assert len(np.unique(events.user)) == 369
    assert len(np.unique(events.item)) == 1018
    assert (np.diff(events.timestamp) >= 0).all()
    assert events.label.sum() == 1029


def test_the_movietweetings_file() -> None:
    movies = Path(os.environ.get("MOVIETWEETINGS_100K", WHOLE))
    if not movies.exists():
        pytest.skip(f"needs the 100,000 ratings at {movies}, or where MOVIETWEETINGS_100K says")
    events = concatenate(list(rating_events(movies)))
    assert len(events) == 100_000
    assert len(np.unique(events.user)) == 16_554
    assert len(np.unique(events.item)) == 10_506
    assert (np.diff(events.timestamp) >= 0).all()
    assert events.label.mean() == pytest.approx(0.505, abs=0.001)
