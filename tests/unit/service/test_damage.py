"""Damaged rows: found by row, told, handed to nobody, and mended from the log or from the ranks."""

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.local_service import join, run, send
from tests.support.releases import live_rows
from tests.support.stamped import stamped_table
from tests.support.wire import ITEM, USER, WHOLE, full_part, part, random_rows

from deltasync.core.damage import DamagedRows, ranges
from deltasync.core.events import Event, EventKind
from deltasync.core.policy import Policy
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import TableSpec
from deltasync.feeds import sweep
from deltasync.feeds.model import Model
from deltasync.service.housekeeping import _look_after_rows as look_after_rows
from deltasync.service.service import Service

ROWS = random_rows(0)
SPECS = [TableSpec("a", 9, 2), TableSpec("b", 1, 3), TableSpec("c", 30, 1)]


async def published(service: Service) -> tuple[Any, Model]:
    """A session, and its model with version 1."""
    session = await join(service)
    await send(session, full_part(1, ROWS, WHOLE))
    await service.coordinators["clicks"].drain()
    return session, service.models["clicks"]


def flip(table: StampedTable, *rows: int) -> None:
    """Change a bit of each of these rows behind the service's back."""
    table.rows.view(np.uint8)[list(rows), 1] ^= 16


def said_of_rows(service: Service) -> list[Event]:
    """What is said of rows from here on."""
    found: list[Event] = []
    kinds = (EventKind.ROWS_DAMAGED, EventKind.ROWS_MENDED)
    listeners = service.events._listeners
    service.events._listeners = (*listeners, lambda each: found.append(each) if each.kind in kinds else None)
    return found


def test_a_release_never_has_a_damaged_row_and_the_log_mends_it(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        _, model = await published(service)
        checksum = model.tables[0].checksum
        flip(model.tables[0], 3, 4, 9)
        with pytest.raises(
            DamagedRows, match=rf"table '{USER.name}': other bits than were stored in rows 3 to 4, 9"
        ):
            await model.release(0)
        await asyncio.sleep(0)  # What is done once the release has failed.
        assert {name: ids.tolist() for name, ids in model.damage.items()} == {USER.name: [3, 4, 9]}
        failure = model.standing(Policy()).failure
        assert failure.startswith(f"other bits than were stored in rows 3 to 4, 9 of table {USER.name!r}")
        mended = await model.mend()
        assert {name: ids.tolist() for name, ids in mended.items()} == {USER.name: [3, 4, 9]}
        assert (model.damage, model.standing(Policy()).failure) == ({}, "")
        release = await model.release(0)
        assert live_rows(release)[0].values.tobytes() == ROWS[0].tobytes()
        assert release.checksums[0] == checksum == model.tables[0].checksum

    run(tmp_path, scenario)


def test_what_the_log_has_no_more_is_asked_of_the_ranks(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        session, model = await published(service)
        model.flush()
        flip(model.tables[0], 7)
        with pytest.raises(DamagedRows):
            await model.release(0)
        assert await model.mend() == {}
        assert [(slot, ids.tolist()) for slot, ids in session.wanted] == [(0, [7])]
        # Other rows go on, to replicas that lack only them.
        await send(session, part(2, [(0, [8], np.ones((1, 4), "<f4"))]))
        await service.coordinators["clicks"].drain()
        assert live_rows(await model.release(1))[0].ids.tolist() == [8]
        await send(session, part(3, [(0, [7], np.full((1, 4), 2, "<f4"))]))
        await service.coordinators["clicks"].drain()
        assert {name: ids.tolist() for name, ids in (await model.mend()).items()} == {USER.name: [7]}
        assert session.wanted == []
        assert live_rows(await model.release(0))[0].values[7].tolist() == [2] * 4

    run(tmp_path, scenario)


def test_a_deleted_row_is_zeros_again(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        session, model = await published(service)
        requests = part(2, [(0, [5], np.zeros((1, 4), "<f4"))])
        requests[0].chunk.rows.deleted, requests[0].chunk.rows.values = True, b""
        await send(session, requests)
        await service.coordinators["clicks"].drain()
        model.flush()
        flip(model.tables[0], 5)
        await model.sweep()
        assert {name: ids.tolist() for name, ids in model.damage.items()} == {USER.name: [5]}
        assert list(await model.mend()) == [USER.name]
        assert not model.tables[0].rows[5].any()

    run(tmp_path, scenario)


@given(st.data(), st.integers(1, 400))
def test_the_sweep_comes_to_every_row_that_ever_changed(data: st.DataObject, bytes_at_once: int) -> None:
    ones = [np.ones((spec.rows, spec.dim), "<f4") for spec in SPECS]
    pairs = zip(SPECS, ones, strict=True)
    tables = [stamped_table(spec, rows, np.ones(spec.rows, np.int64)) for spec, rows in pairs]
    table = data.draw(st.sampled_from(tables))
    row = data.draw(st.integers(0, table.spec.rows - 1))
    flip(table, row)
    swept, found = sweep.Sweep(), list[tuple[object, list[int]]]()
    with mock.patch.object(sweep, "_BYTES", bytes_at_once):
        for _ in range(9 + 1 + 30):  # As many rows as there are, at one a time.
            try:
                swept.go_on(tables)
            except DamagedRows as error:
                found.append((error.owner, error.ids.tolist()))
    assert found[0] == (table, [row])


def test_housekeeping_finds_damage_that_nobody_asks_for_says_so_and_mends_it(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        _, model = await published(service)
        flip(model.tables[1], 2)
        events = said_of_rows(service)
        await look_after_rows(service, model)
        said = [(each.kind, dict(each.subject), each.text) for each in events]
        subject = {"model": "clicks", "table": ITEM.name}
        assert said == [
            (EventKind.ROWS_DAMAGED, subject, "other bits than were stored in rows 2"),
            (EventKind.ROWS_MENDED, subject, "rows 2"),
        ]
        assert model.tables[1].rows.tobytes() == ROWS[1].tobytes()

    run(tmp_path, scenario)


def test_damage_of_before_a_restart_is_found_after_it(tmp_path: Path) -> None:
    async def before(service: Service) -> None:
        _, model = await published(service)
        flip(model.tables[0], 11)
        model.flush()

    async def after(service: Service) -> None:
        with pytest.raises(DamagedRows, match="rows 11"):
            await service.models["clicks"].release(0)

    run(tmp_path, before)
    run(tmp_path, after)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([3], "rows 3"),
        ([3, 4], "rows 3 to 4"),
        ([0, 2, 3, 9], "rows 0, 2 to 3, 9"),
        (range(0, 14, 2), "rows 0, 2, 4, 6, 8 and 2 other ranges"),
    ],
)
def test_ranges_are_told_in_words(ids: Any, words: str) -> None:
    assert ranges(np.array(ids)) == words
