"""Views of tables that have grown: what replicas hold stays, and only what is new goes out."""

from dataclasses import replace

import numpy as np
import pytest
from tests.support.local_model import LocalModel
from tests.support.releases import live_rows
from tests.support.view_scenarios import ITEM, USER, bits_of, changed, held_by_a_replica
from tests.unit.views.models import Models

from deltasync.base.errors import StorageFailed
from deltasync.core.policy import Policy
from deltasync.core.table_form import Mode
from deltasync.core.tables import TableSpec
from deltasync.core.value_types import ValueType
from deltasync.model.releases import FrozenRelease
from deltasync.views.view import View

LARGER = replace(USER, rows=90)
POLICIES = [Policy(value_type=ValueType.INT8), Policy(value_type=ValueType.BF16), Policy(mode=Mode.IDS)]
INT8 = POLICIES[0]


async def grow(local: LocalModel, *tables: TableSpec) -> None:
    await local.model.tables.add(list(tables), later_run=True)


async def release_everything(view: View, policy: Policy) -> None:
    await view.prepare(policy)
    await view.make_release(policy, 0)


async def ids_after(view: View, number: int) -> dict[int, list[int]]:
    """The rows that a replica at a number is sent, by slot."""
    release = await view.release(number)
    assert isinstance(release, FrozenRelease)
    return {slot: rows.ids.tolist() for slot, rows in live_rows(release).items()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("checkpoint", [False, True])
async def test_a_table_that_grows_sends_only_its_new_rows(
    local: LocalModel, models: Models, policy: Policy, checkpoint: bool
) -> None:
    view = await local.prepared_view(policy)
    await local.cut(changed(1, USER, 3))
    await release_everything(view, policy)
    held, before = view.state.tables[0].held.rows.copy(), view.position.number
    await grow(local, LARGER)
    assert not view.fits(policy)
    await view.prepare(policy)
    assert view.fits(policy)
    assert [each.spec for each in view.forms] == [LARGER, ITEM]
    np.testing.assert_array_equal(view.state.tables[0].held.rows[: USER.rows], held)
    assert await ids_after(view, before) == {}
    await local.cut(changed(2, LARGER, 5, 40, 89))
    if checkpoint:
        await local.checkpoint()
    await view.make_release(policy, 0)
    assert await ids_after(view, before) == {0: [5, 40, 89]}
    assert (await ids_after(view, 0))[0] == [*range(40), 40, 89]
    (table, _) = view.status(policy).tables()
    assert [table.lacking(number) for number in (before, view.position.number)] == [3, 0]
    bits = await bits_of(view)
    view = (await models.open()).view()
    assert await bits_of(view) == bits


@pytest.mark.parametrize("restart", [False, True])
async def test_rows_go_out_once_there_is_room_for_them(local: LocalModel, models: Models, restart: bool) -> None:
    """The view goes on meanwhile with the tables that it has."""
    view = await local.prepared_view(INT8)
    await view.make_release(INT8, 0)
    await grow(local, LARGER)
    await local.cut(changed(2, LARGER, 5, 40, 89))
    with local.full_memory(), pytest.raises(StorageFailed, match="the disk is full"):
        await view.prepare(INT8)
    before = view.position.number
    assert view.may_serve(INT8)
    await view.make_release(INT8, 0)
    assert await ids_after(view, before) == {0: [5]}
    await local.cut(changed(3, LARGER, 6, 41))
    await view.make_release(INT8, 0)
    (table, _) = view.status(INT8).tables()
    assert table.lacking(view.position.number) >= 3, "what there is no room for is lacking"
    await view.prepare(INT8, 0, lambda: False)  # It is larger now, and a pause keeps the rows back.
    assert table.lacking(view.position.number) >= 3
    if restart:
        await local.checkpoint()
        local = await models.open()
        view = local.view()
    await release_everything(view, INT8)
    assert await ids_after(view, before) == {0: [5, 6, 40, 41, 89]}
    held = await held_by_a_replica(view)
    (source, _) = local.model.tables
    form = view.forms[0]
    np.testing.assert_array_equal(held[USER.name], form.decode(form.encode(source.rows)))
    bits = await bits_of(view)
    assert await bits_of((await models.open()).view()) == bits
