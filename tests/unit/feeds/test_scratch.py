from pathlib import Path

import numpy as np
from tests.support.mapping import in_a_file, mapping_of

from deltasync.feeds.scratch import Room

INT64, INT8 = np.dtype(np.int64), np.dtype(np.int8)


def test_room_is_in_memory_or_in_a_file_that_nobody_sees(tmp_path: Path) -> None:
    in_memory, spilled = (Room([48], folder, "rows").array((3, 2), INT64) for folder in (None, tmp_path))
    spilled[:] = 7
    assert not in_a_file(in_memory)
    assert in_a_file(spilled)
    assert spilled.shape == in_memory.shape
    assert spilled.tolist() == [[7, 7]] * 3
    assert not list(tmp_path.iterdir())


def test_arrays_of_one_room_share_a_mapping_and_no_byte(tmp_path: Path) -> None:
    room = Room([3, 0, 16], tmp_path, "rows")
    arrays = [room.array((3,), INT8), room.array((0, 64), INT64), room.array((2,), INT64)]
    for number, array in enumerate(arrays):
        array[:] = number
    assert [array.tolist() for array in arrays] == [[0, 0, 0], [], [2, 2]]
    assert len({id(mapping_of(array)) for array in arrays}) == 1


def test_no_rows_need_no_file(tmp_path: Path) -> None:
    """A large release may take none of one of its tables."""
    assert Room([0], tmp_path, "rows").array((0, 64), INT64).shape == (0, 64)
