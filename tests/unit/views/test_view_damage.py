"""Damaged rows of a view: of what replicas hold, and of what that is made of."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from tests.support.local_model import LocalModel
from tests.support.releases import live_rows
from tests.support.wire import USER
from tests.unit.views.models import Models

from deltasync.consumers.consumer import Consumer
from deltasync.core.damage import DamagedRows
from deltasync.core.errors import StorageFailed
from deltasync.core.events import Events
from deltasync.core.mode import Mode
from deltasync.core.policy import Policy
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.stamps import ROWS as ROWS_BIT
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.core.value_types import ValueType
from deltasync.storage.records import pack_json, unpack_json
from deltasync.storage.table_files import open_tables
from deltasync.views.release_loop import ReleaseLoop
from deltasync.views.table import ViewTable, view_arrays
from deltasync.views.view import View

ROWS = {row: np.arange(4, dtype=np.float32) + row for row in range(USER.rows)}
INT8 = Policy(value_type=ValueType.INT8)


@pytest.fixture
def local(runner: asyncio.Runner, models: Models) -> LocalModel:
    return runner.run(models.published(USER, rows={USER.name: ROWS}))


def flip(table: StampedTable, row: int) -> None:
    table.rows.view(np.uint8)[row, 0] ^= 8


def lists(rows: Mapping[Any, Ids]) -> list[list[int]]:
    return [ids.tolist() for ids in rows.values()]


@pytest.mark.parametrize("policy", [INT8, Policy(top_k=0.5), Policy(value_type=ValueType.INT8_TBE)], ids=str)
async def test_a_held_row_that_the_source_still_has_is_encoded_again(local: LocalModel, policy: Policy) -> None:
    view = await local.prepared_view(policy)
    (table,) = view.state.tables
    right = (await view.release(0)).checksums
    before = table.held.rows.copy()
    flip(table.held, 7)
    view._releases._found.clear()
    with pytest.raises(DamagedRows, match="row 7"):
        await view.release(0)
    await asyncio.sleep(0)
    assert view.standing(policy).failure.startswith("other bits than were stored in row 7 of table")
    assert not local.model.damage.rows, "the model's row is whole"
    assert lists(await view.damage.mend()) == [[7]]
    assert table.held.rows.tobytes() == before.tobytes()
    assert (view.damage.rows, view.standing(policy).failure) == ({}, "")
    assert (await view.release(0)).checksums == right


async def test_what_was_mended_is_flushed_although_nothing_is_new(local: LocalModel) -> None:
    view = await local.prepared_view(INT8)
    await local.cut_batches([RowBatch.deletes(Shard.whole(USER), np.array([3]))])
    (held,), (source,) = view.state.tables, local.model.tables
    for table, row in ((held.held, 7), (source, 3)):
        flip(table, row)
        table.wrote(np.array([row]), ROWS_BIT)
        table.flush()  # As if the disk had changed it.
    await view.damage.sweep()
    assert lists(await view.damage.mend()) == [[7]]
    local.model.damage.note(DamagedRows(source, USER.name, np.array([3])))
    assert lists(await local.model.damage.mend()) == [[3]]
    assert (view.flush(), local.model.flush()) == (False, False)
    layout = source.mapped.layout.arrays()
    for files, arrays in ((held.files, view_arrays(held.delivery)), (source.mapped.files, layout)):
        (found,) = open_tables([(files.place, arrays)])
        assert [each.tobytes() for each in found.arrays] == [each.tobytes() for each in files.arrays]


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_held_row_that_nobody_knows_is_replaced_by_the_next_release(local: LocalModel, mode: Mode) -> None:
    """Although others have changed more, and are all that the policy takes."""
    policy = Policy(top_k=1, mode=mode)
    view = await local.prepared_view(policy)
    (table,) = view.state.tables
    await local.cut({USER.name: {7: ROWS[7] + 1e-3, 9: ROWS[9] + 5}})
    await view.make_release(policy, 0)
    newest = view.position.number
    assert live_rows(await view.release(newest - 1))[0].ids.tolist() == [9]
    for mapped in table.mapped:
        flip(mapped, 7)
    await view.damage.sweep()
    assert await view.damage.mend() == {}
    assert table.damaged.tolist() == [7]
    await local.cut({USER.name: {9: ROWS[9] + 9}})
    await view.make_release(policy, 0)
    assert live_rows(await view.release(newest))[0].ids.tolist() == [7, 9]
    assert (view.damage.rows, table.damaged.tolist()) == ({}, [])
    assert (await view.release(0)).rows == USER.rows


async def test_a_damaged_row_of_the_model_is_in_no_release_and_told_to_the_model(local: LocalModel) -> None:
    view = await local.prepared_view(INT8)
    number = view.position.number
    await local.cut({USER.name: {7: ROWS[7] + 1}})
    flip(local.model.tables[0], 7)
    await view.make_release(INT8, 0)
    assert view.position.number == number
    assert not view.damage.rows
    assert lists(local.model.damage.rows) == [[7]]
    assert view.standing(INT8).failure
    await local.cut({USER.name: {7: ROWS[7] + 2}})
    assert not local.model.damage.rows
    await view.make_release(INT8, 0)
    assert live_rows(await view.release(view.position.number - 1))[0].ids.tolist() == [7]


async def test_a_damaged_row_of_the_model_leaves_its_place_to_others(models: Models) -> None:
    """Also another that is found as the release is made."""
    policy, other = Policy(top_k=1), TableSpec("other", 4, 2)
    local = await models.published(USER, other, rows={USER.name: ROWS, "other": {0: np.ones(2, np.float32)}})
    view = await local.prepared_view(policy)
    number = view.position.number
    await local.cut({USER.name: {row: ROWS[row] + row for row in (7, 8, 9)}})
    for row in 8, 9:
        flip(local.model.tables[0], row)
    await view.make_release(policy, 0)
    assert live_rows(await view.release(number))[0].ids.tolist() == [7]
    assert lists(local.model.damage.rows) == [[8, 9]]
    assert view.state.newest
    assert view.state.newest.statistics.backlog.rows == 2
    assert view.state.newest.statistics.reason == "took all 1 dirty row; and not 2 that are damaged"
    for row in 8, 9:
        flip(local.model.tables[0], row)
    await local.model.damage.mend()
    await view.make_release(Policy(), 0)
    assert live_rows(await view.release(number + 1))[0].ids.tolist() == [8, 9]


async def test_a_new_view_takes_no_damaged_rows_over(local: LocalModel) -> None:
    flip(local.model.tables[0], 3)
    with pytest.raises(DamagedRows):
        await local.prepared_view(INT8)
    assert lists(local.model.damage.rows) == [[3]]
    flip(local.model.tables[0], 3)
    assert (await local.prepared_view(INT8)).position.number


async def test_without_a_damaged_row_that_others_belong_to_none_of_them_goes(models: Models) -> None:
    """A map, and the row that it leads to; the rows of another run."""
    id_map = TableSpec("ids", USER.rows, 1, np.dtype("<i8"), TableKind.ID_MAP, USER.name)
    numbers = {row: np.array([row]) for row in range(USER.rows)}
    policy = Policy(top_k=1)

    local = await models.published(USER, id_map, rows={USER.name: ROWS, id_map.name: numbers})
    view = await local.prepared_view(policy)
    number = view.position.number
    table = local.model.tables[0]
    await local.cut({USER.name: {7: ROWS[7] + 1, 9: ROWS[9] + 5}, id_map.name: {7: np.array([70])}})
    flip(table, 7)
    with pytest.raises(DamagedRows):
        await view.make_release(policy, 0)
    flip(table, 7)
    await local.cut_batches(local.batches({USER.name: {8: ROWS[8] + 1}}), resync=True)
    flip(table, 9)
    for _ in range(2):
        with pytest.raises(DamagedRows):
            await view.make_release(policy, 0)
    assert view.position.number == number
    flip(table, 9)
    await view.make_release(policy, 0)
    release = live_rows(await view.release(number))
    assert {slot: rows.ids.tolist() for slot, rows in release.items()} == {0: [7, 8, 9], 1: [7]}


async def test_a_damaged_row_that_is_no_more_stays_deleted(local: LocalModel) -> None:
    """Also where what replicas are sent of it is something else than what they hold."""
    policy = Policy(mode=Mode.IDS)
    view = await local.prepared_view(policy)
    (table,) = view.state.tables
    await local.cut_batches([RowBatch.deletes(Shard.whole(USER), np.array([7]))])
    await view.make_release(policy, 0)
    for mapped in table.mapped:
        flip(mapped, 7)
    await view.damage.sweep()
    assert lists(await view.damage.mend()) == [[7]]
    await view.make_release(policy, 0)
    release = await view.release(0)
    assert release.rows == USER.rows - 1


async def test_a_row_that_is_found_damaged_during_a_look_goes_with_a_later_release(local: LocalModel) -> None:
    """Although the look has found before that it is as replicas hold it."""
    policy = Policy(top_k=1, mode=Mode.IDS)
    view = await local.prepared_view(policy)
    (table,) = view.state.tables
    newest = view.position.number
    await local.cut({USER.name: {7: ROWS[7], 9: ROWS[9] + 5}})
    look = await local.model.on_thread(table.begin, view.state.compared_version)
    await local.model.on_thread(look.advance, look.rows)
    flip(table.sent, 7)
    await view.damage.sweep()
    assert await view.damage.mend() == {}
    await local.model.on_thread(table.finish, look)
    await view.make_release(policy, 0)
    await view.make_release(policy, 0)
    assert live_rows(await view.release(newest))[0].ids.tolist() == [7, 9]
    assert (view.damage.rows, table.damaged.tolist()) == ({}, [])


async def test_a_row_that_is_damaged_in_the_model_too_keeps_no_other_from_being_mended(local: LocalModel) -> None:
    view = await local.prepared_view(INT8)
    (table,) = view.state.tables
    right = table.held.rows.copy()
    flip(table.held, 7)
    flip(table.held, 9)
    flip(local.model.tables[0], 7)
    await view.damage.sweep()
    assert lists(await view.damage.mend()) == [[9]]
    assert lists(view.damage.rows) == [[7]]
    assert table.held.rows[9].tobytes() == right[9].tobytes()
    with pytest.raises(DamagedRows) as found:
        await view.make_release(INT8, 0)
    assert found.value.owner is local.model.tables[0]
    assert lists(local.model.damage.rows) == [[7]]
    await local.cut({USER.name: {7: ROWS[7] + 2}})
    await view.make_release(INT8, 0)
    assert (view.damage.rows, (await view.release(0)).rows) == ({}, USER.rows)


async def test_a_digest_that_was_damaged_leaves_nothing_in_the_checksum(local: LocalModel) -> None:
    view = await local.prepared_view(INT8)
    (table,) = view.state.tables
    right = table.held.checksum
    table.held.digests[7] ^= 1
    table.held.tags[7] ^= 2
    await view.damage.sweep()
    assert await view.damage.mend() == {}
    await view.make_release(INT8, 0)
    assert (view.damage.rows, table.held.checksum) == ({}, right)


async def test_a_damaged_row_of_the_model_is_compared_again_once_it_is_mended(local: LocalModel) -> None:
    """How far it is from what replicas hold was found of the wrong bits."""
    policy = Policy(top_k=1)
    view = await local.prepared_view(policy)
    await local.cut({USER.name: {row: ROWS[row] + change for row, change in ((7, 1), (8, 0.5), (9, 5))}})
    source = local.model.tables[0]
    source.rows[7, 0] = np.nan
    await view.make_release(policy, 0)
    assert live_rows(await view.release(view.position.number - 1))[0].ids.tolist() == [9]
    assert view.state.backlog[USER.name].amount.norm == pytest.approx(1)
    source.rows[7, 0] = ROWS[7][0] + 1
    await local.model.damage.mend()
    await view.make_release(policy, 0)
    assert live_rows(await view.release(view.position.number - 1))[0].ids.tolist() == [7]
    assert view.state.newest
    assert view.state.newest.statistics.taken.norm == pytest.approx(2)


async def left_rows(local: LocalModel, policy: Policy) -> View:
    """A view of which a release has left row 7, since row 9 had changed more."""
    view = await local.prepared_view(policy)
    await local.cut({USER.name: {7: ROWS[7] + 1, 9: ROWS[9] + 5}})
    await view.make_release(policy, 0)
    assert view.state.backlog_rows == 1
    return view


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_row_left_and_lost_is_found_and_sent(local: LocalModel, models: Models, mode: Mode) -> None:
    policy = Policy(top_k=1, mode=mode)
    view = await left_rows(local, policy)
    view.state.tables[0]._mark(np.array([7]), 0)
    view.flush()
    local = await models.open()
    view = local.view()
    number = view.position.number
    assert lists(await view.find_lost()) == [[7]]
    assert (view.lost, await view.find_lost()) == (1, {})
    assert view.damage.restamped[USER.name].tolist() == [7]
    await view.make_release(policy, 0)
    assert live_rows(await view.release(number))[0].ids.tolist() == [7]
    assert (view.lost, view.damage.rows, await view.find_lost()) == (0, {}, {})


async def test_a_lost_row_is_due_until_it_is_released(local: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing new may come for hours: else it would wait for that."""
    view = await local.prepared_view(INT8)
    loop = ReleaseLoop(Consumer("top", "clicks", 1, INT8), view, Events())
    assert loop._situation().backlog_rows == 0
    view.lost = 1
    assert loop._situation().backlog_rows == 1

    async def fails(*_: object) -> None:
        view.lost += 1  # It is found meanwhile.
        raise StorageFailed("no room")

    with monkeypatch.context() as patch:
        patch.setattr(view._maker, "make", fails)
        with pytest.raises(StorageFailed):
            await view.make_release(INT8, 0)
    assert view.lost == 2
    await view.make_release(INT8, 0)
    assert view.lost == 0


async def test_whatever_byte_of_the_marks_changes_the_same_rows_are_dirty(local: LocalModel) -> None:
    """In memory, as a restart finds them: a mark too many is one that a look takes away."""
    policy = Policy(top_k=1)
    view = await left_rows(local, policy)
    (table,) = view.state.tables
    right, version = table._marks.copy(), view.state.compared_version

    def change(byte: int, mask: int) -> None:
        table._marks[:] = right
        table._marks.view(np.uint8)[byte] ^= mask
        again = ViewTable(table.source, table.delivery, table.files)
        again.check_marks(version)
        again.find_lost(0, USER.rows, version)
        dirty = again.find_dirty(version)
        assert dirty.ids.tolist() == [7], (byte, mask)
        assert 1 <= dirty.since[0] <= version
        assert np.flatnonzero(table._marks).tolist() == [7]

    for byte in range(right.nbytes):
        for mask in (1, 2, 64, 128, 255):
            await local.model.on_thread(change, byte, mask)


async def test_a_view_of_a_version_that_is_no_more_is_not_gone_on_from(local: LocalModel, models: Models) -> None:
    view = await local.prepared_view(INT8)
    view.flush()
    again = await models.open()
    record = dict(unpack_json(again.log.items("view/top")[""]))
    again.log.put("view/top", pack_json(record | {"seen": 9})).result()
    with pytest.raises(StorageFailed, match="made of version 9, and the model's newest one is 1"):
        again.view()
