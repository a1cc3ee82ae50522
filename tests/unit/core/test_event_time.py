"""What is known of the newest event: nothing, or a time; a clock that is ahead makes no negative age."""

from typing import Any

import numpy as np
import pytest
from tests.support.seals import sealed

from deltasync.core.errors import InvalidInput
from deltasync.core.event_time import check_event_time, newest_event_time, seconds_behind
from deltasync.core.seal import event_time_of

SECOND = 10**9


def test_the_newest_of_those_who_know_counts() -> None:
    assert newest_event_time([3, None, 5, 4]) == 5
    assert newest_event_time([None, None]) is None
    assert newest_event_time([]) is None


@pytest.mark.parametrize("time", [0, -1, 2**63, 1.5, True, "1", np.float64(3.0)])
def test_what_is_no_time_is_refused(time: Any) -> None:
    with pytest.raises(InvalidInput, match=r"event_time_unix_ns: .*, expected whole nanoseconds since 1970"):
        check_event_time(time)


@pytest.mark.parametrize("time", [None, 1, 2**63 - 1, np.int64(7)])
def test_what_is_a_time_or_none_is_taken(time: Any) -> None:
    check_event_time(time)


def test_age_is_in_seconds_and_never_negative() -> None:
    assert seconds_behind(2 * SECOND, 5 * SECOND + SECOND // 2) == 3.5
    assert seconds_behind(5 * SECOND, 2 * SECOND) == 0.0
    assert seconds_behind(None, SECOND) is None


def test_the_event_time_of_a_version_is_that_of_its_own_seal() -> None:
    seals = [sealed(4, event_time_unix_ns=40), sealed(5), sealed(6, event_time_unix_ns=60)]
    assert [event_time_of(version, seals) for version in (4, 5, 6)] == [40, None, 60]
    assert [event_time_of(version, seals) for version in (0, 3, 7)] == [None, None, None], "no seal, no guess"
    assert event_time_of(1, []) is None
