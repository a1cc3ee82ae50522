import asyncio
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import lmdb
import pytest
from tests.support.damage import flipped
from tests.support.log import Heads, held_up

from deltasync.base.errors import StorageFailed
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions, LogUnavailable, WriteQueue
from deltasync.log.records import key_of
from deltasync.log.volume import VolumeFailed

TIMEOUT = 20


@pytest.fixture
def options(tmp_path: Path) -> LogOptions:
    return LogOptions(directory=tmp_path / "log", max_bytes=8 << 20)


@pytest.fixture
def log(options: LogOptions) -> Iterator[LmdbStore]:
    log = LmdbStore(options)
    yield log
    log.close()


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> Heads:
    return Heads(monkeypatch)


def numbers(log: LmdbStore, stream: str) -> list[tuple[int, int]]:
    return [(record.number, record.index) for record in log.read(stream)]


def test_the_newest_number_is_that_of_the_stream_alone(log: LmdbStore) -> None:
    assert log.newest("history/a") == 0
    for stream, number in (("history/a", 3), ("history/ab", 9), ("cuts/m", 5), ("history/a", 7)):
        log.append(stream, number, 0, 0, b"line").result(TIMEOUT)
    streams = ("cuts/m", "history/a", "history/ab", "history/b", "a", "z")
    assert [log.newest(each) for each in streams] == [5, 7, 9, 0, 0, 0]
    log.truncate("history/a", 7).result(TIMEOUT)
    assert log.newest("history/a") == 0


@pytest.mark.parametrize("before", [None, b"", "a log"])
def test_a_log_that_could_not_be_made_or_opened_is_at_the_next_start(
    options: LogOptions, heads: Heads, before: bytes | str | None
) -> None:
    file = options.directory / "data.mdb"
    if isinstance(before, str):
        with closing(LmdbStore(options)) as log:
            log.append("cuts/m", 4, 1, 0, b"first").result(TIMEOUT)
    elif before is not None:
        options.directory.mkdir()
        file.write_bytes(before)
    heads.opened, heads.left = False, b"" if isinstance(before, str) else bytes(4096)  # Room for one of two heads.
    with pytest.raises(StorageFailed, match="Input/output error"):
        LmdbStore(options)
    heads.opened = True
    with closing(LmdbStore(options)) as log:
        assert numbers(log, "cuts/m") == ([(4, 0)] if isinstance(before, str) else [])


def test_a_changed_byte_of_the_file_is_an_error_that_names_its_record(options: LogOptions) -> None:
    log = LmdbStore(options)
    log.append("cuts/m", 4, 1, 0, b"first")
    log.append("cuts/m", 4, 1, 1, b"the rows of a part")
    log.put("consumer/a", b"its policy").result(TIMEOUT)
    log.close()
    file = options.directory / "data.mdb"
    data = file.read_bytes()
    for old, new in ((b"the rows of a part", b"the rows of a pArt"), (b"its policy", b"its polizy")):
        assert data.count(old) == 1
        data = data.replace(old, new)
    file.write_bytes(data)
    log = LmdbStore(options)
    records = log.read("cuts/m")
    assert bytes(next(records).payload) == b"first"
    with pytest.raises(
        StorageFailed,
        match="the log's record 1 of rank 1 of version 4 of model 'm' is damaged: restore a backup",
    ):
        next(records)
    with pytest.raises(StorageFailed, match="the log's record consumer/a is damaged: restore a backup"):
        log.items("consumer/")
    assert log.items("d") == {}
    log.close()


@pytest.mark.parametrize("bit", range(8 * 24))
def test_a_flipped_bit_in_a_key_is_found_by_read_and_by_streams(options: LogOptions, bit: int) -> None:
    log = LmdbStore(options)
    for number in range(1, 4):
        log.append("cuts/me", number, 0, 0, b"x").result(TIMEOUT)
    log.close()
    key = key_of("cuts/me", 2, 0, 0)
    assert len(key) == 24
    data = (options.directory / "data.mdb").read_bytes()
    (options.directory / "data.mdb").write_bytes(
        data.replace(key, flipped(key, bit))
    )  # Where it is, out of order.
    log = LmdbStore(options)
    with pytest.raises(StorageFailed, match="is damaged"):
        assert [list(log.read(stream)) for stream in log.streams()]
    log.close()


@pytest.mark.parametrize("content", [b"no LMDB file" * 1000, b"x"])
def test_a_file_that_is_no_log_is_an_error_that_says_where(options: LogOptions, content: bytes) -> None:
    options.directory.mkdir()
    (options.directory / "data.mdb").write_bytes(content)
    with pytest.raises(StorageFailed, match=f"the log in {options.directory} cannot be opened"):
        LmdbStore(options)


def test_a_log_full_to_its_last_page_is_whole_under_a_higher_cap(tmp_path: Path) -> None:
    log = LmdbStore(LogOptions(directory=tmp_path, max_bytes=1 << 20))
    writes = [log.append("m", 1, 0, number, bytes(3000)) for number in range(300)]
    kept = [number for number, write in enumerate(writes) if not write.exception(TIMEOUT)]
    assert 100 < len(kept) < 300
    log.close()
    log = LmdbStore(LogOptions(directory=tmp_path, max_bytes=2 << 20))
    assert [index for _, index in numbers(log, "m")] == kept
    log.truncate("m", 1).result(TIMEOUT)
    log.append("m", 2, 0, 0, bytes(3000)).result(TIMEOUT)
    log.close()


def test_rows_leave_room_to_delete_them(tmp_path: Path) -> None:
    """Else a log filled with small records could never be cut again."""
    log = LmdbStore(LogOptions(directory=tmp_path, max_bytes=1 << 20))
    for version in range(1, 400):
        written = log.append("m", version, 0, 0, bytes(3000))
        if not written.exception(TIMEOUT):
            log.append("seals/m", version, 0, 0, bytes(300)).exception(TIMEOUT)
    assert isinstance(written.exception(TIMEOUT), StorageFailed)
    assert log.refusing
    log.put("model/m", bytes(100)).result(TIMEOUT)
    log.truncate("m", 400).result(TIMEOUT)
    log.put("n", b"").result(TIMEOUT)
    log.append("m", 401, 0, 0, bytes(3000)).result(TIMEOUT)
    log.close()


def test_a_write_that_does_not_fit_takes_no_other_with_it(log: LmdbStore) -> None:
    """Else a rank that begins its part anew could never drop what fills the log: both are committed together."""
    with held_up(log):
        writes = [
            log.put("before", b""),
            log.append("m", 1, 0, 0, bytes(7 << 20)),
            log.append("m", 1, 0, 1, bytes(7 << 20)),
            log.put("after", b""),
        ]
    failures = [write.exception(TIMEOUT) for write in writes]
    assert isinstance(failures.pop(2), StorageFailed)
    assert failures == [None, None, None]
    assert list(log.items("")) == ["after", "before"]


@pytest.mark.parametrize(
    ("size", "count", "expected"), [(1, 5000, [4096, 904]), (1, 40, [40]), (8 << 20, 10, [4, 4, 2])]
)
def test_writes_that_gather_during_a_commit_share_the_next_up_to_a_bound(
    size: int, count: int, expected: list[int]
) -> None:
    queue = WriteQueue()
    for _ in range(count):
        queue.submit(nothing, size)
    queue.close()
    batches, last = list[int](), False
    while not last:
        batch, last = queue.take()
        batches += [len(batch)] if batch else []
    assert batches == expected


def test_one_write_that_fails_costs_the_many_beside_it_few_commits(log: LmdbStore) -> None:
    """Each of which waits for the disk."""
    failed: Future[None] = Future()
    failed.set_exception(StorageFailed("told before"))
    log.put("before", b"x").result(TIMEOUT)
    before = log._opened().info()["last_txnid"]
    with held_up(log):
        batch = [
            log.append("m", 1, 0, number, b"x", after=[failed] if number == 300 else []) for number in range(1000)
        ]
    errors = [done.exception(TIMEOUT) for done in batch]
    assert [number for number, error in enumerate(errors) if error] == [300]
    assert len(numbers(log, "m")) == 999
    assert log._opened().info()["last_txnid"] - before <= 20


def test_what_is_written_is_not_kept_in_memory(log: LmdbStore) -> None:
    """Though nothing is written after it."""
    freed, payload = threading.Event(), memoryview(b"rows")
    weakref.finalize(payload, freed.set)
    written = log.append("m", 1, 0, 0, payload)
    del payload
    written.result(TIMEOUT)
    assert freed.wait(TIMEOUT)


def test_a_write_to_a_log_that_is_closed_is_refused(options: LogOptions) -> None:
    log = LmdbStore(options)
    log.close()
    for write in (log.put("n", b""), log.append("s", 1, 0, 0, b"x", patient=True)):
        assert isinstance(write.exception(0), StorageFailed)


def test_a_write_survives_that_who_waits_for_it_is_cancelled(log: LmdbStore) -> None:
    """A client that disconnects must not take the log's thread with it."""

    async def cancelled() -> None:
        waiting = asyncio.ensure_future(asyncio.wrap_future(log.append("m", 1, 0, 0, b"x")))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    for _ in range(50):
        asyncio.run(cancelled())
    log.append("m", 1, 0, 1, b"y").result(TIMEOUT)
    assert numbers(log, "m") == [(1, 0), (1, 1)]


@pytest.mark.parametrize(
    "error",
    [lmdb.DiskError("mdb_txn_commit: Input/output error"), MemoryError("no memory"), TypeError("no bytes")],
)
def test_any_error_of_a_write_reaches_its_waiter_and_the_next_succeeds(
    log: LmdbStore, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise error

    with pytest.raises(StorageFailed, match=str(error)) as failed:
        log.queue.submit(broken, 0).result(TIMEOUT)
    assert failed.value.__cause__ is error
    assert str(error) in caplog.text
    assert not log.refusing
    log.append("m", 1, 0, 0, b"x").result(TIMEOUT)
    assert log.items("") == {}


def nothing(_: object) -> None:
    pass


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


def test_after_a_refused_head_page_reads_and_the_next_write_succeed(heads: Heads, options: LogOptions) -> None:
    with closing(LmdbStore(options)) as log:
        log.append("m", 1, 0, 0, b"x").result(TIMEOUT)
        for _ in range(3):
            heads.refused = True
            with held_up(log):
                writes = [log.append("m", 2, 0, number, b"y") for number in range(5)]
            assert [type(each.exception(TIMEOUT)) for each in writes] == [VolumeFailed] * 5
            assert "look for errors of the device" in log.volume.trouble
            assert (numbers(log, "m"), log.items("")) == ([(1, 0)], {})
        heads.refused = False
        log.append("m", 2, 0, 0, b"y").result(TIMEOUT)
        assert (numbers(log, "m"), log.volume.trouble) == ([(1, 0), (2, 0)], "")


def test_a_log_that_cannot_be_opened_again_is_tried_with_each_write(heads: Heads, options: LogOptions) -> None:
    with closing(LmdbStore(options)) as log:
        log.append("m", 1, 0, 0, b"x").result(TIMEOUT)
        used = log.used_bytes()
        heads.refused, heads.opened = True, False
        for _ in range(3):
            with pytest.raises(VolumeFailed, match="look for errors of the device"):
                log.put("n", b"").result(TIMEOUT)
            for read in (lambda: list(log.read("m")), lambda: log.items(""), log.streams):
                with pytest.raises(LogUnavailable, match=r"cannot be read: .*cannot be opened: .*look for"):
                    read()
            assert (log.used_bytes(), bool(log.volume.trouble)) == (used, True)
        heads.refused, heads.opened = False, True
        log.put("n", b"").result(TIMEOUT)
        assert (numbers(log, "m"), log.items("")) == ([(1, 0)], {"n": b""})
        heads.refused, heads.opened = True, False
        assert log.put("n", b"1").exception(TIMEOUT)  # It ends in order.


def test_a_refused_write_that_landed_is_read_by_the_next_service(heads: Heads, options: LogOptions) -> None:
    """Whoever waited for it was told that it is not: this one knows nothing of it."""
    with closing(LmdbStore(options)) as log:
        log.append("m", 1, 0, 0, b"x").result(TIMEOUT)
        heads.refused = heads.landed = True
        assert isinstance(log.append("m", 2, 0, 0, b"y").exception(TIMEOUT), VolumeFailed)
        heads.refused = False
        for _ in range(2):
            with pytest.raises(VolumeFailed, match=r"a write that the disk had refused .*: restart the service"):
                log.put("n", b"").result(TIMEOUT)
            assert "restart the service" in log.volume.trouble
    with closing(LmdbStore(options)) as log:
        log.put("n", b"").result(TIMEOUT)
        assert (numbers(log, "m"), log.items("")) == ([(1, 0), (2, 0)], {"n": b""})
