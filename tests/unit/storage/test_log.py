import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.seals import sealed

from deltasync.core.errors import StorageFailed
from deltasync.storage.log import Log, LogOptions

TIMEOUT = 20


@pytest.fixture
def options(tmp_path: Path) -> LogOptions:
    return LogOptions(directory=tmp_path / "log", max_bytes=8 << 20)


@pytest.fixture
def log(options: LogOptions) -> Iterator[Log]:
    log = Log(options)
    yield log
    log.close()


def content(log: Log, model: str, version: int) -> list[tuple[int, int, bytes]]:
    return [(rank, number, bytes(payload)) for rank, number, payload in log.records(model, version)]


def test_records_are_kept_in_order_over_a_restart(options: LogOptions) -> None:
    log = Log(options)
    for rank, number, payload in [(1, 0, b"c"), (0, 1, b"b"), (0, 0, b"a"), (0, 256, b"z")]:
        log.append("m", 7, rank, number, payload)
    log.append("m", 8, 0, 0, b"next")
    log.append("other", 7, 0, 0, b"other").result(TIMEOUT)
    log.close()
    log = Log(options)
    assert content(log, "m", 7) == [(0, 0, b"a"), (0, 1, b"b"), (0, 256, b"z"), (1, 0, b"c")]
    assert content(log, "m", 8) == [(0, 0, b"next")]
    assert content(log, "other", 7) == [(0, 0, b"other")]
    assert content(log, "m", 9) == []
    log.close()


def test_seals_and_meta_are_kept_over_a_restart(options: LogOptions) -> None:
    log = Log(options)
    for version in (300, 1, 2):
        log.seal("m", sealed(version))
    log.seal("m2", sealed(5))
    log.put_meta("offset/a", {"version": 1})
    log.put_meta("offset/b", {"version": 2})
    log.put_meta("model/m", {"x": 1})
    log.put_meta("offset/b", None).result(TIMEOUT)
    log.close()
    log = Log(options)
    assert [each.version for each in log.seals("m")] == [1, 2, 300]
    assert log.seals("m", after=2) == [sealed(300)]
    assert log.seals("none") == []
    assert log.meta("offset/") == {"a": {"version": 1}}
    log.close()


@given(st.integers(0, 12), st.integers(0, 5))
def test_truncate_keeps_the_newer_rows_and_some_seals(
    tmp_path_factory: pytest.TempPathFactory, upto: int, kept: int
) -> None:
    log = Log(LogOptions(directory=tmp_path_factory.mktemp("log"), max_bytes=4 << 20))
    for version in range(1, 11):
        for rank in (0, 1):
            log.append("m", version, rank, 0, b"x")
        log.seal("m", sealed(version))
    log.append("a", 1, 0, 0, b"x")
    log.append("n", 1, 0, 0, b"x")
    log.truncate("m", upto, kept).result(TIMEOUT)
    assert [v for v in range(1, 11) if list(log.records("m", v))] == list(range(min(upto, 10) + 1, 11))
    assert [each.version for each in log.seals("m")] == list(range(max(upto - kept, 0) + 1, 11))
    assert [model for model in "an" if list(log.records(model, 1))] == ["a", "n"]
    log.close()


def test_what_was_not_sealed_is_dropped(log: Log) -> None:
    for version in (1, 2, 3):
        log.append("m", version, 0, 0, b"x")
    log.append("n", 2, 0, 0, b"x")
    log.drop_unsealed("m", 1).result(TIMEOUT)
    assert [v for v in (1, 2, 3) if list(log.records("m", v))] == [1]
    assert list(log.records("n", 2))


def test_a_part_is_dropped_alone(log: Log) -> None:
    for rank in (0, 1, 2):
        log.append("m", 1, rank, 0, bytes([rank]))
    log.drop_part("m", 1, 1).result(TIMEOUT)
    assert [rank for rank, _, _ in log.records("m", 1)] == [0, 2]


def test_a_seal_drops_what_an_abandoned_cut_of_a_larger_run_left(log: Log) -> None:
    for rank in range(4):
        log.append("m", 1, rank, 0, b"x")
    log.append("m", 2, 3, 0, b"x")
    log.seal("m", sealed(1, world_size=2)).result(TIMEOUT)
    assert [rank for rank, _, _ in log.records("m", 1)] == [0, 1]
    assert [rank for rank, _, _ in log.records("m", 2)] == [3]


def test_a_damaged_record_is_an_error_that_says_where(options: LogOptions) -> None:
    log = Log(options)
    log.append("m", 4, 1, 0, b"header")
    log.append("m", 4, 1, 1, b"the rows of a part").result(TIMEOUT)
    log.close()
    file = options.directory / "data.mdb"
    data = file.read_bytes()
    assert data.count(b"the rows of a part") == 1
    file.write_bytes(data.replace(b"the rows of a part", b"the rows of a pArt"))
    log = Log(options)
    records = log.records("m", 4)
    assert bytes(next(records)[2]) == b"header"
    with pytest.raises(StorageFailed, match="log record 1 of rank 1 of version 4 of model 'm' is damaged"):
        next(records)
    log.close()


@pytest.mark.parametrize("content", [b"no LMDB file" * 1000, b"x"])
def test_a_file_that_is_no_log_is_an_error_that_says_where(options: LogOptions, content: bytes) -> None:
    options.directory.mkdir()
    (options.directory / "data.mdb").write_bytes(content)
    with pytest.raises(StorageFailed, match=f"the log in {options.directory} cannot be opened"):
        Log(options)


def test_a_full_log_is_an_error_and_can_be_truncated(log: Log) -> None:
    failure = None
    for number in range(64):
        failure = log.append("m", 1, 0, number, bytes(1 << 20)).exception(TIMEOUT)
        if failure:
            break
    assert isinstance(failure, StorageFailed)
    assert "--log-max-bytes" in str(failure)
    held = len(list(log.records("m", 1)))
    assert held == number
    log.drop_part("m", 1, 0).result(TIMEOUT)
    log.put_meta("n", {}).result(TIMEOUT)  # LMDB gives pages back one commit later.
    log.append("m", 2, 0, 0, bytes(1 << 20)).result(TIMEOUT)
    assert content(log, "m", 1) == []


def test_a_log_full_to_its_last_page_is_whole_under_a_higher_cap(tmp_path: Path) -> None:
    log = Log(LogOptions(directory=tmp_path, max_bytes=1 << 20))
    writes = [log.append("m", 1, 0, number, bytes(3000)) for number in range(300)]
    kept = [number for number, write in enumerate(writes) if not write.exception(TIMEOUT)]
    assert 100 < len(kept) < 300
    log.close()
    log = Log(LogOptions(directory=tmp_path, max_bytes=2 << 20))
    assert [number for _, number, _ in log.records("m", 1)] == kept
    log.truncate("m", 1, 10).result(TIMEOUT)
    log.append("m", 2, 0, 0, bytes(3000)).result(TIMEOUT)
    log.close()


def test_rows_leave_room_to_delete_them(tmp_path: Path) -> None:
    """Else a log filled with small records could never be cut again."""
    log = Log(LogOptions(directory=tmp_path, max_bytes=1 << 20))
    for version in range(1, 400):
        written = log.append("m", version, 0, 0, bytes(3000))
        if not written.exception(TIMEOUT):
            log.seal("m", sealed(version, world_size=1)).result(TIMEOUT)
    assert isinstance(written.exception(TIMEOUT), StorageFailed)
    assert log.refusing
    log.put_meta("model/m", {"flushed": 400}).result(TIMEOUT)
    log.truncate("m", 400, 10).result(TIMEOUT)
    log.put_meta("n", {}).result(TIMEOUT)
    log.append("m", 401, 0, 0, bytes(3000)).result(TIMEOUT)
    log.close()


def test_a_write_that_does_not_fit_takes_no_other_with_it(
    options: LogOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a rank that begins its part anew could never drop what fills the log: both are committed together."""
    begun, go = threading.Event(), threading.Event()
    gather = Log._gather

    def held_back(self: Log) -> object:
        begun.set()
        assert go.wait(TIMEOUT)
        return gather(self)

    monkeypatch.setattr(Log, "_gather", held_back)
    log = Log(options)
    assert begun.wait(TIMEOUT)
    writes = [
        log.put_meta("before", {}),
        log.append("m", 1, 0, 0, bytes(7 << 20)),
        log.append("m", 1, 0, 1, bytes(7 << 20)),
        log.put_meta("after", {}),
    ]
    go.set()
    failures = [write.exception(TIMEOUT) for write in writes]
    assert isinstance(failures.pop(2), StorageFailed)
    assert failures == [None, None, None]
    assert list(log.meta("")) == ["after", "before"]
    log.close()


def test_writes_are_on_disk_in_the_order_they_were_given(log: Log) -> None:
    """A later write that is done means that all earlier ones are."""
    done: list[int] = []
    writes = [log.put_meta("n", {"value": number}) for number in range(100)]
    for number, write in enumerate(writes):
        write.add_done_callback(lambda _, number=number: done.append(number))  # type: ignore[misc]
    log.put_meta("last", {}).result(TIMEOUT)
    assert done == list(range(100))
    assert log.meta("n") == {"": {"value": 99}}


def test_what_gathers_during_a_commit_is_committed_at_once(
    options: LogOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    begun, go = threading.Event(), threading.Event()
    commit = Log._commit

    def slow(self: Log, batch: list[object]) -> None:
        batches.append(len(batch))
        begun.set()
        assert go.wait(TIMEOUT)
        commit(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(Log, "_commit", slow)
    log = Log(options)
    first = log.append("m", 1, 0, 0, b"x")
    assert begun.wait(TIMEOUT)
    rest = [log.append("m", 1, 0, number, b"x") for number in range(1, 41)]
    assert not first.done()
    go.set()
    rest[-1].result(TIMEOUT)
    log.close()
    assert batches == [1, 32, 8]


def test_a_write_survives_that_who_waits_for_it_is_cancelled(log: Log) -> None:
    """A client that disconnects must not take the log's thread with it."""

    async def cancelled() -> None:
        waiting = asyncio.ensure_future(asyncio.wrap_future(log.append("m", 1, 0, 0, b"x")))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    for _ in range(50):
        asyncio.run(cancelled())
    log.append("m", 1, 0, 1, b"y").result(TIMEOUT)
    assert [number for _, number, _ in log.records("m", 1)] == [0, 1]


def test_an_error_of_the_disk_reaches_who_waits(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise lmdb.DiskError("mdb_txn_commit: Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("deltasync.storage.log._put", broken)
        with pytest.raises(StorageFailed, match="Input/output error"):
            log.append("m", 1, 0, 0, b"x").result(TIMEOUT)
    log.append("m", 1, 0, 0, b"x").result(TIMEOUT)


def test_bytes_in_use_grow_and_shrink(log: Log) -> None:
    empty = log.used_bytes()
    log.append("m", 1, 0, 0, bytes(1 << 20)).result(TIMEOUT)
    assert log.used_bytes() >= empty + (1 << 20)
    log.drop_part("m", 1, 0).result(TIMEOUT)
    assert log.used_bytes() < 1 << 20
