"""Mapped files: how they are mapped, that no descriptor is kept, and that the memory goes with the last array."""

import ctypes
import errno
import gc
import logging
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.mapping import in_a_file

from deltasync.core.errors import StorageFailed
from deltasync.core.position import Decision
from deltasync.storage import mapping, private_memory
from deltasync.storage.mapping import Mapping, TouchedArray, map_file
from deltasync.storage.private_memory import PrivateMemory, fits, memory_bytes

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


GIB = 1 << 30
LARGE = str(1 << 62)


@pytest.mark.parametrize(
    ("mapped", "size", "yes", "reason"),
    [
        (0, 4 * GIB, True, "those of this process take 4.00 GiB, at most half of the 8.00 GiB that there are"),
        (
            0,
            4 * GIB + 1,
            False,
            "take 4.00 GiB, more than half of the 8.00 GiB that there are; with more, small cuts",
        ),
        (3 * GIB, GIB, True, "take 4.00 GiB, at most half"),
        (3 * GIB, GIB + 1, False, "more than half"),
    ],
)
def test_half_of_the_memory_is_for_tables(mapped: int, size: int, yes: bool, reason: str) -> None:
    decision = fits(mapped, size, 8 * GIB)
    assert decision.yes is yes
    assert reason in decision.reason


def test_what_is_decided_is_said_once_until_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    memory = PrivateMemory(100)
    with caplog.at_level(logging.INFO):
        assert [memory.take(size) for size in (20, 30, 1, 2, 0)] == [True, True, False, False, True]
        memory.give_back(30)
        assert memory.take(30)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "tables are kept in memory",
        "tables are mapped files",
        "tables are kept in memory",
    ]


def test_memory_is_given_back_by_whoever_takes_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mappings in cycles are freed by a collection, which begins wherever something is made, also in `take`."""
    memory = PrivateMemory(100)
    assert memory.take(40)

    def collected(*sizes: int) -> Decision:
        memory.give_back(40)
        return fits(*sizes)

    with monkeypatch.context() as patch:
        patch.setattr(private_memory, "fits", collected)
        taking = threading.Thread(target=memory.take, args=(10,), daemon=True)
        taking.start()
        taking.join(10)
    assert not taking.is_alive()
    assert [memory.take(size) for size in (41, 40)] == [False, True]


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/a.slice/b.service\n", {"a.slice/b.service/memory.max": "max", "a.slice/memory.max": "300"}, 300),
        ("0::/a.slice/b.service\n", {"a.slice/b.service/memory.max": "200", "a.slice/memory.max": "300"}, 200),
        ("0::/\n", {"memory.max": "400"}, 400),
        ("0::/a\n", {"a/memory.max": "400", "a/memory.high": "350"}, 350),
        ("0::/a\n", {"a/memory.max": "400", "a/memory.high": "max"}, 400),
        ("3:cpu:/x\n2:memory:/x/y\n0::/\n", {"memory/x/memory.limit_in_bytes": "500"}, 500),
        ("2:cpu,memory:/gone\n", {"memory/memory.limit_in_bytes": "600"}, 600),
        ("2:memory:/x\n", {"memory/x/memory.limit_in_bytes": LARGE}, None),
        ("", {}, None),
    ],
)
def test_a_control_group_limits_memory(
    tmp_path: Path, own: str, files: dict[str, str], expected: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(own)
    machine = memory_bytes(tmp_path / "none", tmp_path / "none")
    assert memory_bytes(tmp_path, tmp_path) == (expected or machine)
    assert machine > 1 << 26


@pytest.mark.parametrize(
    ("overcommit", "promised", "expected"), [("0", 900, 700), ("1", 900, 700), ("2", 900, 100), ("2", 1100, 0)]
)
def test_what_other_processes_have_is_not_there(
    tmp_path: Path, overcommit: str, promised: int, expected: int
) -> None:
    (tmp_path / "sys" / "vm").mkdir(parents=True)
    (tmp_path / "sys" / "vm" / "overcommit_memory").write_text(f"{overcommit}\n")
    lines = ["MemAvailable: 700 kB", "CommitLimit: 1000 kB", f"Committed_AS: {promised} kB", "HugePages_Total: 0"]
    (tmp_path / "meminfo").write_text("\n".join(lines))
    assert memory_bytes(tmp_path / "none", tmp_path) == expected << 10


def test_this_machine_has_memory() -> None:
    assert 1 << 26 < memory_bytes() <= memory_bytes(Path("/none"), Path("/none"))
