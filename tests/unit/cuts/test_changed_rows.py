"""A run that goes on from an earlier version than the newest: it learns what came after, and brings that."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.local_service import join, send
from tests.support.log import held_up, log_of
from tests.support.wire import ITEM, USER, WHOLE, full_part, part, random_rows
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import (
    Contradiction,
    InvalidInput,
    ResyncRequired,
    ServiceUnavailable,
    StorageFailed,
    Superseded,
)
from deltasync.core.position import Position
from deltasync.core.rows import RowBatch
from deltasync.core.stamped_table import StampedTable
from deltasync.core.tables import Shard, TableSpec
from deltasync.cuts.cut import ChangedRows, MissingRows
from deltasync.cuts.session import PublishSession
from deltasync.service.service import Service
from deltasync.wire.messages import MOST_IDS, changed_from_message, changed_to_messages, joined

ONES = np.ones((1, 4), "<f4")
AGAIN: dict[str, Any] = {"run": "run-2", "started": 2, "takes_changes": True}


async def published(service: Service, *changes: list[tuple[int, Any, Any]]) -> list[Position]:
    """A first version with all rows, and one for each of some changes."""
    session = await join(service)
    sent = [full_part(1, random_rows(0), WHOLE), *(part(step, some) for step, some in enumerate(changes, 2))]
    return [await send(session, each) or Position() for each in sent]


def told(session: PublishSession) -> dict[str, list[int]]:
    assert session.changed
    return {name: ids.tolist() for name, ids in session.changed.tables.items()}


@in_service()
async def test_a_run_learns_which_rows_came_after_its_version(service: Service) -> None:
    some, more = (0, [3, 9], np.ones((2, 4), "<f4")), (1, [29], np.ones((1, 6), "<f2"))
    first, second, third = await published(service, [some], [more, (0, [9], ONES)])
    for claim, expected in (
        (first, {USER.name: [3, 9], ITEM.name: [29]}),
        (second, {USER.name: [9], ITEM.name: [29]}),
    ):
        session = await join(service, continues=claim, **AGAIN)
        assert (session.decision.yes, session.decision.since) == (True, claim.number)
        assert told(session) == expected
    assert (await join(service, continues=third, **AGAIN)).changed is None, "it holds the newest"
    assert not (await join(service, continues=first, run="run-3", started=3)).decision.yes, "it cannot be told"


@in_service()
async def test_a_part_that_lacks_some_of_them_is_refused(service: Service) -> None:
    first, _ = await published(service, [(0, [3, 9], np.ones((2, 4), "<f4"))])
    session = await join(service, continues=first, **AGAIN)
    said = r"left out 1 row of table '.*user' that the service had named:"
    with pytest.raises(ResyncRequired, match=said):
        await send(session, part(5, [(0, [3], ONES)]))
    sealed = await send(session, part(6, [(0, [3, 9, 11], np.zeros((3, 4), "<f4"))]))
    assert sealed
    assert sealed.number == 3
    assert not service.models["clicks"].seals[-1].resync, "the history goes on"
    assert (await send(session, part(7, [(0, [1], ONES)])) or Position()).number == 4, "only the first one must"


@in_service()
async def test_a_full_part_does_as_well(service: Service) -> None:
    first, _ = await published(service, [(0, [3], ONES)])
    session = await join(service, continues=first, **AGAIN)
    assert (await send(session, full_part(5, random_rows(1), WHOLE)) or Position()).number == 3


@in_service()
async def test_rows_that_no_rank_of_the_run_holds_cannot_be_left_as_they_are(service: Service) -> None:
    first, _ = await published(service, [(0, [35], ONES)])
    session = await join(service, continues=first, shards=[Shard(USER, 0, 30, 0, 4), WHOLE[1]], **AGAIN)
    with pytest.raises(Contradiction, match="rows 30 to 39, columns 0 to 3 are in no rank's shard"):
        await send(session, part(5, []))


@in_service()
async def test_who_is_told_while_a_version_is_sealed_is_told_of_that_too(service: Service) -> None:
    (first,) = await published(service)
    old = await join(service)
    with held_up(log_of(service)):
        last = asyncio.create_task(send(old, part(2, [(0, [3], ONES)])))
        while not (old.coordinator.open_cut and old.coordinator.open_cut.cut.ends):
            await asyncio.sleep(0)
        new = await join(service, continues=first, **AGAIN)
        assert new.changed is None, "it is the newest yet"
    await last
    with pytest.raises(Superseded, match="version 2 was sealed after this stream was opened: open it again"):
        await send(new, part(5, []))
    again = await join(service, continues=first, **AGAIN)
    assert told(again) == {USER.name: [3]}


@pytest.mark.parametrize("leaves", [False, True])
@in_service()
async def test_a_rank_that_could_not_be_told_is_not_there(service: Service, leaves: bool) -> None:
    """Nobody would ever note that it has left: its model could not be deleted, nor its unfinished cut given up."""
    first, _ = await published(service, [(0, [3], ONES)])
    model, ranks, go = service.models["clicks"], service.models.coordinators["clicks"], threading.Event()
    run = ranks.run
    model.submit(go.wait)
    joining = asyncio.create_task(join(service, continues=first, **AGAIN))
    while ranks.run == run:
        await asyncio.sleep(0.001)
    if leaves:
        joining.cancel()
    else:
        model.tables.note_damage(StorageFailed("a part of a version is lost"))
    go.set()
    with pytest.raises(asyncio.CancelledError if leaves else ServiceUnavailable):
        await joining
    assert ranks.connected == []


@pytest.mark.parametrize("process", ["x" * 201, "a\nb"])
@in_service()
async def test_a_process_in_other_than_a_few_words_is_refused(service: Service, process: str) -> None:
    with pytest.raises(InvalidInput, match="process: use at most 200 printable characters"):
        await join(service, process=process)


Cuts = st.lists(st.lists(st.tuples(st.integers(0, 11), st.booleans()), max_size=6), max_size=5)


@given(Cuts, st.integers(0, 5), st.lists(st.tuples(st.integers(0, 11), st.integers(1, 12)), max_size=3))
def test_changed_rows_are_those_that_cuts_have_named(
    cuts: list[list[tuple[int, bool]]], since: int, blocks: list[tuple[int, int]]
) -> None:
    spec = TableSpec("t", 12, 2)
    table, named = StampedTable(spec), list[set[int]]()
    for version, cut in enumerate(cuts, 1):
        rows = dict(cut)
        for deleted in (False, True):
            ids = np.array(sorted(row for row, gone in rows.items() if gone is deleted), np.int64)
            if len(ids):
                values = np.ones((len(ids), 2), "<f4")
                batch = (
                    RowBatch.deletes(Shard.whole(spec), ids)
                    if deleted
                    else RowBatch(Shard.whole(spec), ids, values)
                )
                table.apply(batch, version)
        named.append(set(rows))
    shards = [Shard(spec, first, min(rows, 12 - first), 0, 2) for first, rows in blocks]
    found = ChangedRows.find(since, len(cuts), [table], shards)
    later = set[int]().union(*named[since:])
    by_slot = [sorted(later & set(range(s.row_offset, s.row_offset + s.rows))) for s in shards]
    assert found.tables.get("t", np.empty(0)).tolist() == sorted(set().union(*by_slot))
    missing = MissingRows(found)
    assert missing.counts == {slot: len(ids) for slot, ids in enumerate(by_slot) if ids}
    for slot, shard in enumerate(shards):
        missing.name(slot, shard, np.array(by_slot[slot], np.int64))
    assert missing.counts == {}


Rows = st.sets(st.integers(0, 11))


@given(Rows, st.lists(Rows, max_size=5), st.lists(Rows, max_size=5))
def test_a_part_is_counted_by_what_it_names_however_often_and_anew(
    changed: set[int], first: list[set[int]], anew: list[set[int]]
) -> None:
    """A row comes twice where it is written and deleted."""
    spec = TableSpec("t", 20, 2)
    table, shard = StampedTable(spec), Shard(spec, 8, 12, 0, 2)
    ids = np.array(sorted(changed), np.int64) + 8
    if len(ids):
        table.apply(RowBatch(Shard.whole(spec), ids, np.ones((len(ids), 2), "<f4")), 1)
    found = ChangedRows.find(0, 1, [table], [shard])
    for batches in (first, anew):
        missing, left = MissingRows(found), set(changed)
        for batch in batches:
            missing.name(0, shard, np.array(sorted(batch), np.int64) + 8)
            left -= batch
            assert missing.counts == ({0: len(left)} if left else {})


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(0, 2))
def test_messages_carry_all_ids_in_pieces(tables: list[int], large: int) -> None:
    sizes = [*tables, *[MOST_IDS + 7] * large]
    named = [(index, np.arange(size, dtype=np.int64) * 3) for index, size in enumerate(sizes)]
    messages = list(changed_to_messages(named))
    assert [message.last for message in messages] == [False] * (len(messages) - 1) + [True]
    assert all(sum(len(each.ids) for each in message.tables) <= 1 << 20 for message in messages)
    parsed = [type(message).FromString(message.SerializeToString()) for message in messages]
    arrived = joined(piece for message in parsed for piece in changed_from_message(message))
    assert {index: ids.tolist() for index, ids in arrived.items()} == {
        index: ids.tolist() for index, ids in named if len(ids)
    }
