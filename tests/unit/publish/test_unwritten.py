"""How much a stream hands to the log before it waits for the disk."""

import asyncio
from concurrent.futures import Future

import pytest

from deltasync.core.errors import StorageFailed
from deltasync.publish.unwritten import UnwrittenChunks
from deltasync.storage.write_queue import WriteQueue

MIB = 1 << 20


def added(chunks: UnwrittenChunks, count: int, size: int) -> list[Future[None]]:
    writes = [Future[None]() for _ in range(count)]
    for write in writes:
        chunks.add(write, size)
    return writes


@pytest.mark.parametrize(("count", "size"), [(16, MIB), (4096, 1)])
def test_so_many_are_not_waited_for_and_with_one_more_the_first_is(count: int, size: int) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


@pytest.mark.parametrize("at_once", [True, False])
def test_a_write_that_failed_is_told_by_who_waits_for_it(at_once: bool) -> None:
    async def scenario() -> None:
        chunks = UnwrittenChunks(WriteQueue())
        failed, *_ = added(chunks, 17, MIB)
        if not at_once:
            asyncio.get_running_loop().call_soon(failed.set_exception, StorageFailed("full"))
        else:
            failed.set_exception(StorageFailed("full"))
        with pytest.raises(StorageFailed, match="full"):
            await asyncio.wait_for(chunks.wait_for_room(), 20)

    asyncio.run(scenario())


def test_what_is_taken_is_no_longer_counted() -> None:
    async def scenario() -> None:
        chunks = UnwrittenChunks(WriteQueue())
        writes = added(chunks, 16, MIB)
        assert chunks.take() == tuple(writes)
        added(chunks, 16, MIB)
        await asyncio.wait_for(chunks.wait_for_room(), 20)

    asyncio.run(scenario())
