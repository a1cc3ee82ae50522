"""Answers of several processes, made one: nothing is lost, and each is in its place, whoever answers."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deltasync.status.merged import merge_of
from deltasync.status.overview import CUTS, EVENTS

Lines = list[list[int]]
_SHARES: st.SearchStrategy[Lines] = st.lists(st.lists(st.integers(0, 99), max_size=40), min_size=1, max_size=4)


def merged(path: str, *answers: Any) -> Any:
    merge = merge_of(path)
    assert merge
    return merge(*answers)


def _overview(process: int, numbers: list[int]) -> dict[str, Any]:
    return {
        "unix_ms": process,
        "freshness_bounds": [1.0],
        "processes": [{"process": f"sync-{process}"}],
        "missing": ["another"],
        "models": [{"model": each} for each in numbers],
        "trainers": [{"model": each, "rank": process} for each in numbers],
        "consumers": [{"consumer": each} for each in numbers],
        "cuts": [{"seconds_ago": each} for each in sorted(numbers)[:CUTS]],
        "events": [{"process": f"sync-{process}", "unix_ns": each} for each in sorted(numbers)[-EVENTS:]],
    }


@given(_SHARES, st.lists(st.sampled_from(["sync-8", "sync-9"]), unique=True))
def test_an_overview_is_that_of_one_process_with_everything(shares: Lines, missing: list[str]) -> None:
    whole = sorted(each for share in shares for each in share)
    found = merged("/status", [_overview(*each) for each in enumerate(shares)], missing)
    assert found.keys() == _overview(0, []).keys()
    assert found["unix_ms"] == 0
    assert found["missing"] == missing
    assert [each["process"] for each in found["processes"]] == [f"sync-{number}" for number in range(len(shares))]
    assert [each["model"] for each in found["models"]] == sorted(set(whole))
    assert [each["model"] for each in found["trainers"]] == whole
    assert [each["consumer"] for each in found["consumers"]] == sorted(set(whole))
    assert [each["seconds_ago"] for each in found["cuts"]] == whole[:CUTS]
    assert [each["unix_ns"] for each in found["events"]] == whole[-EVENTS:]


@given(_SHARES)
def test_a_list_is_sorted_as_each_is(shares: Lines) -> None:
    whole = sorted(each for share in shares for each in share)
    found = merged("/consumers", [[{"consumer": each} for each in sorted(share)] for share in shares], ())
    assert [each["consumer"] for each in found] == whole


def test_of_lines_of_one_name_that_counts_of_whoever_answers_for_it() -> None:
    here, elsewhere = {"consumer": "a", "head": 3}, {"consumer": "a", "head": None}
    for answers in ([[here], [elsewhere]], [[elsewhere], [here]], [[elsewhere], [here], [elsewhere]]):
        assert merged("/lag", answers, ()) == [here]
    assert merged("/lag", [[elsewhere], [elsewhere]], ()) == [elsewhere]


def test_tables_of_one_name_are_those_of_all_models() -> None:
    mine, other = {"table": {"model": "a"}}, {"table": {"model": "b"}}
    assert merged("/tables/user", [[other], [mine]], ()) == [mine, other]
    assert merge_of("/consumers/a/lag") is None
