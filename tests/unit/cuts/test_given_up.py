"""Cuts that are given up: the log has nothing of them any more, whatever becomes of their ranks."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.local_service import join, send
from tests.support.log import log_of
from tests.support.wire import chunk, part
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import Contradiction
from deltasync.core.tables import Shard, TableSpec
from deltasync.cuts.coordinator import FORSAKEN_SECONDS
from deltasync.cuts.machine import MOST_TRIES, Refusals, cut_fits, enough, first_cut_fits, whole_bytes
from deltasync.cuts.session import PublishSession
from deltasync.service.service import Service

WIDE = TableSpec("wide", 1 << 16, 4)
FIELDS: dict[str, Any] = {"tables": [WIDE], "shards": [Shard.whole(WIDE)]}


async def begin(service: Service, rank: int = 0, step: int = 1, **fields: Any) -> PublishSession:
    """A rank of two that has sent a large part of a cut, and no close."""
    session = await join(service, rank=rank, world_size=2, **FIELDS | fields)
    ids = range(20_000)
    await send(session, [chunk(step, 0, ids, np.ones((len(ids), 4), "<f4"))])
    return session


async def logged(service: Service) -> int:
    """Bytes that the log has of cuts, once all is written."""
    await asyncio.wrap_future(log_of(service).put("after", b""))
    return sum(len(each.payload) for each in log_of(service).read("cuts/clicks"))


@in_service()
async def test_parts_of_ranks_that_have_gone_for_long_are_dropped(service: Service) -> None:
    first, second = await begin(service), await begin(service, rank=1)
    ranks = first.coordinator
    assert await logged(service)
    used = log_of(service).used_bytes()
    first.end("gone")
    ranks.abandon_forsaken(1000)
    ranks.abandon_forsaken(9000)
    assert await logged(service), "a rank is there"
    second.end("gone")
    ranks.abandon_forsaken(9001)
    ranks.abandon_forsaken(9001 + FORSAKEN_SECONDS - 1)
    assert await logged(service), "they may come back"
    ranks.abandon_forsaken(9001 + FORSAKEN_SECONDS)
    assert await logged(service) == 0
    assert log_of(service).used_bytes() < used - 500_000
    assert ranks.open_cut is None


@in_service()
async def test_a_rank_that_comes_back_has_all_the_time_again(service: Service) -> None:
    session = await begin(service)
    ranks = session.coordinator
    session.end("gone")
    ranks.abandon_forsaken(1000)
    again = await begin(service)
    ranks.abandon_forsaken(2000)
    again.end("gone")
    ranks.abandon_forsaken(2001)
    assert await logged(service)
    assert ranks.open_cut


@in_service()
async def test_parts_of_a_run_are_dropped_when_a_later_one_takes_over(service: Service) -> None:
    await begin(service)
    await begin(service, rank=1)
    await join(service, run="later", started=2, **FIELDS)
    assert await logged(service) == 0


@in_service()
async def test_all_ranks_of_a_cut_that_cannot_fit_are_told_so_and_the_log_is_not_full_for_it(
    service: Service,
) -> None:
    halves = [Shard(WIDE, first, 1 << 15, 0, 4) for first in (0, 1 << 15)]
    ranks = [
        await join(service, rank=rank, world_size=2, tables=[WIDE], shards=[half])
        for rank, half in enumerate(halves)
    ]
    rows = np.ones((1 << 14, 4), "<f4")
    parts = [
        part(1, [(0, range(first, first + (1 << 14)), rows) for first in starts], full=True)
        for starts in ((0, 1 << 14), (1 << 15, 3 << 14))
    ]
    await asyncio.gather(*(send(rank, each) for rank, each in zip(ranks, parts, strict=True)))
    await service.models.coordinators["clicks"].drain()
    for _ in range(2):  # The log is kept back to the second newest checkpoint.
        await service.checkpoints.make("clicks")
    waiting = asyncio.create_task(send(ranks[0], part(2, [])))
    await asyncio.sleep(0)
    log_of(service).capacity = 600_000
    later = [(0, range(first, first + (1 << 14)), rows) for first in (1 << 15, 3 << 14)]
    with pytest.raises(Contradiction, match=r"needs 104[0-9]{4} bytes in the log, which has room for 600000"):
        await send(ranks[1], part(2, later))
    with pytest.raises(Contradiction, match="which has room for 600000"):
        await waiting
    assert "too large for the log" in service.models["clicks"].failure
    assert service.models.troubles == [f"model 'clicks': {service.models['clicks'].failure}"]
    assert await logged(service) == 0
    assert not log_of(service).refusing


def test_what_fits_and_what_to_set_are_said() -> None:
    table = TableSpec("t", 1000, 10)
    needed = whole_bytes([table])
    assert needed == 1000 * (8 + 40 + 8)
    assert first_cut_fits([table], needed).yes
    refused = first_cut_fits([table], needed - 1)
    assert not refused.yes
    for number in (needed, needed - 1, enough(needed)):
        assert str(number) in refused.reason
    assert not cut_fits(5, 101, 100, [table]).yes
    assert cut_fits(5, 100, 100, [table], tries=MOST_TRIES - 1).yes
    assert not cut_fits(5, 100, 100, [table], tries=MOST_TRIES).yes


def test_only_refusals_of_a_large_cut_after_room_was_made_count() -> None:
    refusals = Refusals().after(1, 90, 100)
    assert refusals.tries == 0
    assert refusals.after(1, 90, 100).tries == 0, "no room was made"
    room = replace(refusals, room_made=True)
    again = room.after(1, 90, 100)
    assert again.tries == 1
    assert replace(again, room_made=True).after(1, 90, 100).tries == 2
    assert room.after(2, 90, 100).tries == 0, "another cut"
    assert room.after(1, 20, 100).tries == 0, "others fill the log"
