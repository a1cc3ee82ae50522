"""Deletes that operators ask for: written down, handed to ranks, and forgotten with the cut that carries them."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.local_service import join, opened, publish, send
from tests.support.log import log_of
from tests.support.wire import ITEM, USER, WHOLE, close, delete_chunk, full_part, part, random_rows
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput, NotFound
from deltasync.core.position import Position
from deltasync.core.rows import DeleteRequest
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.cuts.session import PublishSession
from deltasync.log.log_store import LogFull
from deltasync.service.service import Service

HALVES = [[WHOLE[0]], [WHOLE[1]]]


def meeting(requests: list[Any], *numbers: int) -> list[Any]:
    """The same part, of a rank that has met these requests."""
    requests[-1].close.deletes.extend(numbers)
    return requests


def numbers(session: PublishSession) -> list[int]:
    return [request.number for request in session.deletes]


async def ask(service: Service, ids: list[int], table: TableSpec = USER) -> int:
    return (await service.removals.delete_rows("clicks", table.name, ids)).request.number


@in_service()
async def test_rows_of_a_table_that_changes_meanwhile_are_not_asked_for(service: Service) -> None:
    await publish(service, takes_deletes=True)
    deletes = service.models.coordinators["clicks"].deletes
    for later, error in (([ITEM], NotFound), ([replace(USER, rows=999), ITEM], Contradiction)):
        seen = iter([[USER, ITEM], later])
        with pytest.raises(error):
            await deletes.ask(USER.name, [3], seen.__next__, "somebody")
        assert deletes.requests == {}


@in_service()
async def test_a_request_is_handed_out_until_a_cut_carries_it(service: Service) -> None:
    rank = await publish(service, takes_deletes=True)
    first, second = await ask(service, [7, 3, 7]), await ask(service, [2], ITEM)
    assert first < second
    assert numbers(rank) == [first, second]
    assert rank.deletes[0].ids.tolist() == [3, 7]
    assert (rank.deletes[1].table, rank.deletes[1].ids.tolist()) == (ITEM.name, [2])
    await send(rank, part(2, []))
    assert numbers(rank) == [first, second], "the cut did not carry them"
    await send(rank, meeting(part(3, []), first))
    assert numbers(rank) == [second]
    await send(rank, meeting(part(4, []), first, second))
    assert numbers(rank) == []
    assert service.removals.pending_deletes() == []


async def test_a_request_outlives_the_service(tmp_path: Path) -> None:
    asked = []
    async with opened(tmp_path) as service:
        rank = await publish(service, takes_deletes=True)
        asked.extend([await ask(service, [3]), await ask(service, [4])])
        await send(rank, meeting(part(2, []), asked[0]))
    async with opened(tmp_path) as service:
        (pending,) = service.removals.pending_deletes()
        assert (pending.model, pending.request.table, pending.request.ids.tolist()) == ("clicks", USER.name, [4])
        assert pending.reason == "no run is publishing; the next run deletes them"
        rank = await join(service, run="run-2", started=2, takes_deletes=True)
        assert numbers(rank) == asked[1:]


class Watched(list[int]):
    """Ids that note the threads that read them one by one."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__(ids)
        self.readers = set[int]()

    def __iter__(self) -> Iterator[int]:
        self.readers.add(threading.get_ident())
        return super().__iter__()


@in_service()
async def test_ids_of_a_request_are_read_outside_the_event_loop(service: Service) -> None:
    """There may be millions."""
    await publish(service)
    ids = Watched([3])
    await ask(service, ids)
    assert ids.readers.isdisjoint({threading.get_ident()})
    assert ids.readers


def deleting(step: int, ids: list[int], number: int) -> list[Any]:
    """A part of a rank that has met a request, with what it has deleted."""
    return meeting([delete_chunk(step, 0, ids), close(step, len(ids))], number)


async def test_a_run_that_goes_back_before_a_delete_is_asked_again(tmp_path: Path) -> None:
    """But not for rows that were trained afterwards; over restarts, and once it has met it, no more."""
    held = list[Position]()
    async with opened(tmp_path) as service:
        rank = await join(service, takes_deletes=True)
        held.append(await send(rank, full_part(1, random_rows(0), WHOLE)) or Position())
        number = await ask(service, [3, 5, 7])
        held.append(await send(rank, deleting(2, [3, 5, 7], number)) or Position())
        await send(rank, part(3, [(0, [7], np.ones((1, USER.dim), "<f4"))]))
        await service.models.coordinators["clicks"].drain()
    async with opened(tmp_path) as service:
        again: dict[str, Any] = {"takes_deletes": True, "takes_changes": True}
        rank = await join(service, run="late", started=2, continues=held[1], **again)
        assert numbers(rank) == [], "it has met it before"
        rank = await join(service, run="back", started=3, continues=held[0], **again)
        (request,) = rank.deletes
        assert (request.table, request.ids.tolist()) == (USER.name, [3, 5])
        part_of_all = part(2, [(0, [3, 5, 7], np.ones((3, USER.dim), "<f4"))])
        await send(rank, part_of_all)
        await send(rank, deleting(3, [3, 5], request.number))
        await service.models.coordinators["clicks"].drain()
        assert service.models["clicks"].tables[0].deleted(np.array([3, 5, 7])).tolist() == [True, True, False]
        rank = await join(service, run="further back", started=4, continues=held[0], **again)
        assert [each.ids.tolist() for each in rank.deletes] == [[3, 5]]


@in_service()
async def test_a_delete_is_done_until_its_replacement_is_written(service: Service) -> None:
    rank = await join(service, takes_deletes=True)
    held = await send(rank, full_part(1, random_rows(0), WHOLE)) or Position()
    number = await ask(service, [3, 5])
    await send(rank, deleting(2, [3, 5], number))
    done = rank.coordinator.deletes.done
    with pytest.raises(LogFull), done.replaced(number):
        raise LogFull("the log is full")
    assert len(done.after(1)) == 1
    rank = await join(service, run="back", started=2, continues=held, takes_deletes=True, takes_changes=True)
    assert [each.ids.tolist() for each in rank.deletes] == [[3, 5]]
    await asyncio.wrap_future(log_of(service).put("x", None))
    assert (done.after(1), log_of(service).items("deleted/clicks/")) == ([], {})


@in_service()
async def test_only_the_newest_done_deletes_of_present_tables_are_kept(service: Service) -> None:
    rank = await publish(service, takes_deletes=True)
    rank.coordinator.deletes.done.most_ids = 3
    for step, (table, ids) in enumerate(((USER, [1, 2]), (ITEM, [1]), (USER, [3])), start=2):
        await send(rank, meeting(part(step, []), await ask(service, ids, table)))
    done = service.models.coordinators["clicks"].deletes.done
    assert [(each.table, each.ids.tolist()) for each in done.after(0)] == [(ITEM.name, [1]), (USER.name, [3])]
    assert [each.ids.tolist() for each in done.after(3)] == [[3]]
    service.models.coordinators["clicks"].deletes.forget(ITEM.name)
    assert [each.table for each in done.after(0)] == [USER.name]
    await asyncio.to_thread(log_of(service).put("x", None).result)
    assert len(log_of(service).items("deleted/clicks/")) == 1


@in_service()
async def test_all_ranks_must_delete_with_the_same_cut(service: Service) -> None:
    async def both(ranks: list[PublishSession], *parts: list[Any]) -> None:
        await asyncio.gather(*(send(rank, requests) for rank, requests in zip(ranks, parts, strict=True)))

    ranks = [
        await join(service, world_size=2, rank=rank, shards=HALVES[rank], takes_deletes=True) for rank in (0, 1)
    ]
    await both(ranks, full_part(1, random_rows(0), HALVES[0]), full_part(1, random_rows(0), HALVES[1]))
    number = await ask(service, [3])
    await both(ranks, meeting(part(2, []), number), part(2, []))
    assert [numbers(rank) for rank in ranks] == [[number], [number]]
    await both(ranks, meeting(part(3, []), number), meeting(part(3, []), number))
    assert service.removals.pending_deletes() == []


@in_service()
async def test_a_cut_that_is_not_sealed_meets_nothing(service: Service) -> None:
    await publish(service, takes_deletes=True)
    number = await ask(service, [3])
    other = await join(service, run="run-2", started=2, takes_deletes=True)
    with pytest.raises(DeltasyncError, match="publish every row first"):
        await send(other, meeting(part(2, []), number))
    assert numbers(other) == [number]


@in_service()
async def test_what_a_request_waits_for_is_said(service: Service) -> None:
    def waits(service: Service, number: int = 0) -> str:
        return service.removals.pending_deletes()[number].reason

    rank = await publish(service, run="old", takes_deletes=False)
    pending = await service.removals.delete_rows("clicks", USER.name, [1])
    assert pending.reason == "the trainer of run old does not support deletes: update it"
    assert rank.deletes == []
    partly = [Shard.whole(ITEM)]
    new = await join(service, run="new", started=2, tables=[ITEM], shards=partly, takes_deletes=True)
    assert new.deletes == []
    assert (
        waits(service) == "run new publishes no embedding table of that name; the next run with one deletes them"
    )
    await ask(service, [1], ITEM)
    assert "new deletes them with one" in waits(service, 1)
    new.end("")
    assert waits(service, 1) == "no run is publishing; the next run deletes them"


@pytest.mark.parametrize(
    ("model", "table", "ids", "error", "message"),
    [
        ("bids", USER.name, [1], NotFound, "no model 'bids'; models: clicks"),
        (
            "clicks",
            "nowhere",
            [1],
            NotFound,
            f"no table 'nowhere'; its embedding tables: {ITEM.name}, {USER.name}",
        ),
        (
            "clicks",
            USER.name,
            [0, 40],
            InvalidInput,
            f"row 40 is outside table '{USER.name}' of model 'clicks'",
        ),
        ("clicks", USER.name, [2**63, 1], InvalidInput, "an id does not fit into 64 bits"),
        ("clicks", USER.name, [], InvalidInput, "0 ids: use 1 to 100000"),
        ("clicks", USER.name, [1] * 100_001, InvalidInput, "100001 ids: use 1 to 100000"),
        ("clicks", "bias", [0], InvalidInput, "table 'bias' of model 'clicks' is of kind 'parameter'"),
    ],
)
@in_service()
async def test_what_cannot_be_asked_for(
    service: Service, model: str, table: str, ids: list[int], error: type[Exception], message: str
) -> None:
    bias = TableSpec("bias", 1, 4, np.dtype("<f4"), TableKind.PARAMETER)
    await publish(service, tables=[USER, ITEM, bias])
    with pytest.raises(error, match=message):
        await service.removals.delete_rows(model, table, ids)
    assert service.removals.pending_deletes() == []
    assert log_of(service).items("delete/") == {}


async def test_a_request_outlives_the_caller(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        await publish(service)
        asking = asyncio.create_task(ask(service, [3]))
        while not service.removals.pending_deletes():
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        (pending,) = service.removals.pending_deletes()
    async with opened(tmp_path) as service:
        assert [each.request.number for each in service.removals.pending_deletes()] == [pending.request.number]


@in_service()
async def test_requests_that_pile_up_are_refused(service: Service) -> None:
    (await publish(service)).coordinator.deletes.most_ids = 3
    await ask(service, [1, 2])
    with pytest.raises(
        Contradiction, match="2 rows of model 'clicks' wait to be deleted, and 2 more would exceed the limit of 3"
    ):
        await ask(service, [1, 2])


@in_service()
async def test_a_rank_is_handed_a_bounded_number_of_rows(service: Service) -> None:
    rank = await publish(service, takes_deletes=True)
    rank.coordinator.deletes.handed_ids = 3
    asked = [await ask(service, ids) for ids in ([1, 2, 3, 4], [5], [6, 7], [8])]
    await send(rank, meeting(part(2, [])))
    assert numbers(rank) == asked[:1], "one is handed out, however large it is"
    await send(rank, meeting(part(3, []), asked[0]))
    assert numbers(rank) == asked[1:3]


@in_service()
async def test_a_clock_that_was_set_back_makes_no_number_twice(service: Service) -> None:
    last = 2**62
    rank = await publish(service)
    rank.coordinator.deletes.requests[last] = DeleteRequest(last, USER.name, np.array([1]))
    assert [await ask(service, [1]) for _ in range(2)] == [last + 1, last + 2]
