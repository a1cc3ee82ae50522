# mypy: disable-error-code="union-attr, operator"
"""Views: what goes wrong, and what must hold all the same."""

import asyncio
import time

import pytest
from tests.support.local_model import LocalModel
from tests.support.releases import live_rows
from tests.support.view_scenarios import TOP, USER, changed, is_due

from deltasync.base.errors import StorageFailed
from deltasync.consumers.consumer import Consumer, Replica
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.value_types import ValueType
from deltasync.status.lag import report
from deltasync.status.records import ConsumerStatus
from deltasync.views.view import View


@pytest.mark.parametrize(
    ("given", "behind", "lacks"),
    [
        (ValueType.FP32, False, {}),
        (ValueType.FP32, True, {"user": [3, 4]}),
        (ValueType.INT8, False, {"user": [*range(40)], "item": [*range(30)]}),
    ],
)
async def test_a_replica_that_predates_the_policy_receives_missing_rows(
    local: LocalModel, given: ValueType, behind: bool, lacks: dict[str, list[int]]
) -> None:
    """Nothing, if rows are as they were, or what has changed since; everything, if they come in another type."""
    policy = Policy(top_k=1, value_type=given)
    held = local.model.position
    if behind:
        await local.cut(changed(1, USER, 3, 4))
    view = await local.prepared_view(policy)
    decision, position = view.continue_from(held)
    assert decision.yes
    assert (view.position != position) is bool(lacks)  # Else nothing is sent.
    release = await view.release(position.number)
    found = {view.forms[slot].spec.name: rows.ids.tolist() for slot, rows in live_rows(release).items()}
    assert not lacks or found == lacks
    assert not view.continue_from(Position(held.history, local.model.position.number + 1))[0].yes


async def test_the_backlog_of_a_table_goes_with_the_table(local: LocalModel) -> None:
    narrow, wide = Policy(tables=("item",), top_k=1), Policy(top_k=1)
    view = await local.prepared_view(wide)
    await local.cut(changed(1, USER, 3, 4, 5))
    await view.make_release(wide, 0)
    assert view.state.oldest_dirty_version == 2
    await view.prepare(narrow)
    assert view.state.oldest_dirty_version == 0
    assert view.state.backlog.keys() <= {"item"}
    assert not is_due(view, narrow)


async def test_replicas_learn_that_there_was_nothing_to_release(local: LocalModel) -> None:
    items = Policy(tables=("item",), top_k=1)
    view = await local.prepared_view(items)
    await local.cut(changed(1, USER, 3, 4))
    before, news = view.position, asyncio.ensure_future(view.changed())
    await view.make_release(items, 0)
    await asyncio.wait_for(news, 20)
    assert view.position == before


async def lag_at(view: View, release: int) -> ConsumerStatus:
    """Of a consumer whose replica holds that release."""
    replica = Replica("a", Position(view.history, release), stream=asyncio.Event(), checked=True)
    consumer = Consumer("top", "clicks", 0, replicas={"a": replica})
    return report(consumer, view.status(consumer.policy), time.time_ns())


async def test_a_replica_that_lacks_a_release_is_not_in_sync(local: LocalModel) -> None:
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


async def test_a_replica_with_only_the_new_tables_whole_is_not_in_sync(local: LocalModel) -> None:
    narrow = Policy(tables=("user",), top_k=1)
    view = await local.prepared_view(narrow)
    await local.cut(changed(1, USER, 3, 4))
    await view.prepare(TOP)
    made = view.position.number
    await view.make_release(Policy(top_k=2), 0)
    assert view.position.number == made + 1
    lag = await lag_at(view, made)
    assert (lag.state, lag.lag.versions, lag.lag.rows) == ("behind", 0, 1)


async def test_without_room_for_a_table_the_view_stays_as_it_was(local: LocalModel) -> None:
    view, wide = await local.prepared_view(Policy(tables=("user",), top_k=1)), Policy(top_k=1)
    before = view.position
    with local.full_memory(), pytest.raises(StorageFailed, match="the disk is full"):
        await view.prepare(wide)
    assert (view.position, view.trouble, view.may_serve(wide)) == (before, "the disk is full", True)
    await view.prepare(wide)
    assert (view.trouble, len(view.tables), view.position.number) == ("", 2, before.number + 1)
