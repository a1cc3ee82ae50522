"""Views: what goes wrong, and what must hold all the same."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from tests.support.local_model import LocalModel
from tests.support.releases import live_rows
from tests.support.view_scenarios import (
    ITEM,
    TABLES,
    TOP,
    USER,
    changed,
    held_by_a_replica,
    is_due,
    refuse,
    run,
    same_as_the_model,
)
from tests.support.wire import random_rows

from deltasync.consumers.consumer import Consumer, Replica
from deltasync.core.errors import StorageFailed
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.tables import TableSpec
from deltasync.core.value_types import ValueType
from deltasync.feeds.statistics import Amount
from deltasync.status.lag import ConsumerLag
from deltasync.status.report import report
from deltasync.views.release_draft import ReleaseDraft
from deltasync.views.store import ViewState, ViewStore
from deltasync.views.view import View


def test_rows_that_went_back_are_not_left_any_more(tmp_path: Path) -> None:
    """Else a release would be due, again and again, that gives nothing."""

    async def scenario(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        await local.cut(changed(1, USER, 3, 4, 5))
        await view.make_release(TOP, 0)
        assert view.state.backlog_rows == 2
        await local.cut(changed(0, USER, 3, 4, 5))
        await view.make_release(TOP, 0)
        assert view.state.backlog_rows == 0  # The one that had gone out has gone back.
        await local.cut(changed(1, USER, 6, 7))
        await view.make_release(TOP, 0)
        await local.cut(changed(0, USER, 6, 7))
        await view.make_release(TOP, 0)
        await local.cut(changed(1, ITEM, 1, 2))
        await view.make_release(TOP, 0)
        assert view.state.newest
        assert view.state.newest.statistics.backlog.rows == 1
        number = view.state.newest.statistics.number
        gone_back = {row: view.state.tables[1].held.rows[row].copy() for row in (1, 2)}
        await local.cut({ITEM.name: gone_back})
        await view.make_release(TOP, 0)
        assert view.position.number == number
        assert view.state.newest
        assert view.state.newest.statistics.backlog == Amount(rows=0, bytes=0, norm=0.0)
        assert not is_due(view, TOP)

    run(tmp_path, scenario)


@pytest.mark.parametrize("given", [ValueType.FP32, ValueType.INT8])
def test_a_replica_from_before_the_policy_gets_what_it_lacks(tmp_path: Path, given: ValueType) -> None:
    """Nothing, if rows are as they were; everything, if they come in another type."""

    async def scenario(local: LocalModel) -> None:
        policy = Policy(top_k=1, value_type=given)
        held = local.model.position
        view = await local.prepared_view(policy)
        decision, position = view.resume(held)
        assert decision.yes
        release = await view.release(position.number)
        lacks = view.position != position  # Else nothing is sent.
        names = {view.deliveries[slot].spec.name: len(rows) for slot, rows in live_rows(release).items() if lacks}
        assert names == ({} if given is ValueType.FP32 else {"user": 40, "item": 30})
        assert view.resume(Position(held.history, held.number + 1))[0].yes is False

    run(tmp_path, scenario)


def test_a_replica_from_before_the_policy_that_was_behind_gets_what_changed_since(tmp_path: Path) -> None:
    async def scenario(local: LocalModel) -> None:
        held = local.model.position
        await local.cut(changed(1, USER, 3, 4))
        view = await local.prepared_view(TOP)
        _, position = view.resume(held)
        assert view.position.number > position.number
        release = await view.release(position.number)
        assert [(slot, rows.ids.tolist()) for slot, rows in live_rows(release).items()] == [(0, [3, 4])]

    run(tmp_path, scenario)


def test_a_dirty_row_that_changes_again_is_as_old_as_it_was(tmp_path: Path) -> None:
    """Else it would never be overdue."""

    async def scenario(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        for seed in range(1, 4):
            await local.cut(changed(seed, USER, 3, 4, 5, 6, 7))
            await view.make_release(TOP, 0)
            assert view.state.oldest_dirty_version == 2
        await view.make_release(Policy(top_k=1, max_age_seconds=60), 2)
        assert view.state.oldest_dirty_version in (0, 3, 4)

    run(tmp_path, scenario)


def test_rows_for_which_the_log_had_no_room_are_given_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasync.wire.row_messages.CHUNK_BYTES", 40_000)
    big = TableSpec("big", 4000, 128)
    policy = Policy(tables=("big",), value_type=ValueType.FP16, top_k=0.9)

    async def scenario(local: LocalModel) -> None:
        await local.add(big)
        await local.cut_all(random_rows(0, [*TABLES, big]))
        view = await local.prepared_view(policy)
        await local.cut({"big": dict(enumerate(random_rows(1, [big])[0]))})
        with pytest.raises(StorageFailed, match="the log is full"):
            await view.make_release(policy, 0)
        (table,) = view.state.tables
        dirty = await local.model.on_thread(lambda: len(table.dirty))
        assert 400 < dirty < 4000
        assert view.state.newest
        assert view.state.newest.statistics.backlog.rows == dirty
        assert view.state.newest.statistics.taken.rows == 4000 - dirty
        assert view.state.backlog["big"].amount.rows == dirty
        assert is_due(view, policy)
        replica = await held_by_a_replica(view)
        assert replica["big"].tobytes() == table.delivery.held(table.held.rows).tobytes()
        view.flush()
        while view.state.backlog_rows:
            await view.make_release(policy, 0)
            view.flush()
        wanted = random_rows(1, [big])[0].astype(np.float16).astype(np.float32)
        assert (await held_by_a_replica(view))["big"].tobytes() == wanted.tobytes()

    run(tmp_path, scenario, log_max_bytes=1 << 20)


@pytest.mark.parametrize("again", [False, True])
def test_a_release_that_could_not_be_written_down_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Though nothing more is published, or something is."""

    async def scenario(local: LocalModel) -> None:
        view = await local.prepared_view(Policy())
        before = view.position.number
        await local.cut(changed(1, USER, 3, 4))
        with monkeypatch.context() as patch:
            patch.setattr(ViewStore, "write_release", refuse)
            with pytest.raises(StorageFailed):
                await view.make_release(Policy(), 0)
        assert view.position.number == before
        if again:
            await local.cut(changed(1, USER, 9))
        assert is_due(view, Policy())
        await view.make_release(Policy(), 0)
        assert view.position.number > before
        late = await view.release(before)
        assert [rows.ids.tolist() for rows in live_rows(late).values()] == [[3, 4, 9] if again else [3, 4]]
        assert not is_due(view, Policy())

    run(tmp_path, scenario)


def test_what_was_left_is_not_forgotten_when_tables_are_added(tmp_path: Path) -> None:
    """Nothing more is published: still it goes out."""

    async def scenario(local: LocalModel) -> None:
        narrow, wide = Policy(tables=("user",), top_k=1), Policy(top_k=1)
        view = await local.prepared_view(narrow)
        await local.cut(changed(1, USER, 3, 4, 5))
        await view.make_release(narrow, 0)
        await view.prepare(wide)
        assert view.state.backlog_rows == 2
        assert is_due(view, wide)
        while is_due(view, wide):
            await view.make_release(wide, 0)
        assert same_as_the_model(await held_by_a_replica(view), local)

    run(tmp_path, scenario)


def test_what_was_left_of_a_table_that_is_not_followed_any_more_is_forgotten(tmp_path: Path) -> None:
    async def scenario(local: LocalModel) -> None:
        narrow, wide = Policy(tables=("item",), top_k=1), Policy(top_k=1)
        view = await local.prepared_view(wide)
        await local.cut(changed(1, USER, 3, 4, 5))
        await view.make_release(wide, 0)
        assert view.state.oldest_dirty_version == 2
        await view.prepare(narrow)
        assert view.state.oldest_dirty_version == 0
        assert view.state.backlog.keys() <= {"item"}
        assert not is_due(view, narrow)

    run(tmp_path, scenario)


async def lag_at(view: View, release: int) -> ConsumerLag:
    """Of a consumer whose replica holds that release."""
    replica = Replica("a", Position(view.history, release), stream=asyncio.Event(), checked=True)
    consumer = Consumer("top", "clicks", 0, replicas={"a": replica})
    return report(consumer, view.standing(consumer.policy), time.time_ns())


def test_who_lacks_a_release_is_not_in_sync(tmp_path: Path) -> None:
    """Though it holds rows of the newest version, and none is left."""

    async def scenario(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        await local.cut(changed(1, USER, 3, 4))
        await view.make_release(TOP, 0)
        assert (await lag_at(view, view.position.number)).state == "current"
        await view.make_release(TOP, 0)
        lag = await lag_at(view, view.position.number - 1)
        assert (lag.state, lag.lag.versions, lag.lag.rows, lag.lag.bytes) == ("behind", 0, 1, 40)
        assert lag.lag.seconds > 0
        assert [table.rows for table in lag.tables] == [1, 0]
        assert (await lag_at(view, view.position.number)).state == "in sync"

    run(tmp_path, scenario)


def test_who_has_whole_tables_of_a_version_but_not_all_of_it_is_not_in_sync(tmp_path: Path) -> None:
    async def scenario(local: LocalModel) -> None:
        narrow = Policy(tables=("user",), top_k=1)
        view = await local.prepared_view(narrow)
        await local.cut(changed(1, USER, 3, 4))
        await view.prepare(TOP)
        made = view.position.number
        await view.make_release(Policy(top_k=2), 0)
        assert view.position.number == made + 1
        lag = await lag_at(view, made)
        assert (lag.state, lag.lag.versions, lag.lag.rows) == ("behind", 1, 2)

    run(tmp_path, scenario)


def test_a_version_is_not_held_before_its_release_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        number, found = view.position.number, list[int]()
        await local.cut(changed(1, USER, 3))
        settle = ReleaseDraft.settle

        def noted(draft: ReleaseDraft, before: ViewState) -> tuple[ViewState, StorageFailed | None]:
            found.append(view.version_of(number))
            return settle(draft, before)

        monkeypatch.setattr(ReleaseDraft, "settle", noted)
        await view.make_release(TOP, 0)
        assert found == [1]
        assert view.version_of(number) == 1
        assert view.version_of(number + 1) == 2

    run(tmp_path, scenario)


def test_a_view_that_was_discarded_is_not_written_down_again(tmp_path: Path) -> None:
    """A flush may have been waiting meanwhile."""

    async def scenario(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        await local.cut(changed(1, USER, 3))
        await view.make_release(TOP, 0)
        view.discard()
        view.flush()
        assert local.log.items("view/") == {}
        assert local.log.items("release/") == {}
        assert not local.view_directory.exists()

    run(tmp_path, scenario)


def test_tables_that_could_not_be_made_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again every second: what is left behind would fill the disk."""

    async def scenario(local: LocalModel) -> None:
        view = await local.prepared_view(Policy(tables=("user",), top_k=1))
        (folder,) = local.view_directory.iterdir()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("os.posix_fallocate", full)
            for _ in range(3):
                with pytest.raises(StorageFailed, match="No space left"):
                    await view.prepare(TOP)
        assert list(local.view_directory.iterdir()) == [folder]
        await view.prepare(TOP)
        assert len(list(local.view_directory.iterdir())) == 2

    run(tmp_path, scenario)


def test_records_of_releases_that_are_flushed_are_dropped(tmp_path: Path) -> None:
    async def scenario(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        for seed in range(1, 20):
            await local.cut(changed(seed, USER, *range(40)))
            await view.make_release(Policy(), 0)
            view.flush()
            assert not list(local.log.read("releases/top"))
        assert same_as_the_model(await held_by_a_replica(view), local)

    run(tmp_path, scenario)
