"""Room for tables: looked for before it is taken, so that the log has its own whatever is tried."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.volumes import small_volume

from deltasync.core.errors import StorageFailed
from deltasync.core.tables import TableSpec
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_store import LogOptions
from deltasync.storage.mapped_table import TableLayout
from deltasync.storage.model_records import recorded_models
from deltasync.storage.model_store import ModelStore
from deltasync.storage.table_room import TableRoom, VolumeRoom, room_for

MIB = 1 << 20
SIZES = st.integers(0, 1 << 45)


@given(SIZES, SIZES, SIZES, SIZES)
def test_what_is_taken_leaves_the_log_its_share(wanted: int, free: int, total: int, taking: int) -> None:
    decision = room_for(wanted, VolumeRoom(free, total), taking)
    kept = min(1 << 30, total // 16)
    assert decision.yes == (free - wanted - taking >= kept)
    assert f"{wanted} bytes are wanted, and {free} are free" in decision.reason


def test_two_who_take_room_at_once_are_not_promised_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VolumeRoom, "of", lambda _: VolumeRoom(100 * MIB, 160 * MIB))
    room = TableRoom()
    with room.taking("one", tmp_path, 60 * MIB):
        room.check("another", tmp_path, 30 * MIB)
        with (
            pytest.raises(StorageFailed, match=f"no room for another: .* and {60 * MIB} are being taken"),
            room.taking("another", tmp_path, 31 * MIB),
        ):
            pass
    with room.taking("another", tmp_path, 90 * MIB):
        pass


def test_a_table_that_finds_no_room_takes_none_while_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all of the volume is gone until the system says no, and the log with it."""
    reserve, least = os.posix_fallocate, list[int]()
    with small_volume(32 * MIB) as volume:

        def watched(descriptor: int, offset: int, size: int) -> None:
            reserve(descriptor, offset, size)
            least.append(VolumeRoom.of(volume).free)

        log = LmdbStore(LogOptions(directory=volume / "log", max_bytes=4 * MIB))
        store, before = ModelStore(log, "m", volume / "m"), VolumeRoom.of(volume)
        monkeypatch.setattr(os, "posix_fallocate", watched)
        for rows in (1 << 40, 150_000):
            table = TableSpec("t", rows, 64)
            wanted = TableLayout.of(table).nbytes
            with pytest.raises(StorageFailed, match=f"'m': {wanted} bytes are wanted, and {before.free} are free"):
                store.change([table], {})
        assert least == []
        assert VolumeRoom.of(volume).free == before.free
        assert not (volume / "m").exists()
        store.change([TableSpec("t", 90_000, 64)], {})
        assert min(least) >= before.total // 16
        with pytest.raises(StorageFailed, match="bytes are wanted"):
            store.change([TableSpec("t", 120_000, 64)], {"t": 90_000})
        assert store.tables[0].spec.rows == 90_000
        log.close()


def test_of_a_table_that_was_never_published_another_may_come(tmp_path: Path) -> None:
    """Of a cut that was not sealed."""
    log: Any = LmdbStore(LogOptions(directory=tmp_path / "log", max_bytes=4 * MIB))
    store = ModelStore(log, "m", tmp_path / "m")
    store.change([TableSpec("t", 10, 4), TableSpec("other", 3, 2)], {})
    old, before = store.tables[0], store.table_bytes
    assert before == store.added_bytes([TableSpec("new", 10, 4), TableSpec("newer", 3, 2)], {})
    steps = store.change([TableSpec("t", 5, 2)], {"other": 3})
    assert steps == []
    assert old.removed
    assert {each.spec.name: (each.spec.rows, each.spec.dim) for each in store.tables} == {
        "t": (5, 2),
        "other": (3, 2),
    }
    store.remove_unused()
    again = ModelStore(log, "m", tmp_path / "m")
    again.recover(recorded_models(log)["m"])
    assert [each.spec for each in again.tables] == [TableSpec("t", 5, 2), TableSpec("other", 3, 2)]
    assert again.table_bytes == store.table_bytes < before
    log.close()
