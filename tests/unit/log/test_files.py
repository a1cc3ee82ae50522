"""Files and folders outlive a loss of power: whatever is made is flushed, by name too, before it is used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.mortal_place import PowerCuts

from deltasync.base.errors import StorageFailed
from deltasync.base.files import make_folder
from deltasync.log.data_directory import lock_data_directory
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], list[str]]:
    """What a folder, once flushed, would have after a loss of power: its entries at its last flush."""
    cuts = PowerCuts(monkeypatch, tmp_path)
    return lambda path: sorted(cuts.images[-1][path])


def check_all_flushed(root: Path, flushed: Callable[[Path], list[str]]) -> None:
    """Every folder below this one was flushed once it had all that it has."""
    for folder in (root, *(each for each in root.rglob("*") if each.is_dir())):
        assert flushed(folder) == sorted(each.name for each in folder.iterdir()), folder


def test_a_folder_is_flushed_in_each_that_had_to_be_made(tmp_path: Path, flushed: Callable[[Path], Any]) -> None:
    make_folder(tmp_path / "a" / "b" / "c")
    assert flushed(tmp_path) == ["a"]
    assert flushed(tmp_path / "a") == ["b"]
    assert flushed(tmp_path / "a" / "b") == ["c"]
    make_folder(tmp_path / "a" / "b" / "c")


def test_what_is_no_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=r"File exists|Not a directory"):
            make_folder(path)


def test_a_new_log_is_flushed_in_its_folder(tmp_path: Path, flushed: Callable[[Path], Any]) -> None:
    LmdbStore(LogOptions(directory=tmp_path / "data" / "log", max_bytes=1 << 20)).close()
    check_all_flushed(tmp_path, flushed)


def test_a_data_directory_that_cannot_be_used_is_an_error_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(
        StorageFailed, match=r"cannot be written to: Is a directory .*: move away the folder of that name"
    ):
        lock_data_directory(tmp_path)
    (tmp_path / "lock").rmdir()

    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("deltasync.log.data_directory.fcntl.flock", no_locks)
    with pytest.raises(
        StorageFailed, match="cannot be locked: No locks available: choose a --data-dir on a local"
    ):
        lock_data_directory(tmp_path)
