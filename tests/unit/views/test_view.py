"""Views: what goes wrong, and what must hold all the same."""

import asyncio
import time

import numpy as np
import pytest
from tests.support.local_model import LocalModel
from tests.support.releases import live_rows
from tests.support.view_scenarios import (
    TABLES,
    TOP,
    USER,
    changed,
    held_by_a_replica,
    is_due,
)
from tests.support.wire import random_rows
from tests.unit.views.models import Models

from deltasync.consumers.consumer import Consumer, Replica
from deltasync.core.errors import StorageFailed
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.tables import TableSpec
from deltasync.core.value_types import ValueType
from deltasync.status.lag import ConsumerLag
from deltasync.status.report import report
from deltasync.views.view import View


@pytest.mark.parametrize(
    ("given", "behind", "lacks"),
    [
        (ValueType.FP32, False, {}),
        (ValueType.FP32, True, {"user": [3, 4]}),
        (ValueType.INT8, False, {"user": [*range(40)], "item": [*range(30)]}),
    ],
)
async def test_a_replica_from_before_the_policy_gets_what_it_lacks(
    local: LocalModel, given: ValueType, behind: bool, lacks: dict[str, list[int]]
) -> None:
    """Nothing, if rows are as they were, or what has changed since; everything, if they come in another type."""
    policy = Policy(top_k=1, value_type=given)
    held = local.model.position
    if behind:
        await local.cut(changed(1, USER, 3, 4))
    view = await local.prepared_view(policy)
    decision, position = view.resume(held)
    assert decision.yes
    assert (view.position != position) is bool(lacks)  # Else nothing is sent.
    release = await view.release(position.number)
    found = {view.deliveries[slot].spec.name: rows.ids.tolist() for slot, rows in live_rows(release).items()}
    assert not lacks or found == lacks
    assert not view.resume(Position(held.history, local.model.position.number + 1))[0].yes


async def test_rows_without_room_in_the_log_come_later(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltasync.wire.row_messages.CHUNK_BYTES", 40_000)
    big = TableSpec("big", 4000, 128)
    policy = Policy(tables=("big",), value_type=ValueType.FP16, top_k=0.9)
    local = await models.open(log_max_bytes=1 << 20)
    await local.add(*TABLES, big)
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


async def test_what_was_left_of_a_table_that_is_not_followed_any_more_is_forgotten(local: LocalModel) -> None:
    narrow, wide = Policy(tables=("item",), top_k=1), Policy(top_k=1)
    view = await local.prepared_view(wide)
    await local.cut(changed(1, USER, 3, 4, 5))
    await view.make_release(wide, 0)
    assert view.state.oldest_dirty_version == 2
    await view.prepare(narrow)
    assert view.state.oldest_dirty_version == 0
    assert view.state.backlog.keys() <= {"item"}
    assert not is_due(view, narrow)


async def lag_at(view: View, release: int) -> ConsumerLag:
    """Of a consumer whose replica holds that release."""
    replica = Replica("a", Position(view.history, release), stream=asyncio.Event(), checked=True)
    consumer = Consumer("top", "clicks", 0, replicas={"a": replica})
    return report(consumer, view.standing(consumer.policy), time.time_ns())


async def test_who_lacks_a_release_is_not_in_sync(local: LocalModel) -> None:
    """Though it holds rows of the newest version, and none is left."""
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


async def test_who_has_whole_tables_of_a_version_but_not_all_of_it_is_not_in_sync(local: LocalModel) -> None:
    narrow = Policy(tables=("user",), top_k=1)
    view = await local.prepared_view(narrow)
    await local.cut(changed(1, USER, 3, 4))
    await view.prepare(TOP)
    made = view.position.number
    await view.make_release(Policy(top_k=2), 0)
    assert view.position.number == made + 1
    lag = await lag_at(view, made)
    assert (lag.state, lag.lag.versions, lag.lag.rows) == ("behind", 1, 2)


async def test_a_view_that_was_discarded_is_not_written_down_again(local: LocalModel) -> None:
    """A flush may have been waiting meanwhile."""
    view = await local.prepared_view(TOP)
    await local.cut(changed(1, USER, 3))
    await view.make_release(TOP, 0)
    view.discard()
    view.flush()
    assert local.log.items("view/") == {}
    assert local.log.items("release/") == {}
    assert not local.view_directory.exists()


async def test_tables_that_are_not_made_leave_no_files(local: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again every second: what is left behind would fill the disk."""
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
