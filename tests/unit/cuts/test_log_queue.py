"""All streams together hand to the log what its queue takes, and a chunk each; then they wait."""

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.local_service import join, run, send, sources
from tests.support.log import held_up, log_of
from tests.support.wire import part
from tests.unit.support.async_tests import in_service

from deltasync.access.limits import LimitOptions
from deltasync.base.errors import StorageFailed
from deltasync.core.tables import Shard, TableSpec
from deltasync.cuts.session import UnwrittenChunks
from deltasync.log.log_store import WriteQueue
from deltasync.log.records import pack_layout
from deltasync.service.service import Service
from deltasync.status.answers import Answers

RANKS, CHUNKS, CHUNK_ROWS, BOUND = 6, 12, 500, 1 << 20
WIDE = TableSpec("wide", RANKS * CHUNKS * CHUNK_ROWS, 64)
SHARDS = [Shard(WIDE, rank * CHUNKS * CHUNK_ROWS, CHUNKS * CHUNK_ROWS, 0, WIDE.dim) for rank in range(RANKS)]
CHUNK_BYTES = CHUNK_ROWS * (WIDE.row_bytes + 8)


def test_ranks_that_publish_faster_than_the_disk_writes_wait(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        log_of(service).queue.limit(BOUND)
        sessions = [
            await join(service, rank=rank, world_size=RANKS, tables=[WIDE], shards=[SHARDS[rank]])
            for rank in range(RANKS)
        ]

        def requests(shard: Shard) -> list[Any]:
            firsts = range(shard.row_offset, shard.row_offset + shard.rows, CHUNK_ROWS)
            rows = np.ones((CHUNK_ROWS, WIDE.dim), "<f4")
            return part(1, [(0, range(first, first + CHUNK_ROWS), rows) for first in firsts], full=True)

        with held_up(log_of(service)):
            sending = [asyncio.create_task(send(each, requests(SHARDS[each.rank]))) for each in sessions]
            for _ in range(500):
                await asyncio.sleep(0)
            assert BOUND < log_of(service).queue.bytes < BOUND + (RANKS + 1) * (CHUNK_BYTES + 4096)
            assert not any(task.done() for task in sending)
            forgotten = log_of(service).put("n", b"")  # What makes room passes.
            assert not forgotten.done()
        positions = await asyncio.gather(*sending)
        assert {each.number for each in positions if each} == {1}
        assert log_of(service).queue.bytes == 0

    run(tmp_path, scenario)


@in_service()
async def test_many_opens_leave_the_loops_threads_to_others(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which write checkpoints and releases."""
    begun, go = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> bytes:
        begun.set()
        assert go.wait(20)
        return pack_layout(*arguments)

    monkeypatch.setattr("deltasync.cuts.session.pack_layout", slow)
    await service.publishing.open("clicks")
    opens = [asyncio.create_task(join(service)) for _ in range(50)]
    await asyncio.to_thread(begun.wait, 20)
    for _ in range(200):
        await asyncio.sleep(0)
    try:
        await asyncio.wait_for(asyncio.to_thread(lambda: None), 10)
    finally:
        go.set()
    await asyncio.gather(*opens, return_exceptions=True)


@in_service(limits=LimitOptions(log_queue_bytes=BOUND), housekeeping_seconds=0.001)
async def test_a_limit_that_is_read_again_counts_at_once(service: Service) -> None:
    assert log_of(service).queue.most_bytes == BOUND
    service.limits.options = LimitOptions(log_queue_bytes=2 * BOUND)
    keeper = asyncio.create_task(service.run())
    while log_of(service).queue.most_bytes != 2 * BOUND:
        await asyncio.sleep(0.001)
    keeper.cancel()
    with held_up(log_of(service)):
        assert (
            b'deltasync_limit_taken{limit="log_queue_bytes"} 1024.0' in await Answers(sources(service)).metrics()
        )


MIB = 1 << 20


def added(chunks: UnwrittenChunks, count: int, size: int) -> list[Future[None]]:
    writes = [Future[None]() for _ in range(count)]
    for write in writes:
        chunks.add(write, size)
    return writes


@pytest.mark.parametrize(("count", "size"), [(16, MIB), (4096, 1)])
async def test_a_stream_waits_for_its_first_write_beyond_its_bound(count: int, size: int) -> None:
    chunks = UnwrittenChunks(WriteQueue())
    first, *_ = added(chunks, count, size)
    await asyncio.wait_for(chunks.wait_for_room(), 20)
    added(chunks, 1, size)
    waiting = asyncio.create_task(chunks.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    first.set_result(None)
    await asyncio.wait_for(waiting, 20)
    assert len(chunks.take()) == count
    added(chunks, count, size)  # What was taken is no longer counted.
    await asyncio.wait_for(chunks.wait_for_room(), 20)


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_wait_for_a_failed_write_raises_its_error(at_once: bool) -> None:
    chunks = UnwrittenChunks(WriteQueue())
    failed, *_ = added(chunks, 17, MIB)
    if not at_once:
        asyncio.get_running_loop().call_soon(failed.set_exception, StorageFailed("full"))
    else:
        failed.set_exception(StorageFailed("full"))
    with pytest.raises(StorageFailed, match="full"):
        await asyncio.wait_for(chunks.wait_for_room(), 20)


async def test_while_the_queue_is_full_a_stream_waits_for_its_own_writes() -> None:
    """And for nothing else: what others have there may be what only it can bring to its end."""
    queue = WriteQueue(most_bytes=MIB)
    streams = [UnwrittenChunks(queue) for _ in range(2)]
    writes = list[Future[None]]()
    for each in streams:
        writes.append(queue.submit(lambda _: None, MIB, patient=True))
        each.add(writes[-1], MIB)
    batch, _ = queue.take()
    assert [each.done for each in batch] == writes  # Though they are patient.
    second = asyncio.create_task(streams[1].wait_for_room())
    await asyncio.sleep(0)
    assert not second.done()
    writes[1].set_result(None)
    await asyncio.wait_for(second, 20)  # The queue is full still.
    assert queue.full
    first = asyncio.create_task(streams[0].wait_for_room())
    queue.end(batch)
    writes[0].set_result(None)
    await asyncio.wait_for(first, 20)
    assert not queue.full
