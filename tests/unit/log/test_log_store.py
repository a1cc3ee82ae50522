"""What every log does, whatever is behind it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.memory_store import MemoryDisk, MemoryStore

from deltasync.base.errors import StorageFailed
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions, LogStore

TIMEOUT = 20
MAX_BYTES = 2 << 20
Opener = Callable[[], LogStore]


@pytest.fixture(params=["lmdb", "memory"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Opens the log; once it is closed, opens it again."""
    disk = MemoryDisk()
    if request.param == "memory":
        return lambda: MemoryStore(disk, MAX_BYTES)
    return lambda: LmdbStore(LogOptions(directory=tmp_path / "log", max_bytes=MAX_BYTES))


@pytest.fixture
def log(opened: Opener) -> Iterator[LogStore]:
    log = opened()
    yield log
    log.close()


def content(
    log: LogStore, stream: str, first: int = 0, last: int = 2**64 - 1
) -> list[tuple[int, int, int, bytes]]:
    return [
        (record.number, record.part, record.index, bytes(record.payload))
        for record in log.read(stream, first, last)
    ]


def test_records_are_kept_in_order_over_a_restart(opened: Opener) -> None:
    log = opened()
    for part, index, payload in [(1, 0, b"c"), (0, 1, b"b"), (0, 0, b"a"), (0, 256, b"z")]:
        log.append("cuts/m", 7, part, index, payload)
    log.append("cuts/m", 8, 0, 0, b"in ", memoryview(b"pieces"), b"")
    log.append("cuts/other", 7, 0, 0, b"other").result(TIMEOUT)
    log.close()
    log = opened()
    first = [(7, 0, 0, b"a"), (7, 0, 1, b"b"), (7, 0, 256, b"z"), (7, 1, 0, b"c")]
    assert content(log, "cuts/m") == [*first, (8, 0, 0, b"in pieces")]
    assert content(log, "cuts/m", 0, 7) == content(log, "cuts/m", 7, 7) == first
    assert content(log, "cuts/m", 8) == [(8, 0, 0, b"in pieces")]
    assert content(log, "cuts/m", 9) == content(log, "cuts/") == content(log, "none") == []
    assert content(log, "cuts/other") == [(7, 0, 0, b"other")]
    log.close()


def test_small_records_are_kept_over_a_restart(opened: Opener) -> None:
    log = opened()
    for name, value in [
        ("offset/b", b"2"),
        ("offset/a", b"1"),
        ("offset", b"0"),
        ("model/m", b""),
        ("offset/a", b"3"),
    ]:
        log.put(name, value)
    log.put("offset/b", None)
    log.put("offset/never", None).result(TIMEOUT)
    log.close()
    log = opened()
    assert log.items("offset/") == {"a": b"3"}
    assert list(log.items("").items()) == [("model/m", b""), ("offset", b"0"), ("offset/a", b"3")]
    assert log.items("model/m") == {"": b""}
    assert log.items("x") == {}
    assert log.streams() == []
    log.close()


@given(
    records=st.lists(
        st.tuples(st.sampled_from(["a", "a/b", "b"]), st.integers(0, 5), st.integers(0, 2), st.integers(0, 2)),
        max_size=25,
    ),
    changes=st.lists(
        st.tuples(
            st.sampled_from(["a", "a/b", "b"]),
            st.integers(0, 6),
            st.one_of(st.none(), st.integers(0, 3)),
            st.booleans(),
        ),
        max_size=4,
    ),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_drop_and_truncate_remove_their_records_and_no_others(
    log: LogStore,
    records: list[tuple[str, int, int, int]],
    changes: list[tuple[str, int, int | None, bool]],
) -> None:
    for stream in log.streams():
        log.drop(stream, 0)
    for address in records:
        log.append(*address, repr(address).encode())
    wanted = set(records)
    for stream, number, part, truncates in changes:
        if truncates:
            log.truncate(stream, number)
            wanted = {each for each in wanted if each[0] != stream or each[1] > number}
        elif part is None:
            log.drop(stream, number)
            wanted = {each for each in wanted if each[0] != stream or each[1] < number}
        else:
            log.drop(stream, number, part)
            wanted = {each for each in wanted if each[:3] != (stream, number, part)}
    log.put("done", b"").result(TIMEOUT)
    found = [(stream, *address[:3]) for stream in log.streams() for address in content(log, stream)]
    assert found == sorted(wanted)
    assert {payload for stream in log.streams() for *_, payload in content(log, stream)} == {
        repr(each).encode() for each in wanted
    }


def test_the_largest_addresses_are_records_like_others(log: LogStore) -> None:
    largest = (2**64 - 1, 2**32 - 1, 2**32 - 1)
    log.append("s", *largest, b"x")
    log.append("s", 2**64 - 1, 0, 0, b"y").result(TIMEOUT)
    assert content(log, "s") == [(2**64 - 1, 0, 0, b"y"), (*largest, b"x")]
    log.drop("s", 2**64 - 1, 2**32 - 1).result(TIMEOUT)
    log.truncate("s", 2**64 - 2).result(TIMEOUT)
    assert content(log, "s") == [(2**64 - 1, 0, 0, b"y")]
    log.truncate("s", 2**64 - 1).result(TIMEOUT)
    assert log.streams() == []


def test_a_record_of_the_same_address_is_replaced(log: LogStore) -> None:
    log.append("s", 1, 0, 0, b"first")
    log.append("s", 1, 0, 0, b"second").result(TIMEOUT)
    assert content(log, "s") == [(1, 0, 0, b"second")]


def test_what_is_being_read_may_be_dropped_meanwhile(log: LogStore) -> None:
    for number in range(1, 4):
        log.append("s", number, 0, 0, b"x").result(TIMEOUT)
    reading = log.read("s")
    assert next(reading).number == 1
    log.truncate("s", 2).result(TIMEOUT)
    assert {record.number for record in reading} <= {2, 3}


def test_a_full_log_refuses_records_and_takes_what_makes_room(log: LogStore) -> None:
    kept = 0
    while (failure := log.append("s", 1, 0, kept, bytes(100_000)).exception(TIMEOUT)) is None:
        kept += 1
        assert kept < 100
    assert isinstance(failure, StorageFailed)
    assert "--log-max-bytes" in str(failure)
    assert log.refusing
    assert len(content(log, "s")) == kept > 5
    log.put("model/m", b"flushed").result(TIMEOUT)
    log.drop("s", 1, 0).result(TIMEOUT)
    log.put("n", b"").result(TIMEOUT)  # LMDB gives pages back one commit later.
    log.append("s", 2, 0, 0, bytes(100_000)).result(TIMEOUT)
    assert [number for number, *_ in content(log, "s")] == [2]


def test_a_write_that_fails_takes_no_other_with_it(log: LogStore) -> None:
    writes = [
        log.put("before", b""),
        log.append("s", 1, 0, 0, bytes(MAX_BYTES + 1)),
        log.append("s", 1, 0, 1, b"x"),
        log.put("after", b""),
    ]
    failures = [write.exception(TIMEOUT) for write in writes]
    assert isinstance(failures.pop(1), StorageFailed)
    assert failures == [None, None, None]
    assert list(log.items("")) == ["after", "before"]
    assert content(log, "s") == [(1, 0, 1, b"x")]


def test_a_record_is_not_written_where_one_that_it_comes_after_was_refused(log: LogStore) -> None:
    """Whether that was told already, or both wait for the disk together; no other is in its way."""
    for number, patient in ((1, False), (2, True)):
        refused = log.append("s", number, 0, 0, bytes(MAX_BYTES + 1), patient=patient)
        if not patient:
            refused.exception(TIMEOUT)
        written = log.append("s", number, 0, 1, b"x", patient=patient)
        seals = [
            log.append("seals", number, 0, index, b"seal", after=after)
            for index, after in enumerate([(written,), (refused,), (written, refused)])
        ]
        small = [log.put(f"{number}{index}", b"", after=(each,)) for index, each in enumerate((written, refused))]
        assert [isinstance(each.exception(TIMEOUT), StorageFailed) for each in seals] == [False, True, True]
        assert [isinstance(each.exception(TIMEOUT), StorageFailed) for each in small] == [False, True]
    assert list(log.items("")) == ["10", "20"]
    assert [(number, index) for number, _, index, _ in content(log, "seals")] == [(1, 0), (2, 0)]
    assert [(number, index) for number, _, index, _ in content(log, "s")] == [(1, 1), (2, 1)]


def test_patient_writes_reach_disk_with_the_next_other_write_or_at_close(opened: Opener) -> None:
    log = opened()
    log.append("s", 1, 0, 0, b"a").result(TIMEOUT)
    patient = [log.drop("s", 1, 0, patient=True), log.append("s", 1, 0, 1, b"b", patient=True)]
    log.put("n", b"").result(TIMEOUT)
    assert all(write.done() for write in patient)
    assert content(log, "s") == [(1, 0, 1, b"b")]
    many = [log.append("s", 2, 0, index, b"c", patient=True) for index in range(100)]
    many[50].result(TIMEOUT)  # They do not wait for ever.
    log.close()
    log = opened()
    assert len(content(log, "s")) == 101
    log.close()


def test_writes_are_done_in_the_order_they_were_given(log: LogStore) -> None:
    """A later write that is done means that all earlier ones are."""
    done: list[int] = []
    for number in range(100):
        write = log.put("n", b"%d" % number)
        write.add_done_callback(lambda _, number=number: done.append(number))  # type: ignore[misc]
    log.put("last", b"").result(TIMEOUT)
    assert done == list(range(100))
    assert log.items("n") == {"": b"99"}


def test_several_small_records_are_written_together_even_in_a_full_log(opened: Opener) -> None:
    log = opened()
    log.put("a", b"1").result(TIMEOUT)
    while log.append("s", 1, 0, log.used_bytes(), bytes(100_000)).exception(TIMEOUT) is None:
        pass
    log.put_all({"a": None, "b": b"2", "never": None, "c": b""}).result(TIMEOUT)
    log.put_all({"b": b"3"})
    log.put_all({}).result(TIMEOUT)
    log.close()
    log = opened()
    assert log.items("") == {"b": b"3", "c": b""}
    log.close()


def test_bytes_in_use_grow_and_shrink(log: LogStore) -> None:
    empty = log.used_bytes()
    log.append("s", 1, 0, 0, bytes(1 << 20)).result(TIMEOUT)
    assert log.used_bytes() >= empty + (1 << 20)
    log.drop("s", 1, 0).result(TIMEOUT)
    assert log.used_bytes() < 1 << 20
