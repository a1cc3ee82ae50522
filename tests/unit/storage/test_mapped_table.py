"""A table in its files, whether these are its own or one that it shares with others."""

import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltasync.core.errors import StorageFailed
from deltasync.core.rows import RowBatch
from deltasync.core.tables import TableSpec
from deltasync.storage.mapped_table import MappedTable, TableLayout
from deltasync.storage.table_files import TableFiles, make_tables, open_tables
from deltasync.storage.unused_files import remove_unused
from deltasync.storage.volume import VolumeFailed

TABLE = TableSpec("sparse/user", 10, 4)
OTHERS = [TableSpec("before", 3, 3, np.dtype("<f2")), TableSpec("after", 7, 1)]
LARGER = TableSpec(TABLE.name, 3000, 4)

pytestmark = pytest.mark.usefixtures("shared_file")


def made(folder: Path, *tables: TableSpec) -> list[MappedTable]:
    files = make_tables(folder, [TableLayout.of(table).arrays() for table in tables])
    return [MappedTable(TableLayout.of(table), each) for table, each in zip(tables, files, strict=True)]


def written(folder: Path, table: TableSpec = TABLE) -> MappedTable:
    """One of three tables, flushed."""
    _, mapped, _ = made(folder, OTHERS[0], table, OTHERS[1])
    mapped.apply(RowBatch.of_table(table, np.array([3, 7]), np.full((2, 4), 5, table.dtype)), 2)
    mapped.flush()
    return mapped


def reopened(table: MappedTable, spec: TableSpec | None = None) -> MappedTable:
    """The table after a restart, as the log says that it is."""
    layout = replace(table.mapped.layout, spec=spec or table.spec)
    return MappedTable(layout, open_tables([(table.mapped.files.place, layout.arrays())])[0])


def on_disk(files: TableFiles, spec: TableSpec) -> list[bool]:
    """Which of a table's arrays are not all zero in its files."""
    (found,) = open_tables([(files.place, TableLayout.of(spec).arrays())])
    return [bool(array.any()) for array in found.arrays]


def room(table: MappedTable, folder: Path, spec: TableSpec = LARGER) -> Callable[[], None]:
    layout = table.layout_as(spec)
    return table.extend(layout, make_tables(folder, [layout.arrays()])[0] if table.moves(spec) else None)


def extended(table: MappedTable, folder: Path, spec: TableSpec = LARGER) -> MappedTable:
    room(table, folder, spec)()
    return table


def test_a_new_table_is_zero_whatever_lay_there(tmp_path: Path) -> None:
    """A crash before the log named the table leaves its files."""
    written(tmp_path)
    (larger,) = made(tmp_path, TableSpec(TABLE.name, 20, 4))
    assert not larger.rows.any()
    assert not larger.stamps.any()


@pytest.mark.parametrize("kind", ["rows", "stamps", "tags"])
@pytest.mark.parametrize("change", ["longer", "shorter", "missing"])
def test_a_damaged_file_is_an_error_that_says_which(
    tmp_path: Path, kind: str, change: str, shared_file: bool
) -> None:
    table = written(tmp_path)
    ((path,),) = (table.mapped.files.place.folder.glob("shared" if shared_file else f"*user*.{kind}"),)
    content = path.read_bytes()
    end = len(content) - 5 * 64 if shared_file else len(content)  # What comes after is another table's.
    if change == "missing":
        path.unlink()
    else:
        path.write_bytes(content + b"x" if change == "longer" else content[: end - 1])
    if change == "longer" and shared_file:
        reopened(table)  # It may be another table's.
        return
    said = "is missing" if change == "missing" else f"has {path.stat().st_size} bytes"
    with pytest.raises(StorageFailed) as failed:
        reopened(table)
    assert f"{path} {said}, expected {end}" in str(failed.value)
    assert path.exists() is (change != "missing")


@pytest.mark.parametrize("refused", [1, 2, 3, 4, 5])
def test_a_full_disk_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int, shared_file: bool
) -> None:
    sizes: list[int] = []

    def full(_descriptor: int, _offset: int, size: int) -> None:
        sizes.append(size)
        if len(sizes) == refused or shared_file:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(StorageFailed, match=r"cannot reserve [0-9]+ bytes: No space left on device"):
        made(tmp_path, TABLE)
    assert sizes == ([64 * 9] if shared_file else [160, 80, 20, 80, 40][:refused])
    assert not list(tmp_path.iterdir())


def test_too_few_open_files_are_named_and_with_more_it_goes_on(tmp_path: Path) -> None:
    table = written(tmp_path / "old")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needs: list[Callable[[], MappedTable]] = [lambda: reopened(table), lambda: made(tmp_path / "new", TABLE)[0]]
    for what in needs:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, most[1]))
        try:
            with pytest.raises(VolumeFailed, match=r"Too many open files .*: raise .* \(ulimit -n\), and restart"):
                what()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, most)
        assert what().spec == TABLE


@pytest.mark.parametrize("name", ["x" * 512, "ä" * 512, "\0" * 512, "../../etc/passwd", "a/b", "."])
def test_any_table_name_makes_a_file_in_the_folder(tmp_path: Path, name: str, shared_file: bool) -> None:
    folder = tmp_path / "tables"
    (table,) = made(folder, TableSpec(name, 10, 4))
    assert len(list(table.mapped.files.place.folder.iterdir())) == (1 if shared_file else 5)
    assert list(tmp_path.iterdir()) == [folder]
    assert list(folder.iterdir()) == [table.mapped.files.place.folder]


def test_alike_names_are_tables_of_their_own(tmp_path: Path) -> None:
    names = ["x" * 200 + "1", "x" * 200 + "2", "a/b", "a%2Fb", "User", "user"]
    tables = made(tmp_path, *(TableSpec(name, 10, 4) for name in names))
    for number, table in enumerate(tables, start=1):
        table.apply(RowBatch.of_table(table.spec, np.arange(10), np.full((10, 4), number, np.float32)), number)
        table.flush()
    backs = open_tables([(table.mapped.files.place, TableLayout.of(table.spec).arrays()) for table in tables])
    for number, (files, table) in enumerate(zip(backs, tables, strict=True), start=1):
        assert [np.unique(array).tolist() for array in files.arrays[:2]] == [[number], [number]]
        np.testing.assert_array_equal(files.arrays[3], table.digests)


def test_many_small_tables_take_one_file_and_one_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltasync.storage.table_files.SMALL_BYTES", 1000)
    before = len(os.listdir("/proc/self/fd"))
    tables = made(tmp_path, *(TableSpec(str(number), 10 + 990 * (number == 7), 4) for number in range(50)))
    assert len({mapping for table in tables for mapping in table.mapped.files.mappings}) == 1 + 5, (
        "one table is large"
    )
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1 + 5
    assert len(os.listdir("/proc/self/fd")) == before
    assert [table.mapped.files.place.offset is None for table in tables] == [number == 7 for number in range(50)]


def test_room_that_nobody_has_written_down_is_given_back(tmp_path: Path, shared_file: bool) -> None:
    """The process ended after it had made room, and before the log said so."""
    table = written(tmp_path)
    room(table, tmp_path)
    back = reopened(table, TABLE)
    assert back.changed_since(0).tolist() == [3, 7]
    remove_unused(tmp_path, [back.mapped.files])
    assert list(tmp_path.iterdir()) == [table.mapped.files.place.folder]
    if not shared_file:
        sizes = [path.stat().st_size for path in table.mapped.files.place.folder.glob("*user*")]
        assert sorted(sizes) == [10 * 2, 10 * 4, 10 * 8, 10 * 8, 10 * 4 * 4]


def test_what_a_table_has_left_in_a_shared_file_is_cleared(tmp_path: Path, shared_file: bool) -> None:
    """A row that is deleted later must be nowhere."""
    first, table, last = made(tmp_path, OTHERS[0], TABLE, OTHERS[1])
    for each in (first, table, last):
        each.apply(RowBatch.of_table(each.spec, np.arange(3), np.full((3, each.spec.dim), 5, each.spec.dtype)), 2)
        each.flush()
    before = table.mapped.files
    extended(table, tmp_path)
    if not shared_file:
        assert table.mapped.files.place == before.place
        return
    for kept in ([first, last], [last]):
        remove_unused(tmp_path, [each.mapped.files for each in (*kept, table, *kept)])
        assert not any(on_disk(before, TABLE))
        assert table.changed_since(0).tolist() == [0, 1, 2]
        for each in (first, last):
            assert on_disk(each.mapped.files, each.spec) == [each in kept] * 5
    remove_unused(tmp_path, [table.mapped.files])
    assert list(tmp_path.iterdir()) == [table.mapped.files.place.folder]


@pytest.mark.parametrize("kind", ["rows", "stamps"])
def test_more_than_room_is_damage(tmp_path: Path, kind: str, shared_file: bool) -> None:
    if shared_file:
        pytest.skip("of a shared file, what comes after is another table's")
    table = extended(written(tmp_path), tmp_path)
    table.apply(RowBatch.of_table(LARGER, np.array([2999]), np.ones((1, 4), np.float32)), 3)
    table.flush()
    other = {"rows": "stamps", "stamps": "rows"}[kind]
    (path,) = table.mapped.files.place.folder.glob(f"*user*.{other}")
    with path.open("r+b") as file:
        file.truncate({"rows": 160, "stamps": 80}[other])
    with pytest.raises(StorageFailed, match=rf"\.{kind} has [0-9]+ bytes, expected"):
        reopened(table, TABLE)


@pytest.mark.parametrize("refused", [1, 2, 3, 4, 5])
def test_no_room_to_grow_is_an_error_and_the_table_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int, shared_file: bool
) -> None:
    table, reserved, calls = written(tmp_path), os.posix_fallocate, []

    def full(descriptor: int, offset: int, size: int) -> None:
        calls.append(size)
        reserved(descriptor, offset, size)  # A part of it may be there.
        if len(calls) == refused or shared_file:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(StorageFailed, match="No space left on device"):
            extended(table, tmp_path)
    assert len(calls) == (1 if shared_file else refused)
    table.apply(RowBatch.of_table(TABLE, np.array([9]), np.ones((1, 4), np.float32)), 3)
    table.flush()
    assert extended(table, tmp_path).changed_since(0).tolist() == [3, 7, 9]
    table.flush()
    assert reopened(table).changed_since(2).tolist() == [9]


def test_a_table_that_is_split_while_room_is_made_has_digests_that_fit(tmp_path: Path) -> None:
    table = written(tmp_path)
    become = room(table, tmp_path)
    table.split(2)
    table.apply(RowBatch.of_table(TABLE, np.array([9]), np.ones((1, 4), np.float32)), 3)
    table.rows.view(np.uint8)[7, 0] ^= 1  # Damage, which it must not be taken for.
    checksum, norm = table.checksum, table.norm
    become()
    assert np.flatnonzero(~table.fits(np.arange(3000), table.rows)).tolist() == [7]
    assert table.checksum == checksum
    assert table.norm == pytest.approx(norm)
    assert table.changed_since(0).tolist() == [3, 7, 9]


def test_files_that_the_log_names_stay_while_a_table_is_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush may end in the middle of it, or of room being made."""
    table = written(tmp_path)
    table.split(2)
    digest, named, become = MappedTable._digest, table.mapped, room(table, tmp_path)

    def digesting(*arguments: Any) -> None:
        table.remove_stale(named)
        digest(*arguments)

    monkeypatch.setattr(MappedTable, "_digest", digesting)
    table.split(1)
    monkeypatch.undo()
    table.remove_stale(named)
    assert all(Path(mapping.name).exists() for mapping in named.files.mappings)
    become()
    table.remove_stale(table.mapped)
    table.flush()
    assert reopened(table).digests.tolist() == table.digests.tolist()


def test_a_split_that_fails_is_made_when_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = written(tmp_path)
    before = table.mapped

    def full(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(MappedTable, "_digest", full)
        with pytest.raises(MemoryError):
            table.split(2)
    table.split(4)
    assert (table.columns, table.mapped) == ((0, 4), before)
    table.apply(RowBatch.of_table(TABLE, np.array([9]), np.ones((1, 4), np.float32)), 3)
    table.flush()
    assert reopened(table).changed_since(0).tolist() == [3, 7, 9]
    table.split(2)
    assert table.columns == table.mapped.layout.columns == (0, 2, 4)
    assert table.fits(np.arange(10), table.rows).all()


def test_what_a_split_table_had_in_a_shared_file_stays_while_the_log_names_it(tmp_path: Path) -> None:
    tables = made(tmp_path, TABLE, OTHERS[1])
    tables[0].apply(RowBatch.of_table(TABLE, np.array([3]), np.ones((1, 4), np.float32)), 1)
    before, kept = tables[0].mapped, tables[0].digests.tolist()
    tables[0].split(2)
    remove_unused(tmp_path, [before.files, *(table.mapped.files for table in tables)])
    assert before.plain()[3].tolist() == kept
