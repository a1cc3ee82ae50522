import time
from pathlib import Path

import pytest
from tests.soak.clock import clock_file, follow_clock_file


def test_a_clock_is_off_while_a_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    monkeypatch.setattr(time, "time_ns", lambda: 1000 * 10**9)
    file = clock_file(tmp_path / "service.fuse")
    follow_clock_file(file)
    assert (time.time(), time.time_ns()) == (1000.0, 1000 * 10**9)
    file.write_text("-240.0")
    assert (time.time(), time.time_ns()) == (760.0, 760 * 10**9)
    file.unlink()
    assert (time.time(), time.time_ns()) == (1000.0, 1000 * 10**9)
