"""Mapped files: no descriptor is kept, and the memory goes with the last array."""

import ctypes
import errno
import gc
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.mapping import in_a_file

from deltasync.core.errors import StorageFailed
from deltasync.storage import mapping
from deltasync.storage.mapping import Mapping, TouchedArray, map_file
from deltasync.storage.private_memory import PrivateMemory

FP32 = np.dtype(np.float32)


def file_of(folder: Path, size: int = 5000) -> Path:
    path = folder / "file"
    path.write_bytes(bytes(size))
    return path


def touched(*arrays: NDArray[Any]) -> list[TouchedArray]:
    """The arrays as they are flushed, if all of them was written."""
    return [TouchedArray(each.reshape(-1).view("u1"), np.ones(1, np.uint16), 1, each.nbytes) for each in arrays]


@pytest.fixture(params=["private", "shared"])
def private(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether there is memory for files that are mapped privately."""
    found: bool = request.param == "private"
    monkeypatch.setattr(mapping, "PRIVATE", PrivateMemory(1 << 30 if found else 0))
    return found


def mapped_times(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_flushed_is_in_the_file_and_no_descriptor_is_kept(tmp_path: Path, private: bool) -> None:
    path, before = file_of(tmp_path), descriptors()
    mapped = map_file(path)
    assert mapped.private is private
    assert descriptors() == before
    rows = mapped.array(FP32, (3, 4), 64)
    rows[2] = [1, 2, 3, 4]
    assert any(path.read_bytes()) is not private
    mapped.flush(touched(rows))
    assert descriptors() == before
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


def test_a_write_that_is_refused_is_tried_once_more_to_know_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(tmp_path, 50_000)
    mapped = map_file(path)
    content, refused = mapped.array(np.dtype("u1"), (50_000,)), iter([0, 8192, 8200, 49_999])
    content[:] = 7
    with monkeypatch.context() as patch:
        patch.setattr("deltasync.storage.mapping.kernels.write", lambda *_: next(refused, 50_000))
        mapped.flush(touched(content))
    whole = path.read_bytes()
    assert [set(whole[:4096]), set(whole[4096:8192]), set(whole[8192:12296])] == [{7}, {0}, {7}]
    assert whole[12296:] == bytes(50_000 - 12296 - 1) + b"\7"
    path.rename(tmp_path / "other")
    path.symlink_to("/dev/full")
    with pytest.raises(StorageFailed, match="file cannot be flushed: No space left on device"):
        mapped.flush(touched(content))


def test_files_are_shared_where_the_system_promises_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class System:
        """One that refuses private mappings."""

        def mmap(self, *arguments: Any) -> Any:
            if arguments[3] == mmap.MAP_PRIVATE:
                ctypes.set_errno(errno.ENOMEM)
                return mapping._FAILED
            return system.mmap(*arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(system, name)

    system, memory = mapping._c, PrivateMemory(10_000)
    with monkeypatch.context() as patch:
        patch.setattr(mapping, "_c", System())
        patch.setattr(mapping, "PRIVATE", memory)
        shared = map_file(file_of(tmp_path))
        assert not shared.private
        patch.setattr(mapping, "_c", system)
        assert map_file(file_of(tmp_path)).private, "what was not taken is there for others"


def test_memory_is_given_back_with_the_last_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "PRIVATE", PrivateMemory(10_000))
    path = file_of(tmp_path)
    rows = map_file(path).array(FP32, (10, 4))
    assert in_a_file(rows)
    assert not map_file(path).private
    del rows
    gc.collect()
    assert map_file(path).private
