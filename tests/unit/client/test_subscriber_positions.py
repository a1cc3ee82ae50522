"""Whether what a replica holds is a position that somebody waits for, or comes after it."""

import pytest

from deltasync.core.position import Position, reaches


@pytest.mark.parametrize(
    ("held", "wanted", "yes"),
    [
        (Position("h", 5, 9), Position("h", 5, 9), True),
        (Position("h", 5), Position("h", 5, 9), True),
        (Position("h", 6, 1), Position("h", 5, 9), True),
        (Position("h", 4), Position("h", 5), False),
        (Position("h", 5, 8), Position("h", 5, 9), False),  # Of a past that was discarded.
        (Position("h.1", 5, 9), Position("h", 5, 9), True),  # The same past, restored.
        (Position("h.1", 6, 1), Position("h", 5, 9), False),
        (Position("h.1", 5), Position("h", 5), False),
    ],
)
def test_which_positions_reach_another(held: Position, wanted: Position, yes: bool) -> None:
    assert reaches(held, wanted) is yes
