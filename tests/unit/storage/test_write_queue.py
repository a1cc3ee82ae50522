"""What was submitted and is not written yet: counted, and handed over in its order."""

from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.log import held_up

from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_store import LogOptions
from deltasync.storage.write_queue import WriteQueue

TIMEOUT = 20


def nothing(_: object) -> None:
    pass


@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=60), st.integers(1, 40_000))
def test_writes_are_handed_over_in_their_order_and_none_stays_behind_in_a_full_queue(
    writes: list[tuple[int, bool]], most_bytes: int
) -> None:
    queue, submitted = WriteQueue(most_bytes), list[Future[None]]()
    for size, patient in writes:
        submitted.append(queue.submit(nothing, size, patient=patient))
        assert queue.bytes == sum(1024 + each for each, _ in writes[: len(submitted)])
        assert queue.full == (queue.bytes > most_bytes)
        handed_over = len(submitted) - len(queue._waiting)
        assert handed_over == len(submitted) if queue.full or not patient else handed_over > len(submitted) - 8
    queue.close()
    taken, closing = [], False
    while not closing:
        batch, closing = queue.take()
        taken += batch
    assert [each.done for each in taken] == submitted
    queue.end(taken)
    assert queue.bytes == 0


def test_a_lower_limit_leaves_no_write_waiting_for_others() -> None:
    """Who waits while the queue is full waits for what it has submitted itself."""
    queue = WriteQueue(1 << 20)
    patient = queue.submit(nothing, 1 << 10, patient=True)
    queue.limit(1 << 10)
    assert queue.full
    batch, _ = queue.take()
    assert [each.done for each in batch] == [patient]


@pytest.mark.parametrize("fails", [False, True])
def test_a_write_counts_until_it_is_written_or_refused(tmp_path: Path, fails: bool) -> None:
    log = LmdbStore(LogOptions(directory=tmp_path, max_bytes=1 << 20))
    with held_up(log):
        before = log.queue.bytes
        payload = bytes((2 << 20) if fails else 5000)
        writes = [log.append("s", 1, 0, 0, payload), log.put("n", bytes(700)), log.put_all({"a": bytes(300)})]
        assert len(payload) + 1000 <= log.queue.bytes - before <= len(payload) + 5000
        assert not any(write.done() for write in writes)
    assert [write.exception(TIMEOUT) is not None for write in writes] == [fails, False, False]
    assert log.queue.bytes == 0
    log.close()
