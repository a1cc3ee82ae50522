from pathlib import Path

import numpy as np
from tests.soak.damage import flip_bit


def test_one_bit_is_flipped_where_there_is_something(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(bytes(50))
    (tmp_path / "m").mkdir()
    file = tmp_path / "m" / "rows"
    for number in range(20):
        before = bytes(100) + b"\xff" * 10 + bytes(100)
        file.write_bytes(before)
        said = flip_bit(tmp_path, number / 20)
        [at] = np.flatnonzero(np.frombuffer(before, np.uint8) != np.frombuffer(file.read_bytes(), np.uint8))
        assert said == f"rows, byte {at}"
        assert 100 <= at < 110
        assert (before[at] ^ file.read_bytes()[at]).bit_count() == 1


def test_of_nothing_nothing_is_flipped(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(bytes(50))
    assert flip_bit(tmp_path, 0.5) == "nothing"
