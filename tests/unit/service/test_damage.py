"""Damaged rows: found by row, told, handed to nobody, and mended from the log or from the ranks."""

import asyncio
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.local_service import join, opened, publish, run, send
from tests.support.log import Heads, log_of
from tests.support.releases import deleted_rows, live_rows
from tests.support.stamped import stamped_table
from tests.support.wire import ITEM, USER, WHOLE, full_part, part, random_rows
from tests.unit.support.async_tests import in_service

from deltasync.core.damage import DamagedRows, ranges
from deltasync.core.digests import checksum_of, row_digests
from deltasync.core.errors import ServiceUnavailable, StorageFailed
from deltasync.core.events import Event, EventKind
from deltasync.core.policy import Policy
from deltasync.core.rows import Ids
from deltasync.core.stamps import STAMPS, StampedTable
from deltasync.core.tables import Shard, TableSpec
from deltasync.feeds import damage, log_mender, sweep
from deltasync.feeds.damage import RESTAMPED
from deltasync.feeds.model import Model
from deltasync.service.housekeeping import _look_after_rows as look_after_rows
from deltasync.service.housekeeping import housekeeping
from deltasync.service.inspection import inspect
from deltasync.service.service import Service
from deltasync.storage.log_store import LogUnavailable

ROWS = random_rows(1)  # Those of `publish`.
SPECS = [TableSpec("a", 9, 2), TableSpec("b", 1, 3), TableSpec("c", 30, 1)]


async def published(service: Service) -> tuple[Any, Model]:
    """A session, and its model with version 1."""
    return await publish(service), service.models["clicks"]


async def cut(service: Service, session: Any, requests: list[Any]) -> None:
    """Publish a version; it is applied once this returns."""
    await send(session, requests)
    await service.coordinators["clicks"].drain()


def lists(ids: Mapping[str, Ids]) -> dict[str, list[int]]:
    """Ids by table."""
    return {name: some.tolist() for name, some in ids.items()}


def flip(table: StampedTable, *rows: int) -> None:
    """Change a bit of each of these rows behind the service's back."""
    table.rows.view(np.uint8)[list(rows), 1] ^= 16


def lose_digest(table: StampedTable, row: int) -> None:
    """Change a row's digest, and the tag that would show that the row is sound."""
    table.digests[row] ^= 1
    table.tags[row] ^= 2


def said_of_rows(service: Service) -> list[Event]:
    """What is said of rows from here on."""
    found: list[Event] = []
    kinds = (EventKind.ROWS_DAMAGED, EventKind.ROWS_MENDED)
    listeners = service.events._listeners
    service.events._listeners = (*listeners, lambda each: found.append(each) if each.kind in kinds else None)
    return found


def tell_when(service: Service, kind: EventKind, event: asyncio.Event) -> None:
    """Set an event whenever something of this kind is said."""
    listeners = service.events._listeners
    service.events._listeners = (*listeners, lambda each: event.set() if each.kind is kind else None)


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
        assert lists(model.damage.rows) == {USER.name: [3, 4, 9]}
        failure = model.standing(Policy()).failure
        assert failure.startswith(f"other bits than were stored in rows 3 to 4, 9 of table {USER.name!r}")
        mended = await model.damage.mend()
        assert lists(mended) == {USER.name: [3, 4, 9]}
        assert (model.damage.rows, model.standing(Policy()).failure) == ({}, "")
        release = await model.release(0)
        assert live_rows(release)[0].values.tobytes() == ROWS[0].tobytes()
        assert release.checksums[0] == checksum == model.tables[0].checksum

    run(tmp_path, scenario)


@in_service()
async def test_what_the_log_has_no_more_is_asked_of_the_ranks(service: Service) -> None:
    session, model = await published(service)
    model.flush()
    flip(model.tables[0], 7)
    with pytest.raises(DamagedRows):
        await model.release(0)
    assert await model.damage.mend() == {}
    assert [(slot, ids.tolist()) for slot, ids in session.wanted] == [(0, [7])]
    # Other rows go on, to replicas that lack only them.
    await cut(service, session, part(2, [(0, [8], np.ones((1, 4), "<f4"))]))
    assert live_rows(await model.release(1))[0].ids.tolist() == [8]
    await cut(service, session, part(3, [(0, [7], np.full((1, 4), 2, "<f4"))]))
    assert (model.damage.rows, session.wanted) == ({}, [])
    assert live_rows(await model.release(0))[0].values[7].tolist() == [2] * 4


@in_service()
async def test_a_row_is_asked_for_again_only_where_the_part_that_followed_did_not_bring_it(
    service: Service,
) -> None:
    session, model = await published(service)
    model.flush()
    flip(model.tables[0], 7)
    await model.damage.sweep()

    apply, answered = model.apply_cut, asyncio.Event()

    async def apply_later(*cut: Any) -> None:
        await answered.wait()
        await apply(*cut)

    async def asked_after(version: int, row: int) -> list[tuple[int, list[int]]]:
        answered.clear()
        with mock.patch.object(model, "apply_cut", apply_later):
            await send(session, part(version, [(0, [row], ROWS[0][row : row + 1])]))
            asked = [(slot, ids.tolist()) for slot, ids in session.ask()]
            answered.set()
            await service.coordinators["clicks"].drain()
        return asked

    assert await asked_after(2, 8) == [(0, [7])]
    assert await asked_after(3, 8) == []
    assert await asked_after(4, 8) == [(0, [7])]
    assert await asked_after(5, 7) == []
    assert (await asked_after(6, 8), model.damage.rows) == ([], {})


@in_service()
async def test_many_rows_are_asked_for_a_few_at_a_time(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltasync.publish.session._WANTED_IDS", 4)
    session, model = await published(service)
    model.flush()
    for row in range(3, 14):
        flip(model.tables[0], row)
    await model.damage.sweep()
    assert [ids.tolist() for _, ids in session.wanted] == [[3, 4, 5, 6]]
    asked = [[ids.tolist() for _, ids in session.ask()] for _ in range(3)]
    assert asked == [[[3, 4, 5, 6]], [[7, 8, 9, 10]], [[3, 4, 5, 6]]], "not what is on its way"


@pytest.mark.parametrize("named", [True, False], ids=["it is deleted", "a full part does not name it"])
@in_service()
async def test_a_deleted_row_is_zeros_again(service: Service, named: bool) -> None:
    """Of one that a full part does not name, the log has what it was before, and no delete."""
    session, model = await published(service)
    ids = np.setdiff1d(np.arange(USER.rows), [5])
    if named:
        requests = part(2, [(0, [5], np.zeros((1, 4), "<f4"))])
        requests[0].chunk.rows.deleted, requests[0].chunk.rows.values = True, b""
    else:
        requests = part(2, [(0, ids, ROWS[0][ids]), (1, np.arange(ITEM.rows), ROWS[1])], full=True)
    await cut(service, session, requests)
    if named:
        model.flush()
    assert model.tables[0].deleted(np.array([5])).all()
    flip(model.tables[0], 5)
    await model.damage.sweep()
    assert lists(model.damage.rows) == {USER.name: [5]}
    assert list(await model.damage.mend()) == [USER.name]
    assert not model.tables[0].rows[5].any()


@in_service()
async def test_the_log_mends_a_digest_of_a_sound_row(service: Service) -> None:
    _, model = await published(service)
    right = model.tables[0].digests.copy()
    lose_digest(model.tables[0], 7)
    await model.damage.sweep()
    assert lists(await model.damage.mend()) == {USER.name: [7]}
    assert model.tables[0].digests.tolist() == right.tolist()


@in_service()
async def test_a_digest_that_has_changed_is_made_again_of_its_sound_row(service: Service) -> None:
    _, model = await published(service)
    model.flush()
    right = model.tables[0].digests.copy(), model.tables[0].checksum
    model.tables[0].digests[7] ^= 1
    await model.damage.sweep()
    assert (model.damage.rows, model.tables[0].restamped) == ({}, [])
    assert model.tables[0].digests.tolist() == right[0].tolist()
    assert model.tables[0].checksum == right[1]


@in_service()
async def test_a_look_at_all_rows_says_what_was_found_and_mended_while_it_went_on(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = damage._may_be_damaged
    _, model = await published(service)
    loop = asyncio.get_running_loop()

    def look(table: StampedTable, first: int, last: int) -> bool:
        if table is model.tables[1]:
            tidied = asyncio.run_coroutine_threadsafe(model.damage.look_after(service.events), loop)
            tidied.result(10)
        return looked_at(table, first, last)

    monkeypatch.setattr(damage, "_may_be_damaged", look)
    flip(model.tables[0], 3, 4)
    model.tables[0].stamps[7] = 5
    said = list[Event]()
    service.events._listeners = (*service.events._listeners, said.append)
    user, _ = await inspect(service, "who asks")
    assert (user.damaged, user.mended, user.restamped, user.left) == (2, 2, 1, 0)
    (event,) = (each for each in said if each.kind is EventKind.ROWS_INSPECTED)
    assert event.subject == {"by": "who asks"}
    assert event.text == "of all rows, 70 looked at, 2 damaged, 1 with another stamp, 0 left"


@pytest.mark.parametrize("bit", [0, 3, 40, 63])
async def test_a_row_whose_stamp_has_changed_is_sent_to_whoever_may_lack_it(tmp_path: Path, bit: int) -> None:
    """Also after a restart, before anybody is served; and it is told."""
    async with opened(tmp_path) as service:
        session, model = await published(service)
        await cut(service, session, part(2, [(0, [7, 8], np.full((2, 4), 2, "<f4"))]))
        model.flush()
        model.tables[0].stamps.view(np.uint64)[7] ^= np.uint64(1 << bit)
        model.tables[0].wrote(None, STAMPS)
    async with opened(tmp_path) as service:
        model, said = service.models["clicks"], said_of_rows(service)
        release = await model.release(1)
        assert live_rows(release)[0].ids.tolist() == [7, 8]
        assert not deleted_rows(release)
        await look_after_rows(service, model)
        assert [(each.kind, each.text) for each in said] == [
            (EventKind.ROWS_DAMAGED, f"{RESTAMPED}row 7"),
        ]


@in_service()
async def test_a_row_that_only_seems_to_be_deleted_is_sent_as_it_is(service: Service) -> None:
    _, model = await published(service)
    model.tables[0].stamps[7] *= -1
    release = await model.release(0)
    assert live_rows(release)[0].ids.tolist() == list(range(USER.rows))
    assert not deleted_rows(release)


@pytest.mark.parametrize("wrong", [1e30, np.nan, -1.0])
@in_service()
async def test_a_squared_norm_that_has_changed_is_made_again_of_its_row(service: Service, wrong: float) -> None:
    _, model = await published(service)
    table = model.tables[0]
    right, norm = table.squares.copy(), table.norm
    table.squares[7] = wrong
    table.count()  # As a start does.
    await model.damage.sweep()
    assert table.squares.tolist() == right.tolist()
    assert (table.norm, model.damage.rows) == (norm, {})


@in_service()
async def test_the_log_mends_no_row_as_a_version_has_it_that_is_not_applied_yet(service: Service) -> None:
    session, model = await published(service)
    flip(model.tables[0], 7)
    await model.damage.sweep()
    with mock.patch.object(model, "_apply", side_effect=ServiceUnavailable("not now")):
        await send(session, part(2, [(0, [7], np.ones((1, USER.dim), "<f4"))]))
        assert list(await model.damage.mend()) == [USER.name]
    assert model.tables[0].rows[7].tolist() == ROWS[0][7].tolist()


@pytest.mark.parametrize("known", [True, False])
@in_service()
async def test_a_digest_that_was_damaged_leaves_nothing_in_the_checksum(service: Service, known: bool) -> None:
    """If it was known before its row was overwritten, not even in what the cut is sent with."""
    session, model = await published(service)
    model.flush()
    lose_digest(model.tables[0], 7)
    if known:
        await model.damage.sweep()
        assert await model.damage.mend() == {}, "the log does not have the row any more"
    await cut(service, session, part(2, [(0, [7], np.full((1, 4), 2, "<f4"))]))
    if not known:
        await model.damage.sweep()
    rows = live_rows(await model.release(0))[0]
    assert not model.damage.rows
    assert model.tables[0].checksum == checksum_of(rows.ids, rows.values)


@in_service()
async def test_a_digest_that_is_still_damaged_is_not_counted(service: Service) -> None:
    """Else all replicas would be told that they hold other rows than they were sent."""
    session, model = await published(service)
    model.flush()
    right = model.tables[0].checksum
    lose_digest(model.tables[0], 7)
    await cut(service, session, part(2, [(0, [9], ROWS[0][9:10])]))
    flip(model.tables[0], 9)
    for _ in range(2):
        await model.damage.sweep()
    assert lists(await model.damage.mend()) == {USER.name: [9]}
    assert lists(model.damage.rows) == {USER.name: [7]}
    assert model.tables[0].checksum == right


@in_service()
async def test_the_log_is_read_once_for_a_row_that_it_does_not_have(service: Service) -> None:
    session, model = await published(service)
    model.flush()
    await cut(service, session, part(2, [(0, [8], np.ones((1, 4), "<f4"))]))
    flip(model.tables[0], 7)
    await model.damage.sweep()
    assert await model.damage.mend() == {}
    with mock.patch.object(log_mender, "_logged", side_effect=AssertionError):
        assert await model.damage.mend() == {}
    flip(model.tables[0], 8)
    await model.damage.sweep()
    assert lists(await model.damage.mend()) == {USER.name: [8]}


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> Heads:
    return Heads(monkeypatch)


@in_service()
async def test_a_row_is_mended_from_a_log_that_could_not_be_read_before(service: Service, heads: Heads) -> None:
    """It is not taken for what the log does not have: a trainer, or a backup, would be asked for in vain."""
    _, model = await published(service)
    flip(model.tables[0], 7)
    await model.damage.sweep()
    heads.refused, heads.opened = True, False
    for _ in range(2):
        with pytest.raises(StorageFailed, match="nothing that was acknowledged is lost"):
            await asyncio.wrap_future(log_of(service).put("x", b""))
        with pytest.raises(LogUnavailable):
            await model.damage.mend()
    heads.refused, heads.opened = False, True
    await asyncio.wrap_future(log_of(service).put("x", b""))
    assert lists(await model.damage.mend()) == {USER.name: [7]}


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
                swept.go_on(tables, 1)
            except DamagedRows as error:
                found.append((error.owner, error.ids.tolist()))
    assert found[0] == (table, [row])


@in_service()
async def test_housekeeping_finds_damage_that_nobody_asks_for_says_so_and_mends_it(service: Service) -> None:
    _, model = await published(service)
    flip(model.tables[1], 2)
    events = said_of_rows(service)
    await look_after_rows(service, model)
    said = [(each.kind, dict(each.subject), each.text) for each in events]
    subject = {"model": "clicks", "table": ITEM.name}
    assert said == [
        (EventKind.ROWS_DAMAGED, subject, "other bits than were stored in row 2"),
        (EventKind.ROWS_MENDED, subject, "row 2"),
    ]
    assert model.tables[1].rows.tobytes() == ROWS[1].tobytes()


@in_service()
async def test_damage_that_a_replica_meets_is_told_as_well(service: Service) -> None:
    _, model = await published(service)
    flip(model.tables[0], 2)
    with pytest.raises(DamagedRows):
        await model.release(0)
    await asyncio.sleep(0)  # What is done once the release has failed.
    events = said_of_rows(service)
    await look_after_rows(service, model)
    await look_after_rows(service, model)
    assert [each.kind for each in events] == [EventKind.ROWS_DAMAGED, EventKind.ROWS_MENDED]


@in_service()
async def test_damage_is_told_to_consumers_that_follow_the_table_and_what_to_do(service: Service) -> None:
    _, model = await published(service)
    flip(model.tables[1], 2)
    await model.damage.sweep()
    assert "start one that publishes the model" in model.standing(Policy()).failure
    assert "start one that publishes the model" in model.standing(Policy(tables=(ITEM.name,))).failure
    assert not model.standing(Policy(tables=(USER.name,))).failure


@in_service(flush_bytes=1)
async def test_a_model_whose_thread_is_busy_is_flushed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltasync.service.housekeeping._SECONDS", 0.001)
    busy = threading.Event()
    _, model = await published(service)
    working = asyncio.create_task(model.on_thread(busy.wait))
    keeper = asyncio.create_task(housekeeping(service))
    while not model.store.flushed:
        await asyncio.sleep(0)
    busy.set()
    await working
    keeper.cancel()


@pytest.mark.parametrize("trouble", ["thread", "log", "error"])
@in_service()
async def test_a_model_in_trouble_keeps_no_other_from_being_looked_after(
    service: Service, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """More of them, too, than there are threads that others share."""
    monkeypatch.setattr("deltasync.service.housekeeping._SECONDS", 0.001)
    over, searching = threading.Event(), threading.Semaphore(0)

    def search(*_: Any) -> list[Any]:
        searching.release()
        over.wait()
        return []

    async def in_trouble(service: Service, name: str) -> None:
        await send(await join(service, model=name), full_part(1, ROWS, WHOLE))
        await service.coordinators[name].drain()
        model = service.models[name]
        if trouble == "thread":
            asyncio.get_running_loop().run_in_executor(model._thread, over.wait)
        elif trouble == "log":
            flip(model.tables[0], 1)
            logged = log_mender._logged
            searched = lambda store, *rest: (search if store is model.store else logged)(store, *rest)  # noqa: E731
            monkeypatch.setattr(log_mender, "_logged", searched)
        else:
            monkeypatch.setattr(model.damage, "_tables", ZeroDivisionError)

    keeper = asyncio.create_task(housekeeping(service))
    for number in range(40 if trouble == "log" else 2):
        await in_trouble(service, f"trouble{number}")
    if trouble == "log":
        await asyncio.gather(*(asyncio.to_thread(searching.acquire) for _ in range(40)))
    _, model = await published(service)
    mended = asyncio.Event()
    tell_when(service, EventKind.ROWS_MENDED, mended)
    try:
        for row in 3, 5:  # Not only in the round that had begun before.
            mended.clear()
            flip(model.tables[0], row)
            await mended.wait()
    finally:
        over.set()
    keeper.cancel()
    assert model.tables[0].rows.tobytes() == ROWS[0].tobytes()


async def test_a_stamp_from_the_future_is_none(tmp_path: Path) -> None:
    """Else whoever was told of that version would never be told of later ones."""
    async with opened(tmp_path) as service:
        _, model = await published(service)
        model.flush()
        model.tables[0].stamps[11] ^= 1 << 40
    async with opened(tmp_path) as service:
        model = service.models["clicks"]
        assert model.tables[0].counts.newest == 1
        assert live_rows(await model.release(0))[0].ids.tolist() == list(range(USER.rows))
        session = await join(service)
        await cut(service, session, full_part(2, random_rows(2), WHOLE))
        assert len(live_rows(await model.release(1))[0]) == USER.rows


async def test_columns_that_a_crash_has_left_newer_than_their_digests_are_no_damage(tmp_path: Path) -> None:
    """Files are ahead of the last flush; which columns rows come in was not known at that."""
    halves = [Shard(USER, 0, USER.rows, 0, 2), Shard(USER, 0, USER.rows, 2, 2), WHOLE[1]]
    async with opened(tmp_path / "data") as service:
        _, model = await published(service)
        model.flush()
        session = await join(service, shards=halves, continues=model.position)
        await cut(service, session, part(2, [(1, [3, 5], np.ones((2, 2), "<f4"))]))
        shutil.copytree(tmp_path / "data", tmp_path / "copy")
    async with opened(tmp_path / "copy") as service:
        model = service.models["clicks"]
        assert model.position.number == 2
        await model.damage.sweep()
        assert not model.damage.rows
        assert model.tables[0].digests.sum(axis=1).tolist() == row_digests(model.tables[0].rows).tolist()
        flip(model.tables[0], 7)
        assert model.tables[0].damaged(np.arange(USER.rows)).tolist() == [7]


@in_service()
async def test_rows_that_a_cut_has_brought_since_the_log_was_read_are_not_mended_with_older_ones(
    service: Service,
) -> None:
    session, model = await published(service)
    flip(model.tables[0], 3, 4)
    await model.damage.sweep()
    read = log_mender._logged

    def reading(*arguments: Any) -> Any:
        found = read(*arguments)
        asyncio.run_coroutine_threadsafe(send(session, newer), loop).result()
        asyncio.run_coroutine_threadsafe(service.coordinators["clicks"].drain(), loop).result()
        return found

    loop, newer = asyncio.get_running_loop(), part(2, [(0, [4], np.ones((1, USER.dim), "<f4"))])
    with mock.patch.object(log_mender, "_logged", reading):
        await model.damage.mend()
    assert not model.damage.rows
    assert model.tables[0].rows[[3, 4]].tolist() == [ROWS[0][3].tolist(), [1] * USER.dim]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([3], "row 3"),
        ([3, 4], "rows 3 to 4"),
        ([0, 2, 3, 9], "rows 0, 2 to 3, 9"),
        (range(0, 14, 2), "rows 0, 2, 4, 6, 8 and 2 other ranges"),
    ],
)
def test_ranges_are_told_in_words(ids: Any, words: str) -> None:
    assert ranges(np.array(ids)) == words
