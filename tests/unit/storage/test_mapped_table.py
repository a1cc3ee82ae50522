import os
from pathlib import Path

import numpy as np
import pytest

from deltasync.core.errors import StorageFailed
from deltasync.core.rows import RowBatch
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import TableSpec
from deltasync.storage.mapped_table import MappedTable

TABLE = TableSpec("sparse/user", 10, 4)
FILES = ["rows", "stamps", "digests", "squares"]


def written(folder: Path, table: TableSpec = TABLE) -> MappedTable:
    mapped = MappedTable(table, folder, new=True)
    mapped.apply(RowBatch.of_table(table, np.array([3, 7]), np.full((2, 4), 5, table.dtype)), 2)
    return mapped


def test_a_table_comes_back(tmp_path: Path) -> None:
    written(tmp_path).flush()
    back = MappedTable(TABLE, tmp_path, new=False)
    assert back.changed_since(0).tolist() == [3, 7]
    assert back.rows.sum() == 2 * 4 * 5
    assert (back.rows.dtype, back.rows.shape) == (TABLE.dtype, (10, 4))


def test_rows_are_on_their_way_to_the_file_before_a_flush(tmp_path: Path) -> None:
    """So that kill -9 loses nothing."""
    written(tmp_path)
    assert MappedTable(TABLE, tmp_path, new=False).changed_since(0).tolist() == [3, 7]


def test_a_new_table_is_zero_whatever_lay_there(tmp_path: Path) -> None:
    """A crash before the log named the table leaves its files."""
    written(tmp_path)
    larger = MappedTable(TableSpec(TABLE.name, 20, 4), tmp_path, new=True)
    assert not larger.rows.any()
    assert not larger.stamps.any()


@pytest.mark.parametrize("kind", ["rows", "stamps"])
@pytest.mark.parametrize("change", ["longer", "shorter", "missing"])
def test_a_damaged_file_is_an_error_that_says_which(tmp_path: Path, kind: str, change: str) -> None:
    written(tmp_path)
    (path,) = tmp_path.glob(f"*.{kind}")
    content = path.read_bytes()
    if change == "missing":
        path.unlink()
    else:
        path.write_bytes(content + b"x" if change == "longer" else content[:-1])
    said = "is missing" if change == "missing" else f"has {path.stat().st_size} bytes"
    with pytest.raises(StorageFailed) as failed:
        MappedTable(TABLE, tmp_path, new=False)
    assert f"{path} {said}, expected {len(content)} bytes" in str(failed.value)
    assert path.exists() is (change != "missing")


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int, _offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(StorageFailed, match="cannot reserve 160 bytes: No space left on device"):
        MappedTable(TABLE, tmp_path, new=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["x" * 512, "ä" * 512, "\0" * 512, "../../etc/passwd", "a/b", "."])
def test_any_table_name_makes_a_file_in_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "tables"
    folder.mkdir()
    written(folder, TableSpec(name, 10, 4))
    assert len(list(folder.iterdir())) == len(FILES)
    assert list(tmp_path.iterdir()) == [folder]


def test_alike_names_are_tables_of_their_own(tmp_path: Path) -> None:
    names = ["x" * 200 + "1", "x" * 200 + "2", "a/b", "a%2Fb", "User", "user"]
    for name in names:
        written(tmp_path, TableSpec(name, 10, 4))
    assert len({path.name.lower() for path in tmp_path.iterdir()}) == len(FILES) * len(names)


LARGER = TableSpec(TABLE.name, 3000, 4)


def extended(table: MappedTable, folder: Path, spec: TableSpec = LARGER) -> MappedTable:
    table.extend(spec)()
    return table


def test_a_table_that_has_grown_keeps_its_rows_and_stamps(tmp_path: Path) -> None:
    table, plain = written(tmp_path), StampedTable.zeros(LARGER)
    plain.apply(RowBatch.of_table(LARGER, np.array([3, 7]), np.full((2, 4), 5, np.float32)), 2)
    extended(table, tmp_path)
    for number, ids in ((3, [7, 10, 2999]), (5, [0, 1500])):
        rows = RowBatch.of_table(LARGER, np.array(ids), np.full((len(ids), 4), number, np.float32))
        table.apply(rows, number)
        plain.apply(rows, number)
    back = MappedTable(LARGER, tmp_path, new=False)
    for each in (table, back):
        assert each.spec == LARGER
        np.testing.assert_array_equal(each.rows, plain.rows)
        np.testing.assert_array_equal(each.stamps, plain.stamps)
        assert each.checksum == plain.checksum
        assert [each.counts.after(number) for number in range(7)] == [plain.counts.after(n) for n in range(7)]
        assert each.counts.rows == 3000


def test_a_table_is_flushed_whole_once_it_has_grown(tmp_path: Path) -> None:
    table = extended(written(tmp_path), tmp_path)
    table.apply(RowBatch.of_table(LARGER, np.array([2999]), np.ones((1, 4), np.float32)), 3)
    table.flush()
    assert {name: len(array) for name, array in table._mapped.items()} == dict.fromkeys(FILES, 3000)


def test_room_that_nobody_has_written_down_is_given_back(tmp_path: Path) -> None:
    """The process ended after it had made room, and before the log said so."""
    written(tmp_path).extend(LARGER)
    assert MappedTable(TABLE, tmp_path, new=False).changed_since(0).tolist() == [3, 7]
    assert sorted(path.stat().st_size for path in tmp_path.iterdir()) == [10 * 4, 10 * 8, 10 * 8, 10 * 4 * 4]


@pytest.mark.parametrize("kind", ["rows", "stamps"])
def test_more_than_room_is_damage(tmp_path: Path, kind: str) -> None:
    table = extended(written(tmp_path), tmp_path)
    table.apply(RowBatch.of_table(LARGER, np.array([2999]), np.ones((1, 4), np.float32)), 3)
    other = {"rows": "stamps", "stamps": "rows"}[kind]
    (path,) = tmp_path.glob(f"*.{other}")
    with path.open("r+b") as file:
        file.truncate({"rows": 160, "stamps": 80}[other])
    with pytest.raises(StorageFailed, match=rf"\.{kind} has [0-9]+ bytes, expected"):
        MappedTable(TABLE, tmp_path, new=False)


@pytest.mark.parametrize("refused", [1, 2, 3, 4])
def test_no_room_to_grow_is_an_error_and_the_table_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    table, reserved, calls = written(tmp_path), os.posix_fallocate, []

    def full(descriptor: int, offset: int, size: int) -> None:
        calls.append(size)
        reserved(descriptor, offset, size)  # A part of it may be there.
        if len(calls) == refused:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(StorageFailed, match="No space left on device"):
            table.extend(LARGER)
    assert len(calls) == refused
    table.apply(RowBatch.of_table(TABLE, np.array([9]), np.ones((1, 4), np.float32)), 3)
    table.flush()
    assert extended(table, tmp_path).changed_since(0).tolist() == [3, 7, 9]
    assert MappedTable(LARGER, tmp_path, new=False).changed_since(2).tolist() == [9]
