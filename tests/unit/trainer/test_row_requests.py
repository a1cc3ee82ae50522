"""Which requests to delete rows a rank meets."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltasync.core.rows import DeleteRequest
from deltasync.trainer.sync import RowRequests


def handed(*numbers: int) -> list[DeleteRequest]:
    return [DeleteRequest(number, "t", np.array([number])) for number in numbers]


def test_a_request_is_met_once() -> None:
    requests = RowRequests()
    assert requests.newest(handed(3, 5)) == 5
    assert [each.number for each in requests.meet(handed(3, 5), 3)] == [3]
    assert requests.newest(handed(3, 5)) == 5
    assert requests.met == {3}
    assert [each.number for each in requests.meet(handed(3, 5), 5)] == [5]
    assert requests.newest(handed(3, 5)) == 0
    assert requests.met == {3, 5}


def test_what_the_service_no_longer_hands_out_is_forgotten() -> None:
    requests = RowRequests()
    requests.meet(handed(3, 5), 5)
    assert requests.newest(handed(5)) == 0
    assert requests.met == {5}
    assert requests.newest(handed(3)) == 3, "a service that was restored asks again"


PREFIXES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=20)


@given(PREFIXES)
def test_ranks_that_were_handed_different_ones_meet_the_same(steps: list[tuple[int, int]]) -> None:
    """The service has sent each rank a first part of all requests."""
    ranks = [RowRequests(), RowRequests()]
    got = [0, 0]
    for more in steps:
        got = [max(before, now) for before, now in zip(got, more, strict=True)]
        lists = [handed(*range(1, count + 1)) for count in got]
        upto = min(rank.newest(its) for rank, its in zip(ranks, lists, strict=True))
        met = [[each.number for each in rank.meet(its, upto)] for rank, its in zip(ranks, lists, strict=True)]
        assert met[0] == met[1]
        assert ranks[0].met == ranks[1].met == set(range(1, max(ranks[0].met, default=0) + 1))
