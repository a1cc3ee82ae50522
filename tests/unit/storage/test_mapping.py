"""Mapped files: no descriptor is kept, and the memory goes with the last array."""

import ctypes
import gc
import os
from pathlib import Path

import numpy as np
import pytest
from tests.support.mapping import in_a_file

from deltasync.core.errors import StorageFailed
from deltasync.storage import mapping
from deltasync.storage.mapping import Mapping, map_file

FP32 = np.dtype(np.float32)


def file_of(folder: Path, size: int = 5000) -> Path:
    path = folder / "file"
    path.write_bytes(bytes(size))
    return path


def mapped_times(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_written_is_in_the_file_and_no_descriptor_is_kept(tmp_path: Path) -> None:
    path, before = file_of(tmp_path), descriptors()
    mapped = map_file(path)
    assert descriptors() == before
    rows = mapped.array(FP32, (3, 4), 64)
    rows[2] = [1, 2, 3, 4]
    mapped.flush()
    content = path.read_bytes()
    assert content[:64] == bytes(64)
    np.testing.assert_array_equal(np.frombuffer(content[64 : 64 + 48], FP32).reshape(3, 4), rows)
    np.testing.assert_array_equal(map_file(path).array(FP32, (3, 4), 64), rows)
    assert rows.flags.c_contiguous
    assert rows.flags.writeable
    assert rows.flags.aligned


def test_the_memory_goes_with_the_last_array(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    rows = map_file(path).array(FP32, (10, 4))
    row = rows[3:4].view(np.uint32)[:, 1:]
    del rows
    gc.collect()
    assert mapped_times(path) == 1
    assert in_a_file(row)
    assert row.sum() == 0
    del row
    assert mapped_times(path) == 0


def test_a_file_that_is_removed_can_still_be_read(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    rows = map_file(path).array(FP32, (10, 4))
    path.unlink()
    rows[:] = 3
    assert rows.sum() == 120


def test_what_cannot_be_mapped_is_an_error_in_words(tmp_path: Path) -> None:
    with (
        file_of(tmp_path).open("r+b") as file,
        pytest.raises(StorageFailed, match="rows cannot be mapped: Cannot "),
    ):
        Mapping(file.fileno(), 1 << 60, "rows")
    with (
        file_of(tmp_path).open("rb") as file,
        pytest.raises(StorageFailed, match="rows cannot be mapped: Permission"),
    ):
        Mapping(file.fileno(), 5000, "rows")


def test_what_the_disk_refuses_is_an_error_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        ctypes.set_errno(5)
        return -1

    mapped = map_file(file_of(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(mapping._c, "msync", refused)
        with pytest.raises(StorageFailed, match="file cannot be flushed: Input/output error"):
            mapped.flush()
    mapped.flush()
