"""Deletes, and what belongs together: nobody keeps a row that is no more, nor sees the half of a release."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from tests.support.local_model import LocalModel
from tests.support.releases import deleted_rows
from tests.support.view_scenarios import before_turns, held_by_a_replica, refuse, small_blocks
from tests.unit.views.models import Models

from deltasync.base.errors import StorageFailed
from deltasync.base.threads import not_shared_yet
from deltasync.core.policy import Policy
from deltasync.core.rows import RowBatch, Values
from deltasync.core.stamped_table import StampedTable
from deltasync.core.table_form import Mode, TableForm
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.core.value_types import ValueType
from deltasync.model.releases import FrozenRelease
from deltasync.views.table import ReplicaComparison, ViewTable
from deltasync.views.view import View

USER = TableSpec("user", 8, 4)
MAP = TableSpec("user.raw_ids", 8, 1, np.dtype("<i8"), TableKind.ID_MAP, "user")
TOP, INT8 = Policy(top_k=1), Policy(top_k=1, value_type=ValueType.INT8)


def owned(owners: dict[int, int]) -> dict[str, dict[int, Values]]:
    """Rows that are some raw ids' now, which each row says in its first value."""
    rows = {row: np.array([raw, 1, 2, 3], np.float32) for row, raw in owners.items()}
    return {"user": rows, MAP.name: {row: np.array([raw + 1]) for row, raw in owners.items()}}


@pytest.fixture
def local(runner: asyncio.Runner, models: Models) -> LocalModel:
    """Every row is published, for the raw ids 0 to 7."""
    return runner.run(models.published(USER, MAP, rows=owned(dict(enumerate(range(8))))))


async def delete(local: LocalModel, *ids: int) -> None:
    await local.cut_batches([RowBatch.deletes(Shard.whole(USER), np.array(ids))])


async def deletes_after(view: View, number: int) -> list[int]:
    release = await view.release(number)
    assert isinstance(release, FrozenRelease)
    return [row for rows in deleted_rows(release).values() for row in rows.ids.tolist()]


async def check_owners(view: View) -> None:
    """See that who holds nothing before is given no row of another raw id than the map says."""
    held = await held_by_a_replica(view)
    np.testing.assert_array_equal(held["user"][:, 0], held[MAP.name][:, 0] - 1)


@pytest.mark.parametrize("policy", [INT8, Policy(mode=Mode.IDS)])
@pytest.mark.parametrize("told", [True, False])
async def test_a_replica_with_another_form_learns_of_deletes(
    local: LocalModel, policy: Policy, told: bool
) -> None:
    """Whether the view itself knew of the delete before the policy changed, or not."""
    view = await local.prepared_view(TOP)
    before = view.position.number
    await delete(local, 3, 5)
    if told:
        await view.make_release(TOP, 0)
    await view.prepare(policy)
    assert await deletes_after(view, before) == [3, 5]
    assert await deletes_after(view, 0) == []
    checksums = [table.checksum for table in view.tables]
    await view.make_release(policy, 0)
    assert [table.checksum for table in view.tables] == checksums


async def test_a_row_and_its_raw_id_are_released_together_or_not_at_all(local: LocalModel, models: Models) -> None:
    view = await local.prepared_view(TOP)
    position = view.position
    await local.cut(owned({2: 20}))
    with local.log_that(refuse), pytest.raises(StorageFailed, match="the disk is full"):
        await view.make_release(TOP, 0)
    assert view.position == position
    local = await models.open()
    view = local.view()
    await check_owners(view)
    await view.make_release(TOP, 0)
    await check_owners(view)
    assert (await held_by_a_replica(view))["user"][2, 0] == 20


@pytest.mark.parametrize("first", [INT8, Policy(tables=("norm",), top_k=1)])
@pytest.mark.parametrize("block", [1, 2])
async def test_rows_that_change_hands_while_tables_are_made_go_with_their_map(
    local: LocalModel, models: Models, first: Policy, block: int
) -> None:
    """Whether the rows are new in this form, or both are new; `top_k` leaves other rows for later."""
    await local.add(TableSpec("norm", 1, 1))
    await local.cut({"norm": {0: np.ones(1, np.float32)}})
    local.options = small_blocks(100)
    view, turns = await local.prepared_view(first), 0

    async def cut_before(turn: int) -> None:
        nonlocal turns
        turns = turn
        if turn == block + 1:
            await local.cut(owned({1: 10, 2: 20, 3: 30}))

    before_turns(local, cut_before)
    await view.prepare(TOP)
    assert turns > block
    await check_owners(view)
    view = (await models.open()).view()
    assert view.may_serve(TOP)
    await check_owners(view)


async def test_rows_of_a_map_that_comes_later_go_with_it(models: Models) -> None:
    """Rows that the policy has left for later, too: the map says whose they are now."""
    rows = owned(dict(enumerate(range(8))))
    local = await models.published(USER, rows={"user": rows["user"]})
    view = await local.prepared_view(TOP)
    await local.add(MAP)
    await local.cut(rows | owned({1: 10, 2: 20, 3: 30}) | {MAP.name: rows[MAP.name] | owned({1: 10})[MAP.name]})
    await view.make_release(TOP, 0)
    await local.cut({MAP.name: owned({2: 20, 3: 30})[MAP.name]})
    await view.prepare(TOP)
    await check_owners(view)


async def test_rows_that_a_view_had_no_room_for_go_with_their_map(local: LocalModel) -> None:
    view = await local.prepared_view(TOP)
    await local.model.tables.add([replace(USER, rows=12), replace(MAP, rows=12)], later_run=True)
    await local.cut(owned({8: 80, 9: 90, 10: 100}))
    with local.full_memory(), pytest.raises(StorageFailed):
        await view.prepare(TOP)
    await view.make_release(TOP, 0)
    await view.prepare(TOP)
    assert view.forms[0].spec.rows == 12
    held = await held_by_a_replica(view)
    named = held[MAP.name][:, 0] != 0
    np.testing.assert_array_equal(held["user"][named, 0], held[MAP.name][named, 0] - 1)


async def test_a_table_that_was_removed_and_made_again_is_sent_whole(local: LocalModel, models: Models) -> None:
    """A replica may hold rows of the one before, which this one never had."""
    view = await local.prepared_view(TOP)
    await local.cut({"user": owned({row: row + 10 for row in range(8)})["user"]})
    for _ in range(3):
        await view.make_release(TOP, 0)
    before = view.position.number
    await local.model.tables.remove("user")
    await local.add(USER)
    await local.cut({"user": {3: np.ones(4, np.float32)}})
    assert before > local.model.tables[-1].removed_before
    await view.prepare(TOP)
    for restart in (False, True):
        view = (await models.open()).view() if restart else view
        for number, whole in ((before, ["user"]), (view.position.number, [])):
            release = await view.release(number)
            assert isinstance(release, FrozenRelease)
            assert [view.forms[slot].spec.name for slot in release.whole] == whole


@pytest.mark.parametrize("kind", ValueType)
def test_a_delete_differs_from_zeros_only_for_replicas_with_the_row(kind: ValueType) -> None:
    spec = TableSpec("t", 40, 16)
    zeros, deletes = np.zeros((1, 16), np.float32), RowBatch.deletes(Shard.whole(spec), np.array([3, 9]))
    source = StampedTable(spec)
    source.apply(RowBatch.of_table(spec, np.arange(40), np.ones((40, 16), np.float32)), 1)
    source.apply(RowBatch.of_table(spec, np.array([3]), zeros), 1)
    with not_shared_yet():
        tables = []
        for rows in (np.arange(40), np.array([9])):
            tables.append(ViewTable(source, TableForm(spec, kind, Mode.EMBEDDINGS), stamp=1))
            tables[-1].copy(rows)
            tables[-1].note_clean(1)
        source.apply(deletes, 2)
        assert [dirty_after(each, 1) for each in tables] == [[3, 9], [9]]
        table = tables[0]
        table.update(deletes.ids, np.zeros(2), 2)
        assert dirty_after(table, 1) == []
        source.apply(RowBatch.of_table(spec, np.array([3]), zeros), 3)
        assert dirty_after(table, 2) == [3]


def dirty_after(table: ViewTable, version: int) -> list[int]:
    """The dirty rows after a look at what has changed since a version."""
    comparison = ReplicaComparison(table, version + 1)
    comparison.add(table.source.changed_since(version))
    comparison.finish(table.source.counts.newest)
    ids: list[int] = table.dirty.ids.tolist()
    return ids
