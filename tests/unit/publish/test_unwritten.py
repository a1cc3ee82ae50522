"""How much a stream hands to the log before it waits for the disk."""

import asyncio
from concurrent.futures import Future

import pytest
from tests.unit.support.async_tests import in_loop

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
@in_loop()
async def test_so_many_are_not_waited_for_and_with_one_more_the_first_is(count: int, size: int) -> None:
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


@pytest.mark.parametrize("at_once", [True, False])
@in_loop()
async def test_a_write_that_failed_is_told_by_who_waits_for_it(at_once: bool) -> None:
    chunks = UnwrittenChunks(WriteQueue())
    failed, *_ = added(chunks, 17, MIB)
    if not at_once:
        asyncio.get_running_loop().call_soon(failed.set_exception, StorageFailed("full"))
    else:
        failed.set_exception(StorageFailed("full"))
    with pytest.raises(StorageFailed, match="full"):
        await asyncio.wait_for(chunks.wait_for_room(), 20)


@in_loop()
async def test_what_is_taken_is_no_longer_counted() -> None:
    chunks = UnwrittenChunks(WriteQueue())
    writes = added(chunks, 16, MIB)
    assert chunks.take() == tuple(writes)
    added(chunks, 16, MIB)
    await asyncio.wait_for(chunks.wait_for_room(), 20)


@in_loop()
async def test_while_the_log_has_too_much_of_all_streams_one_that_submits_waits_for_what_it_has_there() -> None:
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
