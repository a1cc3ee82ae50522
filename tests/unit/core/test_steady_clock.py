"""How long ago a number of a history was the newest."""

import time

from deltasync.core.steady_clock import FOREVER_NS, Succession, steady_ns


def succession(*times: tuple[int, int]) -> Succession:
    made = Succession()
    for number, at_ns in times:
        made.add(number, at_ns)
    return made


def test_a_number_is_the_newest_until_there_is_a_later_one() -> None:
    numbers = succession((3, 100), (5, 200), (6, 300))
    assert [numbers.behind_ns(number, 1000) for number in (3, 4, 5, 6, 7)] == [800, 800, 700, 0, 0]
    assert [numbers.age_ns(number, 1000) for number in (3, 5, 6)] == [900, 800, 700]


def test_nobody_knows_since_when_there_is_something_later_than_what_is_older_than_the_first() -> None:
    numbers = succession((3, 100), (5, 200))
    assert numbers.behind_ns(2, 1000) == FOREVER_NS
    assert {numbers.age_ns(number, 1000) for number in (2, 4, 6)} == {FOREVER_NS}
    assert succession().behind_ns(2, 1000) == 0


def test_of_what_was_found_at_the_start_it_is_not_known_when_it_came() -> None:
    numbers = succession((3, -FOREVER_NS), (5, 200))
    assert (numbers.since_ns(3), numbers.seconds_since(3, 1000)) == (None, None)
    assert numbers.since_ns(5) == 200


def test_repeating_a_number_changes_nothing() -> None:
    numbers = succession((3, 100), (3, 200), (2, 300))
    assert (numbers.age_ns(3, 1000), numbers.behind_ns(3, 1000)) == (900, 0)


def test_what_has_become_the_newest_since_a_time_was_read_is_no_less_than_0_old() -> None:
    numbers = succession((3, -FOREVER_NS), (5, 2 * 10**9))
    assert [numbers.seconds_since(5, now_ns) for now_ns in (10**9, 2 * 10**9, 3 * 10**9)] == [0, 0, 1]


def test_what_is_no_longer_remembered_is_not_known() -> None:
    for count in range(19_990, 20_010):  # Those that were the newest long ago are forgotten many at once.
        numbers = succession(*((number, number) for number in range(count)))
        assert numbers.behind_ns(count - 10, 30_000) == 30_000 - (count - 9)
        assert numbers.age_ns(count - 10_000, 30_000) == 30_000 - (count - 10_000)
        assert numbers.behind_ns(count - 20_001, 30_000) == FOREVER_NS


def test_the_clock_goes_on_while_the_machine_sleeps() -> None:
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert before <= steady_ns() <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)
