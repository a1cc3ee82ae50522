"""What a later version has written is refused with both numbers."""

import json
from pathlib import Path

import pytest

from deltasync.client.keyed.redis_layout import Meta
from deltasync.core.errors import Contradiction, InvalidInput, StorageFailed
from deltasync.service.restore import restore
from deltasync.service.stored_state import check_data_directory
from deltasync.snapshots.manifest import unpack_manifest
from deltasync.storage.data_directory import BACKUP_MARKER
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_store import LogOptions

NEWER = json.dumps({"format": 2, "elsewhere": {}}).encode()


def test_a_snapshot() -> None:
    with pytest.raises(StorageFailed, match="snapshot s is of format 2, this version reads 1: update"):
        unpack_manifest("s", NEWER)


def test_a_backup(tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    marker = tmp_path / "backup" / BACKUP_MARKER
    marker.write_bytes(NEWER)
    with pytest.raises(StorageFailed, match=f"^{marker} is of format 2, this version reads 1: update deltasync$"):
        restore(tmp_path / "backup", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_data_directory_that_is_checked(tmp_path: Path) -> None:
    """A start on one is refused likewise, see `test_damage`."""
    log = LmdbStore(LogOptions(directory=tmp_path / "log"))
    log.put("format", b"2").result(20)
    log.close()
    with pytest.raises(InvalidInput, match=f"^{tmp_path} is of format 2, this version reads 1: update deltasync$"):
        check_data_directory(tmp_path)


def test_rows_in_a_server() -> None:
    with pytest.raises(Contradiction, match="of format '2', this version of deltasync writes and reads 1: update"):
        Meta.of_fields({b"format": b"2"}, "server")
