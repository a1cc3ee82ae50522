"""What peers may take: a limit that is reached names itself, and what is given back is free again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.access.limits import LimitOptions, Limits, TokenBucket
from deltasync.base.errors import InvalidInput, LimitReached

_MANY = st.integers(1, 100_000)


def test_so_many_may_be_taken_and_no_more() -> None:
    limits = Limits(LimitOptions(streams=2))
    with limits.taking("streams"), limits.taking("streams"):
        with pytest.raises(LimitReached, match=r"streams: at most 2 are allowed \(limit streams\)"):
            limits.taking("streams").__enter__()
        assert (limits.number("streams"), limits.refused["streams"]) == (2, 1)
    assert limits.number("streams") == 0
    with limits.taking("streams", 2):
        assert limits.number("streams") == 2


def test_other_limits_are_taken_over_but_for_those_that_are_fixed() -> None:
    limits = Limits(LimitOptions(streams=2))
    said = limits.take(LimitOptions(streams=1, message_bytes=1000))
    assert said == "limit streams: 1, was 2; limit message_bytes: 1000 after the next start"
    assert limits.options == LimitOptions(streams=1)
    assert limits.take(limits.options) == ""


@given(http=_MANY, grpc=_MANY, files=st.integers(8, 1_000_000))
def test_connections_leave_a_process_files_of_its_own(http: int, grpc: int, files: int) -> None:
    wanted = LimitOptions(http_connections=http, grpc_connections=grpc)
    found = wanted.within(files)
    assert min(found.http_connections, found.grpc_connections) >= 1
    assert found.http_connections + found.grpc_connections <= max(files * 3 // 4, 2)
    assert found.within(files) == found
    if http + grpc <= files * 3 // 4:
        assert found == wanted


def test_what_comes_in_is_bounded_by_streams_and_messages() -> None:
    limits = Limits(LimitOptions(streams=3, message_bytes=1000))
    with limits.taking("streams", 2):
        shown = limits.copy()
    assert (shown.options.by_name["receive_bytes"], shown.numbers["receive_bytes"]) == (3000, 2000)
    assert limits.number("streams") == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"streams": 0}, "limit streams: 0, expected a whole number of at least 1"),
        ({"streams": True}, "limit streams: True, expected"),
        ({"streams": "3"}, "limit streams: '3', expected"),
        ({"colours": 3}, "unknown limit 'colours'; limits: models, "),
        ([], "expected a table of limits"),
    ],
)
def test_what_is_no_limit_is_refused(settings: object, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        LimitOptions.read(settings, {})


# How often something may be done, whatever the times at which it is tried.

rates = st.integers(1, 50)
pauses = st.lists(st.floats(0, 3, allow_subnormal=False), max_size=60)


@given(rates, pauses)
def test_in_no_time_more_is_taken_than_comes_and_there_was(rate: int, pauses: list[float]) -> None:
    bucket, now, taken = TokenBucket.full(rate, 0.0), 0.0, list[float]()
    for pause in pauses:
        now += pause
        left = bucket.take(rate, now)
        if left:
            bucket = left
            taken.append(now)
    for first, begun in enumerate(taken):
        for last in range(first, len(taken)):
            assert last - first + 1 <= rate + (taken[last] - begun) * rate + 1e-6


@given(rates, st.integers(1, 60))
def test_what_comes_no_faster_is_never_refused(rate: int, number: int) -> None:
    bucket: TokenBucket | None = TokenBucket.full(rate, 0.0)
    for each in range(number):
        assert bucket
        bucket = bucket.take(rate, (each + 1) / rate)


@given(rates, pauses)
def test_one_that_was_left_for_a_second_is_full(rate: int, pauses: list[float]) -> None:
    bucket, now = TokenBucket.full(rate, 0.0), 0.0
    for pause in pauses:
        now += pause
        bucket = bucket.take(rate, now) or bucket
    assert bucket.is_full(rate, now + 1.01)
    assert not (bucket.take(rate, now + 1.01) or bucket).is_full(rate, now + 1.01)


def test_a_limit_counts_the_present_number_and_the_addition() -> None:
    limits, consumers = Limits(LimitOptions(consumers=3)), ["a", "b"]
    limits.count("consumers", consumers.__len__)
    with limits.taking("consumers"):
        assert limits.number("consumers") == limits.numbers["consumers"] == 3
        with pytest.raises(LimitReached, match="limit consumers"):
            limits.check_more("consumers")
    consumers.clear()
    copy = limits.copy()
    consumers.append("c")
    assert (limits.number("consumers"), copy.number("consumers")) == (1, 0)
