"""Views of tables that have grown: what replicas hold stays, and only what is new goes out."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.crashes import Crashes
from tests.support.local_model import LocalModel
from tests.support.releases import live_rows
from tests.support.view_scenarios import ITEM, USER, changed, held_by_a_replica
from tests.unit.views.models import Models

from deltasync.core.errors import StorageFailed
from deltasync.core.mode import Mode
from deltasync.core.policy import Policy
from deltasync.core.rows import Values
from deltasync.core.tables import TableSpec
from deltasync.core.value_types import ValueType
from deltasync.feeds.frozen_release import FrozenRelease
from deltasync.views.store import ViewStore
from deltasync.views.table import ViewTable
from deltasync.views.view import View

pytestmark = pytest.mark.usefixtures("shared_file")

LARGER = replace(USER, rows=90)
POLICIES = [Policy(value_type=ValueType.INT8), Policy(value_type=ValueType.BF16), Policy(mode=Mode.IDS)]
INT8 = POLICIES[0]


async def grow(local: LocalModel, *tables: TableSpec) -> None:
    await local.model.add_tables(list(tables), later_run=True)


async def release_everything(view: View, policy: Policy) -> None:
    await view.prepare(policy)
    await view.make_release(policy, 0)


def ids_of(release: FrozenRelease) -> dict[int, list[int]]:
    return {slot: rows.ids.tolist() for slot, rows in live_rows(release).items()}


@pytest.mark.parametrize("policy", POLICIES)
async def test_only_what_is_new_goes_out(local: LocalModel, models: Models, policy: Policy) -> None:
    view = await local.prepared_view(policy)
    await local.cut(changed(1, USER, 3))
    await release_everything(view, policy)
    held, before = view.state.tables[0].held.rows.copy(), view.position.number
    await grow(local, LARGER)
    assert not view.fits(policy)
    await view.prepare(policy)
    assert view.fits(policy)
    assert [each.spec for each in view.deliveries] == [LARGER, ITEM]
    np.testing.assert_array_equal(view.state.tables[0].held.rows[: USER.rows], held)
    assert ids_of(await view.release(before)) == {}
    await local.cut(changed(2, LARGER, 5, 40, 89))
    await view.make_release(policy, 0)
    release = await view.release(before)
    assert ids_of(release) == {0: [5, 40, 89]}
    whole = await view.release(0)
    assert ids_of(whole)[0] == [*range(40), 40, 89]
    assert whole.checksums == release.checksums
    (table, _) = view.standing(policy).tables()
    assert [table.lacking(number) for number in (before, view.position.number)] == [3, 0]
    view = (await models.open()).view()
    assert [each.spec for each in view.deliveries] == [LARGER, ITEM]
    assert (await view.release(0)).checksums == release.checksums


async def test_a_larger_table_takes_no_replica_back_after_a_restart(local: LocalModel, models: Models) -> None:
    view = await local.prepared_view(INT8)
    await local.cut(changed(1, USER, 3))
    await release_everything(view, INT8)
    await grow(local, LARGER)
    local = await models.open()
    view = local.view()
    assert view.version_of(view.position.number) == 2
    await view.prepare(INT8)
    assert view.version_of(view.position.number) == 2
    release = await view.release(view.position.number - 1)
    assert release.head
    assert release.head.version == 2


async def test_rows_go_out_once_there_is_room_for_them(local: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The view goes on meanwhile with the tables that it has."""

    def full(*_: object) -> None:
        raise StorageFailed("the disk is full")

    view = await local.prepared_view(INT8)
    await view.make_release(INT8, 0)
    await grow(local, LARGER)
    await local.cut(changed(2, LARGER, 5, 40, 89))
    with monkeypatch.context() as patch:
        patch.setattr("deltasync.storage.files.reserve", full)
        with pytest.raises(StorageFailed, match="the disk is full"):
            await view.prepare(INT8)
    before = view.position.number
    assert view.may_serve(INT8)
    await view.make_release(INT8, 0)
    assert ids_of(await view.release(before)) == {0: [5]}
    await local.cut(changed(3, LARGER, 6, 41))
    await view.make_release(INT8, 0)
    (table, _) = view.standing(INT8).tables()
    assert table.lacking(view.position.number) >= 3, "what there is no room for is lacking"
    await release_everything(view, INT8)
    assert ids_of(await view.release(before)) == {0: [5, 6, 40, 41, 89]}
    held = await held_by_a_replica(view)
    (source, _) = local.model.tables
    delivery = view.deliveries[0]
    np.testing.assert_array_equal(held[USER.name], delivery.decode(delivery.encode(source.rows)))


async def test_damage_found_while_room_is_made_is_sent(local: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, make_tables = Policy(mode=Mode.IDS, top_k=1), ViewStore.make_tables
    view, loop = await local.prepared_view(policy), asyncio.get_running_loop()
    newest, before = view.position.number, view.state.tables[0]

    async def damage() -> None:
        before.sent.rows[7] += 1
        while not view.damage.rows:
            await view.damage.sweep()
        await view.damage.mend()

    def meanwhile(*arguments: Any) -> list[ViewTable]:
        made = make_tables(*arguments)
        asyncio.run_coroutine_threadsafe(damage(), loop).result(20)
        return made

    monkeypatch.setattr(ViewStore, "make_tables", meanwhile)
    await grow(local, LARGER)
    await local.cut(changed(2, LARGER, 5))
    await view.prepare(policy)
    await view.make_release(policy, 0)
    assert ids_of(await view.release(newest)) == {0: [5, 7]}
    assert [table.lacking(view.position.number) for table in view.standing(policy).tables()] == [0, 0]
    assert not view.damage.rows


@pytest.mark.parametrize("policy", [INT8, POLICIES[2]])
async def test_a_crash_at_any_point_takes_nothing_from_replicas(
    tmp_path: Path,
    local: LocalModel,
    models: Models,
    monkeypatch: pytest.MonkeyPatch,
    policy: Policy,
    shared_file: bool,
) -> None:
    view = await local.prepared_view(policy)
    await local.cut(changed(1, USER, 3))
    await release_everything(view, policy)
    before = view.position.number
    await grow(local, LARGER)
    await local.cut(changed(2, LARGER, 5, 40, 89))
    with monkeypatch.context() as patch:
        crashes = Crashes(patch, models.folder, tmp_path)
        await release_everything(view, policy)
    assert len(crashes.copies) >= (9 if shared_file else 10)
    found = []
    for copy in crashes.copies:
        again = await LocalModel.opened(copy)
        view = again.view()
        found.append([each.spec.rows for each in view.deliveries])
        held = view.state.tables[0].held.rows[:40].copy()
        assert view.resume(view.position)[0].yes
        await release_everything(view, policy)
        assert [each.spec.rows for each in view.deliveries] == [90, 30]
        release = await view.release(before)
        assert ids_of(release) == {0: [5, 40, 89]}, "and nobody is given a row twice"
        others = [row for row in range(40) if row != 5]
        np.testing.assert_array_equal(view.state.tables[0].held.rows[others], held[others])
        assert (await view.release(0)).checksums == release.checksums
        await again.close()
    assert found == sorted(found), "once it has grown it stays so"
    assert {rows for rows, _ in found} == {40, 90}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(1, 30)),
        st.tuples(st.just("cut"), st.lists(st.integers(0, 200), max_size=5, unique=True)),
        st.tuples(st.just("release"), st.booleans()),
        st.tuples(st.just("restart"), st.none()),
    ),
    max_size=10,
)


@given(STEPS, st.sampled_from([INT8, Policy(top_k=3, value_type=ValueType.INT8)]))
def test_a_replica_that_applies_all_releases_holds_what_the_model_has(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, Any]], policy: Policy
) -> None:
    folder = tmp_path_factory.mktemp("grows")
    table, held, number = TableSpec("user", 5, 8), dict[int, Values](), 0

    async def catch_up(view: View) -> None:
        nonlocal number
        release = await view.release(number)
        for rows in live_rows(release).values():
            held.update(zip(rows.ids.tolist(), view.deliveries[0].decode(rows.values), strict=True))
        number = view.position.number

    async def scenario() -> None:
        nonlocal table
        local = await LocalModel.opened(folder, log_max_bytes=1 << 22)
        await local.add(table)
        await local.cut(cut_of(table, range(5), 0))
        view = await local.prepared_view(policy)
        for seed, (kind, what) in enumerate(steps):
            if kind == "grow":
                table = replace(table, rows=table.rows + what)
                await grow(local, table)
            elif kind == "cut":
                await local.cut(cut_of(table, {row % table.rows for row in what}, seed))
            elif kind == "release":
                if what:
                    await view.prepare(policy)
                await view.make_release(policy, 0)
                await catch_up(view)
            else:
                await local.close()
                local = await LocalModel.opened(folder, log_max_bytes=1 << 22)
                view = local.view()
        await release_everything(view, Policy(value_type=ValueType.INT8))
        await catch_up(view)
        (source,) = local.model.tables
        ids = source.changed_since(0)
        assert sorted(held) == ids.tolist()
        delivery = view.deliveries[0]
        expected = delivery.decode(delivery.encode(source.rows_of(ids)))
        np.testing.assert_array_equal(np.stack([held[row] for row in ids.tolist()]), expected)
        await local.close()

    asyncio.run(scenario())


def cut_of(table: TableSpec, ids: Iterable[int], seed: int) -> Mapping[str, Mapping[int, Values]]:
    return changed(seed, table, *sorted(ids))
