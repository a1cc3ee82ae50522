from pathlib import Path

import numpy as np
from tests.support.mapping import in_a_file

from deltasync.feeds.scratch import room_for

INT64 = np.dtype(np.int64)


def test_room_is_in_memory_or_in_a_file_that_nobody_sees(tmp_path: Path) -> None:
    in_memory, spilled = room_for((3, 2), INT64, None, "rows"), room_for((3, 2), INT64, tmp_path, "rows")
    spilled[:] = 7
    assert not in_a_file(in_memory)
    assert in_a_file(spilled)
    assert spilled.shape == in_memory.shape
    assert spilled.tolist() == [[7, 7]] * 3
    assert not list(tmp_path.iterdir())


def test_no_rows_need_no_file(tmp_path: Path) -> None:
    """A large release may take none of one of its tables."""
    assert room_for((0, 64), INT64, tmp_path, "rows").shape == (0, 64)
