"""Views that come back after a crash: as of the last flush, and the log after it."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
from tests.support.damage import change_value
from tests.support.local_model import LocalModel
from tests.support.releases import live_rows
from tests.support.view_scenarios import (
    ITEM,
    TOP,
    USER,
    changed,
    held_by_a_replica,
    is_due,
    refuse,
    run,
    run_again,
    same_as_the_model,
)

from deltasync.core.errors import StorageFailed
from deltasync.core.mode import Mode
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.rows import Values
from deltasync.core.value_types import ValueType
from deltasync.storage.lmdb_records import key_of
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.views.store import NewestRelease, ViewStore


def test_what_was_left_is_not_forgotten_when_tables_are_added_after_a_restart(tmp_path: Path) -> None:
    narrow, wide = Policy(tables=("user",), top_k=1), Policy(top_k=1)

    async def before(local: LocalModel) -> None:
        view = await local.prepared_view(narrow)
        await local.cut(changed(1, USER, 3, 4, 5))
        await view.make_release(narrow, 0)
        view.flush()

    async def after(local: LocalModel) -> None:
        view = local.view()
        assert is_due(view, wide)
        await view.prepare(wide)
        assert is_due(view, wide)

    run(tmp_path, before)
    run_again(tmp_path, after)


def test_neither_a_restart_nor_a_table_that_is_added_then_takes_replicas_back(tmp_path: Path) -> None:
    """The releases since the last flush are known again, and what was left by them is looked for from that on."""
    narrow, wide = Policy(tables=("user",), top_k=1), Policy(top_k=1)

    async def before(local: LocalModel) -> None:
        view = await local.prepared_view(narrow)
        view.flush()
        await local.cut(changed(1, USER, 3, 4, 5))
        await view.make_release(narrow, 0)
        assert view.version_of(view.position.number) == 2

    async def after(local: LocalModel) -> None:
        view = local.view()
        assert view.version_of(view.position.number) == 2
        await view.prepare(wide)
        assert view.version_of(view.position.number) == 2
        assert is_due(view, wide)
        await view.make_release(Policy(), 0)
        assert same_as_the_model(await held_by_a_replica(view), local)

    run(tmp_path, before)
    run_again(tmp_path, after)


def test_files_that_a_crash_left_behind_are_removed(tmp_path: Path) -> None:
    async def before(local: LocalModel) -> None:
        await local.prepared_view(TOP)
        (local.view_directory / "0123456789abcdef0123456789abcdef").mkdir()

    async def after(local: LocalModel) -> None:
        view = local.view()
        assert {table.files.place.folder.name for table in view.state.tables} == {
            each.name for each in local.view_directory.iterdir()
        }

    run(tmp_path, before)
    run_again(tmp_path, after)


def test_records_from_before_a_restart_count_towards_the_next_flush(tmp_path: Path) -> None:
    """Else the log would grow with every restart."""
    sizes: list[int] = []

    async def before(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        assert not view.should_flush(1)
        await local.cut(changed(1, USER, 3))
        await view.make_release(TOP, 0)
        sizes.append(next(size for size in range(1, 1000) if not view.should_flush(size + 1)))

    async def after(local: LocalModel) -> None:
        view = local.view()
        assert view.should_flush(sizes[0])
        view.flush()
        assert not view.should_flush(1)
        assert not list(local.log.read("releases/top"))

    run(tmp_path, before)
    assert sizes[0] > 24
    run_again(tmp_path, after)


def test_a_flush_in_the_middle_of_a_release_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the release may be in the files, while the log is cut behind the release before it."""

    async def before(local: LocalModel) -> None:
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

    async def after(local: LocalModel) -> None:
        assert same_as_the_model(await held_by_a_replica(local.view()), local)

    run(tmp_path, before)
    run_again(tmp_path, after)


def test_a_release_that_a_crash_cut_short_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are in the log, and that it was made is not: nobody was given it, and some may be missing."""
    held: list[Position] = []

    async def before(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        held.append(view.position)
        await local.cut(changed(1, USER, 4, 5))
        monkeypatch.setattr(ViewStore, "write_release", refuse)
        with pytest.raises(StorageFailed):
            await view.make_release(Policy(), 0)
        monkeypatch.undo()

    async def after(local: LocalModel) -> None:
        view = local.view()
        assert view.position == held[0]
        assert not list(local.log.read("releases/top"))
        await view.make_release(Policy(), 0)
        decision, position = view.resume(held[0])
        assert decision.yes
        assert view.position.number > position.number
        release = await view.release(position.number)
        assert [rows.ids.tolist() for rows in live_rows(release).values()] == [[4, 5]]

    run(tmp_path, before)
    run_again(tmp_path, after)


def test_what_the_log_has_of_a_release_that_broke_off_is_not_taken_for_rows_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else replicas that have that number would never get these rows."""
    given: list[tuple[Position, dict[str, Values]]] = []

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    async def before(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        await local.cut(changed(1, USER, 4) | changed(1, ITEM, 4))
        with monkeypatch.context() as patch:
            patch.setattr("deltasync.views.release_log._failure_of", broken)
            with pytest.raises(ZeroDivisionError):
                await view.make_release(Policy(), 0)
        await view.make_release(TOP, 0)
        given.append((view.position, await held_by_a_replica(view)))

    async def after(local: LocalModel) -> None:
        view = local.view()
        held = await held_by_a_replica(view)
        assert view.position == given[0][0]
        assert {name: rows.tobytes() for name, rows in held.items()} == {
            name: rows.tobytes() for name, rows in given[0][1].items()
        }

    run(tmp_path, before)
    run_again(tmp_path, after)


def test_tables_that_are_written_down_are_kept_though_the_log_could_not_be_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def before(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        with monkeypatch.context() as patch:
            patch.setattr(LmdbStore, "truncate", refuse)
            with pytest.raises(StorageFailed):
                await view.prepare(Policy(top_k=1, value_type=ValueType.INT8))
        assert view.deliveries[0].value_type is ValueType.INT8

    async def after(local: LocalModel) -> None:
        assert local.view().deliveries[0].value_type is ValueType.INT8

    run(tmp_path, before)
    run_again(tmp_path, after)


def test_an_ids_view_comes_back_with_its_norms(tmp_path: Path) -> None:
    norms: list[Values] = []
    ids = Policy(mode=Mode.IDS)

    async def before(local: LocalModel) -> None:
        view = await local.prepared_view(ids)
        await local.cut(changed(1, USER, 4, 5))
        await view.make_release(ids, 0)
        norms.append(live_rows(await view.release(1))[0].values.copy())

    async def after(local: LocalModel) -> None:
        release = await local.view().release(1)
        assert live_rows(release)[0].values.tobytes() == norms[0].tobytes()
        assert norms[0].min() > 0

    run(tmp_path, before)
    run_again(tmp_path, after)


def test_a_damaged_record_is_an_error(tmp_path: Path) -> None:
    number: list[int] = []

    async def before(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        await local.cut(changed(1, USER, 4))
        await view.make_release(TOP, 0)
        (record,) = local.log.read("releases/top")
        number.append(record.number)

    async def after(local: LocalModel) -> None:
        with pytest.raises(
            StorageFailed, match=f"record 0 of table 0 of release {number[0]} of consumer 'top' is damaged"
        ):
            local.view()

    run(tmp_path, before)
    change_value(tmp_path / "log", "records", key_of("releases/top", number[0], 0, 0), bit=-1)
    run_again(tmp_path, after)


def test_the_newest_release_and_what_it_took_are_known_again(tmp_path: Path) -> None:
    newest: list[NewestRelease | None] = []

    async def before(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        await local.cut(changed(1, USER, 3, 4, 5))
        await view.make_release(TOP, 0)
        newest.append(view.state.newest)

    async def after(local: LocalModel) -> None:
        state = local.view().state
        assert state.newest == newest[0]
        assert (state.newest is not None, state.backlog_rows) == (True, 2)

    run(tmp_path, before)
    run_again(tmp_path, after)


def test_small_releases_are_flushed_before_the_log_has_more_heads_than_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasync.views.store.KEPT_HEADS", 6)

    async def scenario(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        assert view.state.head
        flushed, seed = view.state.head.number, 0
        while not view.should_flush(1 << 30):
            assert view.position.number < flushed + 3
            seed += 1
            await local.cut(changed(seed, USER, seed))
            await view.make_release(TOP, 0)
        assert view.position.number == flushed + 3
        view.flush()
        assert not view.should_flush(1 << 30)

    run(tmp_path, scenario)
