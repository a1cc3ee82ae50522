"""Rows that do not fit their digests, in words."""

from typing import Any

import numpy as np
import pytest

from deltasync.core.rows import ranges


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([3], "row 3"),
        ([3, 4], "rows 3 to 4"),
        ([0, 2, 3, 9], "rows 0, 2 to 3, 9"),
        (range(0, 14, 2), "rows 0, 2, 4, 6, 8 and 2 other ranges"),
    ],
)
def test_ranges_are_told_in_words(ids: Any, words: str) -> None:
    assert ranges(np.array(ids)) == words
