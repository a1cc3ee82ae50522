from pathlib import Path

import numpy as np
import pytest

from deltasync.core.errors import StorageFailed
from deltasync.core.rows import RowBatch
from deltasync.core.tables import TableSpec
from deltasync.storage.mapped_table import MappedTable

TABLE = TableSpec("sparse/user", 10, 4)


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
    assert len(list(folder.iterdir())) == 2
    assert list(tmp_path.iterdir()) == [folder]


def test_alike_names_are_tables_of_their_own(tmp_path: Path) -> None:
    names = ["x" * 200 + "1", "x" * 200 + "2", "a/b", "a%2Fb", "User", "user"]
    for name in names:
        written(tmp_path, TableSpec(name, 10, 4))
    assert len({path.name.lower() for path in tmp_path.iterdir()}) == 2 * len(names)
