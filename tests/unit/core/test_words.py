"""Numbers and times as people read them."""

import pytest

from deltasync.core.words import are, counted, utc


@pytest.mark.parametrize(("number", "said"), [(0, "0 rows are"), (1, "1 row is"), (2, "2 rows are")])
def test_one_is_no_plural(number: int, said: str) -> None:
    assert are(number, "row") == said
    assert said.startswith(counted(number, "row"))


def test_a_time_is_that_of_utc_to_the_second() -> None:
    assert utc(10**18 + 999_999_999) == "2001-09-09T01:46:40Z"
