"""Views that come back after a crash: as of the last flush, and the log after it."""

from collections.abc import Sequence
from concurrent.futures import Future

import pytest
from tests.support.damage import change_value
from tests.support.local_model import LocalModel
from tests.support.view_scenarios import (
    ITEM,
    TOP,
    USER,
    changed,
    held_by_a_replica,
    is_due,
    refuse,
    same_as_the_model,
)
from tests.unit.views.models import Models

from deltasync.core.errors import StorageFailed
from deltasync.core.policy import Policy
from deltasync.core.value_types import ValueType
from deltasync.storage.lmdb_records import key_of
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.views.records import heads_stream
from deltasync.views.store import NewestRelease, ViewStore


@pytest.mark.parametrize("flushed", [False, True])
async def test_a_restart_takes_no_replica_back(local: LocalModel, models: Models, flushed: bool) -> None:
    """The releases since the last flush are known again, and what was left by them is looked for from that on."""
    narrow, wide = Policy(tables=("user",), top_k=1), Policy(top_k=1)
    view = await local.prepared_view(narrow)
    view.flush()
    await local.cut(changed(1, USER, 3, 4, 5))
    await view.make_release(narrow, 0)
    assert view.version_of(view.position.number) == 2
    if flushed:
        view.flush()
    local = await models.open()
    view = local.view()
    assert view.version_of(view.position.number) == 2
    assert is_due(view, wide)
    await view.prepare(wide)
    assert view.version_of(view.position.number) == 2
    assert is_due(view, wide)
    await view.make_release(Policy(), 0)
    assert same_as_the_model(await held_by_a_replica(view), local)


async def test_files_that_a_crash_left_behind_are_removed(local: LocalModel, models: Models) -> None:
    await local.prepared_view(TOP)
    (local.view_directory / "0123456789abcdef0123456789abcdef").mkdir()
    local = await models.open()
    view = local.view()
    assert {table.files.place.folder.name for table in view.state.tables} == {
        each.name for each in local.view_directory.iterdir()
    }


async def test_records_before_a_restart_count_towards_the_next_flush(local: LocalModel, models: Models) -> None:
    """Else the log would grow with every restart."""
    view = await local.prepared_view(TOP)
    assert not view.should_flush(1)
    await local.cut(changed(1, USER, 3))
    await view.make_release(TOP, 0)
    size = next(size for size in range(1, 1000) if not view.should_flush(size + 1))
    assert size > 24
    local = await models.open()
    view = local.view()
    assert view.should_flush(size)
    view.flush()
    assert not view.should_flush(1)
    assert not list(local.log.read("releases/top"))


async def test_a_flush_in_the_middle_of_a_release_loses_nothing(
    local: LocalModel, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the release may be in the files, while the log is cut behind the release before it."""
    view = await local.prepared_view(TOP)
    await local.cut(changed(1, USER, 3))
    await view.make_release(TOP, 0)
    await local.cut(changed(1, USER, 4, 5))
    write_release = ViewStore.write_release

    def write_and_flush(store: ViewStore, release: NewestRelease, after: Sequence[Future[None]]) -> None:
        write_release(store, release, after)
        store.flush()

    monkeypatch.setattr(ViewStore, "write_release", write_and_flush)
    await view.make_release(Policy(), 0)
    assert [record.number for record in local.log.read("releases/top")] == [view.position.number]
    local = await models.open()
    assert same_as_the_model(await held_by_a_replica(local.view()), local)


async def test_what_the_log_has_of_a_release_that_broke_off_is_not_taken_for_rows_of_the_next(
    local: LocalModel, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else replicas that have that number would never get these rows."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    view = await local.prepared_view(TOP)
    await local.cut(changed(1, USER, 4) | changed(1, ITEM, 4))
    with monkeypatch.context() as patch:
        patch.setattr("deltasync.views.release_log._failure_of", broken)
        with pytest.raises(ZeroDivisionError):
            await view.make_release(Policy(), 0)
    await view.make_release(TOP, 0)
    position, given = view.position, await held_by_a_replica(view)
    local = await models.open()
    view = local.view()
    held = await held_by_a_replica(view)
    assert view.position == position
    assert {name: rows.tobytes() for name, rows in held.items()} == {
        name: rows.tobytes() for name, rows in given.items()
    }


async def test_tables_that_are_written_down_are_kept_though_the_log_could_not_be_cut(
    local: LocalModel, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = await local.prepared_view(TOP)
    with monkeypatch.context() as patch:
        patch.setattr(LmdbStore, "truncate", refuse)
        with pytest.raises(StorageFailed):
            await view.prepare(Policy(top_k=1, value_type=ValueType.INT8))
    assert view.deliveries[0].value_type is ValueType.INT8
    local = await models.open()
    assert local.view().deliveries[0].value_type is ValueType.INT8


async def test_a_damaged_record_is_an_error(local: LocalModel, models: Models) -> None:
    view = await local.prepared_view(TOP)
    await local.cut(changed(1, USER, 4))
    await view.make_release(TOP, 0)
    (record,) = local.log.read("releases/top")
    await models.close()
    change_value(models.folder / "log", "records", key_of("releases/top", record.number, 0, 0), bit=-1)
    local = await models.open()
    said = f"record 0 of table 0 of release {record.number} of consumer 'top' is damaged"
    with pytest.raises(StorageFailed, match=said):
        local.view()


async def test_the_newest_release_and_what_it_took_are_known_again(local: LocalModel, models: Models) -> None:
    view = await local.prepared_view(TOP)
    await local.cut(changed(1, USER, 3, 4, 5))
    await view.make_release(TOP, 0)
    newest = view.state.newest
    local = await models.open()
    state = local.view().state
    assert state.newest == newest
    assert (state.newest is not None, state.backlog_rows) == (True, 2)


async def test_many_small_releases_are_flushed(local: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("store", "history"):
        monkeypatch.setattr(f"deltasync.views.{module}.KEPT_HEADS", 6)
    view = await local.prepared_view(TOP)
    for seed in range(6):
        assert view.should_flush(1 << 30) is (seed == 3)
        if seed == 3:
            view.flush()
            assert not view.should_flush(1 << 30)
        await local.cut(changed(seed + 1, USER, seed))
        await view.make_release(TOP, 0)
    assert view.should_flush(1 << 30)
    view.flush()
    assert len(list(local.log.read(heads_stream("top")))) == 6
