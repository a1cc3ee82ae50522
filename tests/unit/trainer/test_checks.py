"""Formats of what was saved: those that are known, and those that are not."""

from typing import Any

import pytest

from deltasync.core.errors import InvalidInput
from deltasync.trainer.checks import check_format


@pytest.mark.parametrize("found", [1, 2, 3])
def test_formats_up_to_the_newest_are_read(found: int) -> None:
    check_format("a state", found, 3)


@pytest.mark.parametrize("found", [4, 10**9])
def test_a_newer_format_is_refused_with_both_numbers_and_a_way_out(found: int) -> None:
    message = f"a state is of format {found}, this version reads 3: update deltasync, or start"
    with pytest.raises(InvalidInput, match=message):
        check_format("a state", found, 3)


@pytest.mark.parametrize("found", [0, -1, 1.0, "1", True, None, b"\0"])
def test_what_is_no_format_is_not_taken_for_one(found: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^a state: format: .* expected a whole number of at least 1$"):
        check_format("a state", found, 3)
