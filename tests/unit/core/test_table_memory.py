"""Memory of tables: looked for before it is taken, given back with the last array, and none of it left behind."""

import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.volumes import fill, small_volume

from deltasync.base.errors import StorageFailed
from deltasync.core.table_memory import Room, TableMemory, memory_room

MIB, GIB = 1 << 20, 1 << 30
LARGE = str(1 << 62)


@pytest.fixture(params=["memory", "files"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> TableMemory:
    """Plain memory, or scratch files in a folder that is not there yet."""
    return TableMemory(tmp_path / "scratch" / "tables" if request.param == "files" else None)


def mapped_bytes() -> int:
    """The bytes that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (1000, 700), (2 * MIB,)])
@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<i8", "?"])
def test_arrays_are_zero_and_like_any_other(memory: TableMemory, shape: tuple[int, ...], dtype: str) -> None:
    before = descriptors()
    array = memory.zeros(shape, dtype)
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.flags.aligned
    assert not array.any()
    array[:] = 1
    assert array.all()
    assert descriptors() == before


def test_memory_goes_with_the_last_array(memory: TableMemory) -> None:
    gc.collect()  # What other tests have left.
    before = mapped_bytes()
    array = memory.zeros((64 * MIB,), np.uint8)
    last = array[5:9].view(np.float32)
    del array
    gc.collect()
    assert mapped_bytes() >= before + 64 * MIB
    assert last.sum() == 0
    del last
    gc.collect()
    assert mapped_bytes() < before + 64 * MIB


def test_files_have_no_name(tmp_path: Path) -> None:
    array = TableMemory(tmp_path).zeros((MIB,), np.int64)
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    assert list(tmp_path.iterdir()) == []
    del array


def test_small_arrays_take_no_mapping_and_no_file(tmp_path: Path) -> None:
    """A process may have 65,530 mappings only."""
    memory = TableMemory(tmp_path / "none")
    arrays = [memory.zeros((100, 100), np.float32) for _ in range(3)]
    assert not (tmp_path / "none").exists()
    assert not any(each.any() for each in arrays)


# Room.


class Machine:
    """Free and total bytes of a machine, and the bytes that this process has written."""

    def __init__(self, free: int, total: int = 0) -> None:
        self.free, self.total, self.private, self.looks = free, total, 0, 0

    def room(self) -> Room:
        self.looks += 1
        return Room(self.free, self.total)

    def memory(self, **options: Any) -> TableMemory:
        return TableMemory(room=self.room, private=lambda: self.private, **options)


def test_memory_that_is_not_there_is_refused_with_both_numbers() -> None:
    memory = Machine(10 * MIB).memory()
    memory.check(10 * MIB, "table 'user'")
    said = f"table 'user': it takes {10 * MIB + 1} bytes, and {10 * MIB} bytes of memory are free: give the "
    with pytest.raises(StorageFailed, match=said):
        memory.check(10 * MIB + 1, "table 'user'")
    with pytest.raises(
        StorageFailed, match=f"no room for an array of 3 x {MIB} float32 values: it takes {12 * MIB}"
    ):
        memory.zeros((3, MIB), np.float32)


@pytest.mark.parametrize(("total", "kept"), [(32 * MIB, 2 * MIB), (1 << 40, GIB)])
def test_tables_leave_some_memory_free(total: int, kept: int) -> None:
    machine = Machine(kept + 5 * MIB, total)
    machine.memory().check(5 * MIB, "it")
    with pytest.raises(StorageFailed, match=f"and {5 * MIB} bytes of memory are free"):
        machine.memory().check(5 * MIB + 1, "it")
    machine.free = kept - 1
    with pytest.raises(StorageFailed, match="and 0 bytes of memory are free"):
        machine.memory().check(1, "it")


def test_memory_that_is_promised_but_not_written_yet_is_not_free() -> None:
    machine = Machine(10 * MIB)
    memory = machine.memory()
    array = memory.zeros((6 * MIB,), np.uint8)
    with pytest.raises(StorageFailed, match=f"and {4 * MIB} bytes of memory are free"):
        memory.check(5 * MIB, "it")
    machine.private = 6 * MIB  # Once it is written, the system counts it itself.
    memory.check(10 * MIB, "it")
    machine.private = 0
    del array
    gc.collect()
    memory.check(10 * MIB, "it")


def test_thousands_of_small_tables_take_few_looks_at_the_system() -> None:
    machine = Machine(10 * MIB)
    memory = machine.memory(fresh_seconds=1000)
    for looks in (1, 2):  # The second one when what was left is used up.
        for _ in range(10_000):
            memory.check(1000, "a small table")
        assert machine.looks == looks
    memory.check(2 * MIB, "a large table")
    assert machine.looks == 3


def test_a_system_without_numbers_is_only_asked_to_map() -> None:
    memory = TableMemory(room=lambda: None)
    memory.check(1 << 60, "it")
    with pytest.raises(StorageFailed, match=f"cannot map {1 << 60} bytes of memory for tables: Cannot allocate"):
        memory.zeros((1 << 60,), np.uint8)


def test_arrays_may_be_freed_while_room_is_looked_for() -> None:
    """Arrays in cycles are freed by a collection, which begins wherever something is made, also in `zeros`."""
    arrays = list[Any]()

    def collected() -> Room:
        arrays.clear()
        return Room(GIB, 0)

    memory = TableMemory(room=collected)
    arrays.append(memory.zeros((2 * MIB,), np.uint8))
    taking = threading.Thread(target=memory.zeros, args=((2 * MIB,), np.uint8), daemon=True)
    taking.start()
    taking.join(10)
    assert not taking.is_alive()


def test_files_take_no_more_than_their_volume_may_give() -> None:
    with small_volume(32 * MIB) as volume:
        memory = TableMemory(volume / "tables")
        with pytest.raises(
            StorageFailed, match=rf"{31 * MIB} bytes, and \d+ bytes on the volume of {volume}/tables are free"
        ):
            memory.check(31 * MIB, "it")
        with pytest.raises(StorageFailed, match=f"it takes {31 * MIB} bytes"):
            memory.zeros((31 * MIB,), np.uint8)
        array = memory.zeros((20 * MIB,), np.uint8)
        with pytest.raises(StorageFailed, match=r"bytes on the volume of .* are free"):
            memory.check(20 * MIB, "it")
        array[:] = 1
        del array
        gc.collect()
        memory.check(20 * MIB, "it")


def test_a_volume_that_is_full_is_an_error_in_words() -> None:
    """Others may have taken what was free a moment before."""
    with small_volume(32 * MIB) as volume:
        fill(volume)
        with pytest.raises(
            StorageFailed, match=f"cannot reserve {2 * MIB} bytes .*: No space left on device: make"
        ):
            TableMemory(volume, lambda: None).zeros((2 * MIB,), np.uint8)


def test_a_folder_that_cannot_be_used_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed, match=r"for tables in .*file/below: Not a directory"):
        TableMemory(tmp_path / "file" / "below").zeros((2 * MIB,), np.uint8)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        (
            "0::/a.slice/b.service\n",
            {"a.slice/b.service/memory.max": "max", "a.slice/b.service/memory.current": "70"}
            | {"a.slice/memory.max": "300", "a.slice/memory.current": "100"},
            Room(200, 300),
        ),
        (
            "0::/a\n",
            {"a/memory.max": "200", "a/memory.current": "50", "memory.max": "300", "memory.current": "250"},
            Room(50, 300),
        ),
        ("0::/\n", {"memory.max": "400", "memory.current": "500"}, Room(0, 400)),
        (
            "0::/\n",
            {"memory.max": "400", "memory.current": "390"}
            | {"memory.stat": "anon 90\nfile 300\nactive_file 100\ninactive_file 150\nshmem 50"},
            Room(260, 400),
        ),
        (
            "3:cpu:/x\n2:memory:/x/y\n0::/\n",
            {"memory/x/memory.limit_in_bytes": "500", "memory/x/memory.usage_in_bytes": "100"}
            | {"memory/x/memory.stat": "active_file 1\ntotal_active_file 20\ntotal_inactive_file 30"},
            Room(450, 500),
        ),
        (
            "2:cpu,memory:/gone\n",
            {"memory/memory.limit_in_bytes": "600", "memory/memory.usage_in_bytes": "1"},
            Room(599, 600),
        ),
        (
            "2:memory:/x\n",
            {"memory/x/memory.limit_in_bytes": LARGE, "memory/x/memory.usage_in_bytes": "1"},
            Room(700 << 10, 1000 << 10),
        ),
        ("", {}, Room(700 << 10, 1000 << 10)),
    ],
)
def test_memory_is_limited_by_the_machine_and_its_control_groups(
    tmp_path: Path, own: str, files: dict[str, str], expected: Room
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(own)
    meminfo = "MemTotal: 1000 kB\nMemFree: 5 kB\nMemAvailable: 700 kB\nHugePages_Total: 0\n"
    (tmp_path / "meminfo").write_text(meminfo)
    assert memory_room(tmp_path, tmp_path) == expected


def test_this_machine_has_memory() -> None:
    assert memory_room(Path("/none"), Path("/none")) is None
    room = memory_room()
    assert room is not None
    assert 1 << 26 < room.free <= room.total
