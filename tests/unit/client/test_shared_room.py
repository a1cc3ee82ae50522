"""Shared memory has room for two sides, whatever happens to the mirror."""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from tests.support.examples import examples
from tests.support.small_memory import forked, in_tmpfs, mount

from deltasync.base.errors import StorageFailed
from deltasync.client import Position, Release, RowBatch, TableKind, TableSpec
from deltasync.client.shared import layout, target
from deltasync.client.shared.reader import SharedReader
from deltasync.client.shared.target import SharedTarget
from deltasync.core.tables import FREE_ID

WIDE = TableSpec("wide", 4000, 64)
RAW_IDS = TableSpec("wide.raw_ids", 4000, 1, np.dtype("<i8"), TableKind.ID_MAP, WIDE.name)
TABLES = [WIDE, RAW_IDS]
INDEX_BYTES = 16384 * 16  # At least three slots for each raw id.
CONTROL_BYTES = layout.CONTROL_BYTES + layout.READERS_BYTES
SIDE_BYTES = sum(table.nbytes + table.rows for table in TABLES) + INDEX_BYTES
# Less than half a side more.
TWO_SIDES = f"{(CONTROL_BYTES + 2 * SIDE_BYTES + SIDE_BYTES // 3) // 4096 * 4}k"
KILLED = 9


def release_of(version: int, *, resync: bool = False, table: TableSpec = WIDE) -> Release:
    """All rows of a table are the version, and have raw ids."""
    ids, id_map = np.arange(table.rows), replace(RAW_IDS, rows=table.rows)
    rows = [
        RowBatch.of_table(table, ids, np.full((table.rows, table.dim), version, np.float32)),
        RowBatch.of_table(id_map, ids, (ids + 10**6)[:, None] ^ FREE_ID),
    ]
    release = Release(Position("h", version, version), version, version, resync, [table, id_map], rows)
    return replace(release, version=version, model="clicks")


def opened(folder: Path) -> SharedTarget:
    return SharedTarget("m", "predictors", directory=folder)


def write_first_copy(folder: Path) -> None:
    memory = opened(folder)
    if memory.takes_parts:
        first, raw_ids = release_of(1, resync=True).rows
        memory.apply(replace(release_of(1, resync=True), rows=[first], more=True))
        memory.apply(replace(release_of(1, resync=True), rows=[raw_ids], continues=True))


def write_second_version(folder: Path) -> None:
    opened(folder).apply(release_of(2))


def write_changes(folder: Path) -> None:
    memory = opened(folder)
    newest = memory.newest().version
    memory.apply(release_of(newest + 1))
    memory.apply(release_of(newest + 2, resync=True))


def grow(folder: Path) -> None:
    memory = opened(folder)
    newest = memory.newest().version
    memory.apply(release_of(newest + 1, table=replace(WIDE, rows=WIDE.rows + 3000 * newest)))


def killed(number: int, write: Callable[[Path], None], folder: Path) -> bool:
    """Run a mirror that is killed at a fence; returns whether it came so far. It has a fence before each word that
    other processes read.
    """

    def run() -> None:
        fences = count(1)

        def die() -> None:
            if next(fences) == number:
                os._exit(KILLED)

        target.fence = die  # type: ignore[attr-defined,assignment]
        write(folder)

    code = forked(run)
    assert code in (0, KILLED)
    return code == KILLED


def finish(write: Callable[[Path], None], folder: Path) -> None:
    """Run a mirror that ends by itself."""
    assert not killed(0, write, folder)


def check(reader: SharedReader) -> int:
    """Check that readers have a whole version, and return it."""
    keys = np.arange(WIDE.rows) + 10**6
    rows, exist, version = reader.lookup_keys(WIDE.name, keys)
    assert exist.all()
    assert (rows == version).all()
    with reader.reading() as now:
        assert (now.tables[WIDE.name] == now.version).all()
    return version


def start_again(folder: Path) -> None:
    opened(folder)


def restart_until_it_lives(folder: Path) -> None:
    """Start a mirror, and kill it at each fence until it has started."""
    number = 1
    while killed(number, start_again, folder):
        number += 1


def test_a_first_copy_killed_at_any_fence_restarts_in_the_same_memory(tmp_path: Path) -> None:
    def is_killed(number: int) -> bool:
        died = killed(number, write_first_copy, tmp_path)
        restart_until_it_lives(tmp_path)
        finish(write_first_copy, tmp_path)
        assert check(SharedReader("m", directory=tmp_path)) == 1
        return died

    assert kills(tmp_path, is_killed) > 10


def test_a_mirror_killed_at_any_fence_continues_in_the_same_memory(
    tmp_path: Path,
) -> None:
    def is_killed(number: int) -> bool:
        finish(write_first_copy, tmp_path)
        readers = [SharedReader("m", directory=tmp_path)]
        assert check(readers[0]) == 1
        finish(write_second_version, tmp_path)
        readers.append(SharedReader("m", directory=tmp_path))  # It maps the other side.
        assert check(readers[1]) == 2
        died = killed(number, write_changes, tmp_path)
        before = check(SharedReader("m", directory=tmp_path))
        restart_until_it_lives(tmp_path)
        assert check(SharedReader("m", directory=tmp_path)) == before
        finish(write_changes, tmp_path)
        assert {check(reader) for reader in readers} == {before + 2}
        return died

    assert kills(tmp_path, is_killed) > 10


def test_a_mirror_killed_while_tables_grow_leaves_no_file(tmp_path: Path) -> None:
    def is_killed(number: int) -> bool:
        finish(write_first_copy, tmp_path)
        died = killed(number, grow, tmp_path)
        before = check(SharedReader("m", directory=tmp_path))
        finish(start_again, tmp_path)
        assert files(tmp_path) == 10, "of two tables on two sides rows and which exist, and two indices"
        assert check(SharedReader("m", directory=tmp_path)) == before
        finish(grow, tmp_path)
        assert check(SharedReader("m", directory=tmp_path)) == before + 1
        assert files(tmp_path) == 10
        return died

    assert kills(tmp_path, is_killed, size="32m") > 10


def kills(folder: Path, is_killed: Callable[[int], bool], size: str = TWO_SIDES) -> int:
    """Call a function for each fence in new memory, by day for every seventh; returns the number of fences."""

    def work() -> None:
        number = 1
        while is_killed(number):
            shutil.rmtree(layout.folder_of("m", folder))
            number += 1 if examples() > 20 else 7
        (folder.parent / "number").write_text(str(number))

    in_tmpfs(folder, f"size={size}", work)
    return int((folder.parent / "number").read_text())


def test_a_first_copy_without_room_fails_at_once_and_leaves_no_file(tmp_path: Path) -> None:
    def work() -> None:
        memory = opened(tmp_path)
        larger = TableSpec(WIDE.name, 2 * WIDE.rows, WIDE.dim)
        first = replace(release_of(1, resync=True, table=larger), rows=[], more=True)
        with pytest.raises(StorageFailed, match=r"tables, which need 4256000 bytes with both .*--shm-size"):
            memory.apply(first)
        assert files(tmp_path) == 0
        memory.apply(release_of(1, resync=True))
        with pytest.raises(StorageFailed, match="no room"):
            memory.apply(release_of(2, table=larger))
        memory.apply(release_of(2))
        assert files(tmp_path) == 10, "of two tables on two sides rows and which exist, and two indices"
        assert check(SharedReader("m", directory=tmp_path)) == 2

    in_tmpfs(tmp_path, f"size={TWO_SIDES}", work)


def test_a_mirror_refuses_tables_beyond_the_memory_of_its_control_group(
    tmp_path: Path,
) -> None:
    groups = tmp_path / "groups"
    groups.mkdir()
    (tmp_path / "other").mkdir()

    def work() -> None:
        for folder in (groups, groups / "memory"):
            folder.mkdir(exist_ok=True)
            for limit, used in (
                ("memory.max", "memory.current"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            ):
                (folder / limit).write_text(f"{64 << 20}\n")
                (folder / used).write_text(f"{40 << 20}\n")
        mount(groups, Path("/sys/fs/cgroup"))
        larger = replace(WIDE, rows=100_000)
        memory = opened(tmp_path)
        with pytest.raises(
            StorageFailed, match=r"no memory for the tables, which need \d+ .* has 67108864 bytes: raise"
        ):
            memory.apply(release_of(1, resync=True, table=larger))
        assert files(tmp_path) == 0
        memory.apply(release_of(1, resync=True))
        with pytest.raises(StorageFailed, match="no memory"):
            memory.apply(release_of(2, table=larger))
        assert check(SharedReader("m", directory=tmp_path)) == 1

    in_tmpfs(tmp_path / "other", "size=1m", work)


def test_a_mirror_that_cannot_start_leaves_no_folder(tmp_path: Path) -> None:
    def work() -> None:
        with pytest.raises(StorageFailed, match="no room"):
            opened(tmp_path)
        assert not layout.folder_of("m", tmp_path).exists()

    in_tmpfs(tmp_path, f"size={CONTROL_BYTES // 2}", work)


def test_huge_pages_are_used_where_the_file_system_has_them(tmp_path: Path) -> None:
    def work() -> None:
        table = TableSpec("wide", 64_000, 64)
        memory = SharedTarget("m", "predictors", directory=tmp_path, huge_pages=True)
        memory.apply(release_of(1, resync=True, table=table))
        mapped = re.findall(r"ShmemPmdMapped: +(\d+) kB", Path("/proc/self/smaps").read_text())
        assert sum(map(int, mapped)) * 1024 >= table.nbytes
        with pytest.raises(StorageFailed, match="no room"):
            memory.apply(release_of(2, table=TableSpec("wide", 640_000, 64)))
        assert check(SharedReader("m", directory=tmp_path)) == 1

    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if not setting.exists() or "[deny]" in setting.read_text():
        pytest.skip("needs a system with huge pages for files in memory")
    in_tmpfs(tmp_path, "size=100m,huge=advise", work)


def files(folder: Path) -> int:
    """The number of files of arrays."""
    return len(list(layout.folder_of("m", folder).iterdir())) - len(
        [layout.CONTROL, layout.WRITER, layout.READERS]
    )
