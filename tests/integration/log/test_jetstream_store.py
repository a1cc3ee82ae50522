"""A log among real brokers does what every log does; who is the owner no longer writes nothing."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.support.brokers import Brokers
from tests.unit.log import test_log_store as contract
from tests.unit.log.test_log_store import MAX_BYTES, TIMEOUT, content

from deltasync.base.errors import NotOwner, Owner, StorageFailed
from deltasync.log.brokers import BrokerOptions, Fenced, LogWentBack
from deltasync.log.jetstream_logs import JetStreamLogs
from deltasync.log.jetstream_store import JetStreamStore
from deltasync.log.jetstream_stream import LogSubjects
from deltasync.log.log_store import LogStore

# The same tests, of this log.
globals().update({name: test for name, test in vars(contract).items() if name.startswith("test_")})

PREFIXES = (f"test{number}" for number in count())


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    with Brokers(tmp_path_factory.mktemp("brokers"), settings="max_payload: 65536") as brokers:
        yield brokers


def options(brokers: Brokers, **settings: object) -> BrokerOptions:
    return BrokerOptions(urls=brokers.urls, prefix=next(PREFIXES), replicas=1, max_bytes=MAX_BYTES, **settings)  # type: ignore[arg-type]


class Process:
    """What one process has of the brokers."""

    def __init__(self, options: BrokerOptions, name: str = "a") -> None:
        self.logs, self.name = JetStreamLogs(options, name), name

    def open(self, model: str = "clicks") -> JetStreamStore:
        log = self.logs.open(model, Owner(self.name, "a:1", "http://a:2", 1))
        assert isinstance(log, JetStreamStore)
        return log


@pytest.fixture
def opened(brokers: Brokers) -> Iterator[Callable[[], LogStore]]:
    processes, wanted = list[Process](), options(brokers)

    def open_again() -> LogStore:
        processes.append(Process(wanted))
        return processes[-1].open()

    yield open_again
    for each in processes:
        each.logs.close()


@pytest.fixture
def log(opened: Callable[[], LogStore]) -> LogStore:
    return opened()


@pytest.fixture
def two(brokers: Brokers) -> Iterator[tuple[Process, Process]]:
    wanted = options(brokers)
    processes = Process(wanted, "a"), Process(wanted, "b")
    yield processes
    for each in processes:
        each.logs.close()


def test_what_is_larger_than_a_message_is_kept_in_several(opened: Callable[[], LogStore]) -> None:
    large = bytes(range(256)) * 2000
    log = opened()
    log.append("cuts/m", 1, 0, 0, large[:100_000], large[100_000:]).result(TIMEOUT)
    assert content(log, "cuts/m") == [(1, 0, 0, large)]
    log.close()
    assert content(opened(), "cuts/m") == [(1, 0, 0, large)]


def test_nothing_is_written_after_the_fence_of_another_process(two: tuple[Process, Process]) -> None:
    a, b = (each for each in two)
    before = a.open()
    before.append("cuts/m", 1, 0, 0, b"a").result(TIMEOUT)
    after = b.open()
    assert content(after, "cuts/m") == [(1, 0, 0, b"a")]
    writes = [before.append("cuts/m", 2, 0, 0, b"a"), before.put("n", b"a"), before.truncate("cuts/m", 1)]
    assert [type(each.exception(TIMEOUT)) for each in writes] == [Fenced] * 3
    assert isinstance(a.logs.lost("clicks"), Fenced)
    after.append("cuts/m", 2, 0, 0, b"b").result(TIMEOUT)
    assert (content(after, "cuts/m"), after.items("")) == ([(1, 0, 0, b"a"), (2, 0, 0, b"b")], {})
    assert b.logs.lost("clicks") is None


def test_an_idle_owner_notices_that_another_took_over(two: tuple[Process, Process]) -> None:
    a, b = two
    a.open()
    b.open()
    assert isinstance(a.logs.lost("clicks"), Fenced)


def test_each_owner_goes_on_with_what_the_one_before_has_written(two: tuple[Process, Process]) -> None:
    wanted = []
    for turn in range(6):
        process = two[turn % 2]
        log = process.open()
        log.append("cuts/m", turn, 0, 0, b"%d" % turn)
        log.put("turn", b"%d" % turn).result(TIMEOUT)
        wanted.append((turn, 0, 0, b"%d" % turn))
        assert (content(log, "cuts/m"), log.items("")) == (wanted, {"turn": b"%d" % turn})
        process.logs.close_log("clicks", written=True)


def test_a_log_that_is_closed_while_it_is_looked_at_leaves_no_trouble(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(options(brokers))
    log = process.open()

    def check() -> None:
        process.logs.close_log("clicks", written=False)  # As another thread does, while brokers do not answer.
        raise StorageFailed("no broker answers")

    monkeypatch.setattr(log, "check", check)
    monkeypatch.setattr(JetStreamStore, "trouble", "no broker answers")
    process.logs.lost("clicks")
    assert log.volume.trouble == ""
    process.logs.close()


def test_models_have_logs_of_their_own(two: tuple[Process, Process]) -> None:
    a, b = two
    names = ["m", "M", "m.x", "m-x", "m_x", "m.x.y"]
    for name in names:
        a.open(name).put("name", name.encode()).result(TIMEOUT)
    assert a.logs.known_models() == sorted(names)
    assert [b.open(name).items("") for name in names] == [{"name": name.encode()} for name in names]
    b.logs.delete("m.x")
    assert b.logs.known_models() == sorted(set(names) - {"m.x"})
    with pytest.raises(NotOwner):
        b.logs.of("other")


def test_a_stream_that_is_gone_or_made_anew_is_a_log_that_went_back(two: tuple[Process, Process]) -> None:
    a, b = two
    log = a.open()
    log.put("n", b"1").result(TIMEOUT)
    b.logs.delete("clicks")
    assert isinstance(a.logs.lost("clicks"), LogWentBack)
    log = b.open()
    b.logs.delete("clicks")
    a.logs.close_log("clicks", written=False)
    a.open()
    assert isinstance(log.put("n", b"2").exception(TIMEOUT), LogWentBack)


def test_what_is_truncated_is_purged(opened: Callable[[], LogStore]) -> None:
    log = opened()
    assert isinstance(log, JetStreamStore)
    for number in range(10):
        log.append("cuts/m", number, 0, 0, bytes(1000))
    log.append("seals/m", 1, 0, 0, b"kept")
    log.truncate("cuts/m", 7).result(TIMEOUT)
    log.put("after", b"").result(TIMEOUT)
    found = log._brokers.run(log._brokers.ask(f"STREAM.INFO.{log.subjects.stream}", {"subjects_filter": ">"}))
    kinds = [subject.split(".")[3] for subject in found["state"]["subjects"] if ".rows." in subject]
    assert sorted(kinds) == ["cuts/m"] * 2 + ["seals/m"]


def test_what_brokers_could_lose_is_said(brokers: Brokers) -> None:
    for monitors, words in [((), "--log-monitor"), (brokers.monitors, "expected 3")]:
        logs = JetStreamLogs(options(brokers, monitors=monitors), "a")
        assert any(words in risk for risk in logs.risks())
        logs.close()
    assert all("syncs" not in risk for risk in logs.risks())


def test_a_stream_that_could_lose_something_is_refused_until_it_could_not(brokers: Brokers) -> None:
    """Or another service has its prefix: then this one takes another."""
    wanted = options(brokers)
    process = Process(wanted)
    names = LogSubjects(wanted.prefix, "clicks")
    config = {"name": names.stream, "subjects": [names.subjects], "storage": "file", "max_msgs": 5}
    ask = process.logs._brokers.ask
    process.logs._brokers.run(ask(f"STREAM.CREATE.{names.stream}", config))
    remedy = (
        f"nats stream edit {names.stream} --max-msgs=-1 --discard=new; or give the service another --log-prefix"
    )
    with pytest.raises(StorageFailed, match=f"could lose acknowledged writes: max_msgs 5, discard old: {remedy}"):
        process.open()
    other = Process(replace(wanted, prefix=next(PREFIXES)))
    other.open().put("n", b"1").result(TIMEOUT)
    brokers.edit(names.stream, max_msgs=-1, discard="new")
    process.open().put("n", b"1").result(TIMEOUT)
    for each in (process, other):
        each.logs.close()


DISCARDING: dict[str, dict[str, Any]] = {
    "max_age 3600000000000: nats stream edit STREAM --max-age=0s": {"max_age": 3600 * 10**9},
    "max_msgs 900: nats stream edit STREAM --max-msgs=-1": {"max_msgs": 900},
    "max_bytes 1000000: nats stream edit STREAM --max-bytes=-1": {"max_bytes": 1_000_000},
    "max_msgs_per_subject 90: nats stream edit STREAM --max-msgs-per-subject=-1": {"max_msgs_per_subject": 90},
    "discard old: nats stream edit STREAM --discard=new": {"discard": "old"},
}
SAFE: dict[str, Any] = {
    "max_age": 0,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_msgs_per_subject": -1,
    "discard": "new",
}


@pytest.mark.parametrize("said", DISCARDING)
def test_nothing_is_written_while_a_stream_could_discard_it(brokers: Brokers, said: str) -> None:
    process = Process(options(brokers))
    log = process.open()
    log.append("cuts/m", 1, 0, 0, b"rows").result(TIMEOUT)
    brokers.edit(log.subjects.stream, **DISCARDING[said])
    assert process.logs.lost("clicks") is None
    assert log.trouble == f"stream {log.subjects.stream} could lose acknowledged writes: {said}".replace(
        "STREAM", log.subjects.stream
    )
    assert log.trouble in log.volume.trouble
    waiting = log.append("cuts/m", 2, 0, 0, b"rows")
    assert process.logs.lost("clicks") is None  # A round trip, with which the write would have been done.
    assert not waiting.done()
    brokers.edit(log.subjects.stream, **SAFE)
    assert process.logs.lost("clicks") is None
    waiting.result(TIMEOUT)
    assert log.trouble == log.volume.trouble == ""
    process.logs.close()


def test_a_stream_that_lost_its_first_messages_takes_no_writes(
    two: tuple[Process, Process], brokers: Brokers
) -> None:
    a, b = two
    log = a.open()
    for number in range(5):
        log.append("cuts/m", number, 0, 0, b"rows").result(TIMEOUT)
    brokers.edit(log.subjects.stream, max_msgs=3, discard="old")
    brokers.edit(log.subjects.stream, **SAFE)
    assert a.logs.lost("clicks") is None
    said = f"stream {log.subjects.stream} has lost acknowledged writes: its first messages were discarded"
    assert said in log.trouble
    assert f"nats stream rm {log.subjects.stream}" in log.trouble
    waiting = log.append("cuts/m", 5, 0, 0, b"rows")
    with pytest.raises(StorageFailed, match=said):
        b.open()
    assert not waiting.done()
    a.logs.close_log("clicks", written=False)


def test_a_record_that_brokers_lost_is_gone_once_the_log_is_reopened(
    opened: Callable[[], LogStore],
) -> None:
    log = opened()
    assert isinstance(log, JetStreamStore)
    for number in (1, 2):
        log.append("cuts/m", number, 0, 0, b"rows").result(TIMEOUT)
    lost = {"filter": log.subjects.records("cuts/m", 2)}
    log._brokers.run(log._brokers.ask(f"STREAM.PURGE.{log.subjects.stream}", lost))
    with pytest.raises(
        StorageFailed, match="record 0 of rank 0 of version 2 of model 'm' is damaged: restart this"
    ):
        content(log, "cuts/m")
    assert content(opened(), "cuts/m") == [(1, 0, 0, b"rows")]


def test_a_killed_broker_that_comes_back_has_all_that_it_acknowledged(tmp_path: Path) -> None:
    with Brokers(tmp_path) as brokers:
        process = Process(options(brokers))
        log, done = process.open(), list[int]()
        writes = [log.append("cuts/m", number, 0, 0, bytes(20_000)) for number in range(60)]
        for number, write in enumerate(writes):
            write.add_done_callback(lambda _, number=number: done.append(number))  # type: ignore[misc]
        writes[10].result(TIMEOUT)
        brokers.kill(brokers.brokers[0])
        brokers.start(brokers.brokers[0])
        log.put("last", b"").result(60)
        assert [write.exception(TIMEOUT) for write in writes] == [None] * 60
        assert done == list(range(60))
        assert [number for number, *_ in content(log, "cuts/m")] == list(range(60))
        process.logs.close()


@pytest.mark.nightly
def test_missing_brokers_are_named_and_the_service_starts_once_they_run(
    tmp_path: Path,
) -> None:
    nowhere = BrokerOptions(urls=("nats://user:secret@127.0.0.1:1",), prefix="a", replicas=1, max_bytes=1)
    with pytest.raises(StorageFailed, match=r"nats://127\.0\.0\.1:1"):
        JetStreamLogs(nowhere, "a")
    with Brokers(tmp_path) as brokers:
        wanted = options(brokers)
        before = Process(wanted)
        before.open().append("cuts/m", 1, 0, 0, b"rows").result(TIMEOUT)
        before.logs.close()
        brokers.kill(brokers.brokers[0])
        with pytest.raises(
            StorageFailed,
            match=r"cannot connect to any broker of .*: check that they run, and check --log and its credentials",
        ):
            Process(wanted)
        brokers.start(brokers.brokers[0])
        brokers.wait()
        after = Process(wanted)
        assert content(after.open(), "cuts/m") == [(1, 0, 0, b"rows")]
        after.logs.close()


def test_notes_of_small_records_are_written_together_and_removed(brokers: Brokers) -> None:
    process = Process(options(brokers, notes_bytes=2000, note_bytes=300))
    log = process.open()
    for turn in range(300):
        log.put(f"name{turn % 10}", b"%d" % turn + bytes(20)).result(TIMEOUT)
    log.put("name3", None).result(TIMEOUT)
    log._brokers.run(log._purges.settled())
    wanted = log.items("")
    assert len(wanted) == 9
    subjects = log._brokers.run(
        log._brokers.ask(f"STREAM.INFO.{log.subjects.stream}", {"subjects_filter": log.subjects.notes})
    )
    assert subjects["state"]["subjects"][log.subjects.notes] < 200
    process.logs.close_log("clicks", written=True)
    assert process.open().items("") == wanted
    process.logs.close()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    with Brokers(tmp_path_factory.mktemp("three"), 3) as brokers:
        yield brokers


def of_three(brokers: Brokers) -> BrokerOptions:
    return BrokerOptions(urls=brokers.urls, prefix=next(PREFIXES), replicas=3, max_bytes=64 << 30)


@pytest.mark.nightly
def test_acknowledged_writes_survive_the_death_of_the_leading_broker(three: Brokers) -> None:
    process = Process(of_three(three))
    log = process.open()
    for round_ in range(2):
        leader = three.leader(log.subjects.stream)
        assert leader
        writes = [log.append("cuts/m", 40 * round_ + number, 0, 0, bytes(50_000)) for number in range(40)]
        writes[5].result(TIMEOUT)
        three.kill(leader)
        log.put("last", b"").result(60)
        assert [write.exception(TIMEOUT) for write in writes] == [None] * 40
        three.start(leader)
        three.wait()
    process.logs.close()
    after = Process(process.logs._options, "b")
    assert [number for number, *_ in content(after.open(), "cuts/m")] == list(range(80))
    assert after.logs.risks()[-1].endswith("set --log-monitor")
    after.logs.close()


@pytest.mark.nightly
def test_brokers_without_a_majority_take_nothing_and_lose_nothing(three: Brokers) -> None:
    process = Process(of_three(three))
    log = process.open()
    log.put("n", b"1").result(TIMEOUT)
    for each in three.brokers[:2]:
        three.kill(each)
    write = log.put("n", b"2")
    with pytest.raises(TimeoutError):
        write.result(4)
    process.logs.lost("clicks")
    assert "check the brokers" in log.volume.trouble
    for each in three.brokers[:2]:
        three.start(each)
    three.wait()
    write.result(60)
    process.logs.lost("clicks")
    assert (log.items(""), log.volume.trouble) == ({"n": b"2"}, "")
    process.logs.close()


def test_two_owners_that_write_at_once_never_both_succeed(three: Brokers) -> None:
    """Whatever of the first was under way as the second came: what it was told to be written is, and the rest is
    not, nor is anything after it."""
    wanted = of_three(three)
    a, b = Process(wanted, "a"), Process(wanted, "b")
    first = a.open()
    writes = [first.append("cuts/m", number, 0, 0, b"a") for number in range(400)]
    second = b.open()
    last = second.append("cuts/m", 1000, 0, 0, b"b")
    last.result(TIMEOUT)
    told = [number for number, write in enumerate(writes) if write.exception(TIMEOUT) is None]
    assert told == list(range(len(told)))
    assert [number for number, *_ in content(second, "cuts/m")] == [*told, 1000]
    a.logs.close()
    b.logs.close()
    third = Process(wanted, "c")
    assert [number for number, *_ in content(third.open(), "cuts/m")] == [*told, 1000]
    third.logs.close()


def test_a_broker_restored_from_an_earlier_copy_is_a_log_that_went_back(tmp_path: Path) -> None:
    with Brokers(tmp_path / "brokers") as brokers:
        process, broker = Process(options(brokers)), brokers.brokers[0]
        log = process.open()
        log.append("cuts/m", 1, 0, 0, b"1").result(TIMEOUT)
        brokers.kill(broker)
        shutil.copytree(broker.folder / "store", tmp_path / "copy")
        brokers.start(broker)
        brokers.wait()
        log.append("cuts/m", 2, 0, 0, b"2").result(60)
        brokers.kill(broker)
        shutil.rmtree(broker.folder / "store")
        shutil.copytree(tmp_path / "copy", broker.folder / "store")
        brokers.start(broker)
        brokers.wait()
        assert isinstance(log.append("cuts/m", 3, 0, 0, b"3").exception(60), LogWentBack)
        process.logs.close_log("clicks", written=False)
        assert content(process.open(), "cuts/m") == [(1, 0, 0, b"1")]
        process.logs.close()


USERS = 'authorization { users: [{user: "deltasync", password: "s3cret"}] }'


def showing(brokers: Brokers, secret: str) -> BrokerOptions:
    urls = tuple(url.replace("nats://", f"nats://deltasync:{secret}@") for url in brokers.urls)
    return BrokerOptions(urls=urls, prefix="deltasync", replicas=1, max_bytes=MAX_BYTES, monitors=brokers.monitors)


def test_who_shows_the_password_has_a_log_and_nobody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Brokers(tmp_path, settings=USERS) as brokers:
        logs = JetStreamLogs(showing(brokers, "s3cret"), "a")
        log = logs.open("clicks", Owner("a", "", ""))
        log.append("cuts/clicks", 1, 0, 0, b"rows").result()
        assert [bytes(each.payload) for each in log.read("cuts/clicks")] == [b"rows"]
        logs.close()
        with pytest.raises(StorageFailed, match=r"cannot connect to any broker of .*") as refused:
            JetStreamLogs(showing(brokers, "wr0ng"), "b")
    assert "wr0ng" not in str(refused.value)
    assert "s3cret" not in caplog.text
    assert "wr0ng" not in caplog.text
