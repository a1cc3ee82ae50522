"""Deletes, and what belongs together: nobody keeps a row that is no more, nor sees the half of a release."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from tests.support.local_model import LocalModel
from tests.support.mapping import new_view_table, reopened
from tests.support.releases import deleted_rows
from tests.support.view_scenarios import held_by_a_replica, refuse
from tests.unit.views.models import Models

from deltasync.core.delivery import Delivery
from deltasync.core.errors import StorageFailed
from deltasync.core.mode import Mode
from deltasync.core.policy import Policy
from deltasync.core.rows import RowBatch, Values
from deltasync.core.seal import seal_of
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.core.threads import not_shared_yet
from deltasync.core.value_types import ValueType
from deltasync.views.release_maker import ReleaseMaker
from deltasync.views.store import ViewStore
from deltasync.views.table import ViewTable
from deltasync.views.table_maker import TableMaker
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
    return [row for rows in deleted_rows(await view.release(number)).values() for row in rows.ids.tolist()]


async def check_owners(view: View) -> None:
    """See that who holds nothing before is given no row of another raw id than the map says."""
    held = await held_by_a_replica(view)
    np.testing.assert_array_equal(held["user"][:, 0], held[MAP.name][:, 0] - 1)


@pytest.mark.parametrize("policy", [INT8, Policy(mode=Mode.IDS)])
@pytest.mark.parametrize("told", [True, False])
async def test_who_holds_another_form_learns_of_deletes(local: LocalModel, policy: Policy, told: bool) -> None:
    """Whether the view itself knew of the delete before the policy changed, or not."""
    view = await local.prepared_view(TOP)
    before = view.position.number
    await delete(local, 3, 5)
    if told:
        await view.make_release(TOP, 0)
    await view.prepare(policy)
    assert await deletes_after(view, before) == [3, 5]
    assert await deletes_after(view, 0) == []
    checksums = (await view.release(0)).checksums
    await view.make_release(policy, 0)
    assert (await view.release(0)).checksums == checksums


def refuse_some(patch: pytest.MonkeyPatch, refused: Callable[[int, RowBatch], bool]) -> None:
    """Have the log refuse some pieces of releases, by slot and rows."""
    append = ViewStore.append

    def refusing(store: ViewStore, number: int, slot: int, index: int, rows: RowBatch) -> Future[None]:
        if not refused(slot, rows):
            return append(store, number, slot, index, rows)
        failed: Future[None] = Future()
        failed.set_exception(StorageFailed("the disk is full"))
        return failed

    patch.setattr(ViewStore, "append", refusing)


@pytest.mark.parametrize("slot", [0, 1])
async def test_what_belongs_together_is_released_together_or_not_at_all(
    local: LocalModel, models: Models, monkeypatch: pytest.MonkeyPatch, slot: int
) -> None:
    view = await local.prepared_view(TOP)
    position = view.position
    await local.cut(owned({2: 20}))
    with monkeypatch.context() as patch:
        refuse_some(patch, lambda number, _: number == slot)
        with pytest.raises(StorageFailed, match="the disk is full"):
            await view.make_release(TOP, 0)
    assert view.position == position
    await check_owners(view)
    local = await models.open()
    view = local.view()
    await check_owners(view)
    await view.make_release(TOP, 0)
    await check_owners(view)
    assert (await held_by_a_replica(view))["user"][2, 0] == 20


async def test_a_delete_without_room_comes_later(local: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    view = await local.prepared_view(TOP)
    before = view.position.number
    await delete(local, 3)
    with monkeypatch.context() as patch:
        refuse_some(patch, lambda _, rows: rows.deleted)
        with pytest.raises(StorageFailed, match="the disk is full"):
            await view.make_release(TOP, 0)
    await view.make_release(TOP, 0)
    assert await deletes_after(view, before) == [3]


@pytest.mark.parametrize("order", [[USER.name, MAP.name], [MAP.name, USER.name]])
@pytest.mark.parametrize("crash", [True, False])
async def test_rows_that_change_hands_while_tables_are_made_go_with_their_map(
    local: LocalModel, models: Models, monkeypatch: pytest.MonkeyPatch, order: list[str], crash: bool
) -> None:
    """Whichever of the two was copied before the cut; `top_k` leaves other rows for later."""
    copy = TableMaker._copy

    copied: list[str] = []

    async def check_served(view: View) -> None:
        assert view.may_serve(TOP)
        await check_owners(view)

    async def copying(maker: TableMaker, table: ViewTable, number: int | None) -> None:
        if table.source.spec.name == order[1]:
            await local.cut(owned({1: 10, 2: 20, 3: 30}))
        await copy(maker, table, number)
        copied.append(table.source.spec.name)

    monkeypatch.setattr(TableMaker, "_copy", copying)
    if order[0] == MAP.name:
        monkeypatch.setattr("deltasync.feeds.model.Model.followed", lambda model, _: model.tables[::-1])
    view = local.view()
    if crash:
        with monkeypatch.context() as patch:
            patch.setattr(ReleaseMaker, "make", refuse)
            with pytest.raises(StorageFailed, match="the disk is full"):
                await view.prepare(TOP)
        assert not view.may_serve(TOP)
    else:
        await view.prepare(TOP)
        await check_served(view)
    assert copied == order
    local = await models.open()
    view = local.view()
    assert view.may_serve(TOP) is not crash
    await view.prepare(TOP)
    await check_served(view)


async def test_new_tables_have_their_version_s_step(local: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of a later one, to which only some of its rows belong."""
    copy = TableMaker._copy

    async def copying(maker: TableMaker, table: ViewTable, number: int | None) -> None:
        await local.cut({"user": {1: np.ones(4, np.float32)}})
        await copy(maker, table, number)

    monkeypatch.setattr(TableMaker, "_copy", copying)
    view = await local.prepared_view(Policy(tables=("use?",), top_k=1))
    head = view.state.head
    assert head
    assert local.model.position.number > head.version
    assert head.step == seal_of(head.version, local.model.seals).step


@pytest.mark.parametrize("kind", ValueType)
def test_a_delete_differs_from_zeros_only_to_who_has_the_row(kind: ValueType, tmp_path: Path) -> None:
    spec = TableSpec("t", 40, 16)
    zeros, deletes = np.zeros((1, 16), np.float32), RowBatch.deletes(Shard.whole(spec), np.array([3, 9]))
    source = StampedTable.zeros(spec)
    source.apply(RowBatch.of_table(spec, np.arange(40), np.ones((40, 16), np.float32)), 1)
    source.apply(RowBatch.of_table(spec, np.array([3]), zeros), 1)
    with not_shared_yet():
        tables = []
        for name, rows in (("all", np.arange(40)), ("one", np.array([9]))):
            (tmp_path / name).mkdir()
            tables.append(new_view_table(source, Delivery(spec, kind, Mode.EMBEDDINGS), tmp_path / name))
            tables[-1].copy(rows, 1)
        source.apply(deletes, 2)
        assert [each.find_dirty(1).ids.tolist() for each in tables] == [[3, 9], [9]]
        table = tables[0]
        table.write(table.deletes(deletes.ids), 2)
        table.settle(deletes.ids)
        assert table.find_dirty(2).ids.tolist() == []
        source.apply(RowBatch.of_table(spec, np.array([3]), zeros), 3)
        assert table.find_dirty(2).ids.tolist() == [3]
        table.flush()
        assert reopened(table).find_dirty(2).ids.tolist() == [3]
