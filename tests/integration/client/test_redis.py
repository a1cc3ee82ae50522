import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.documents import document
from tests.support.examples import examples
from tests.support.keyed_model import BIAS, CHANGES, ITEM, RAW_IDS, ROWS, TABLES, USER, Change, KeyedModel
from tests.support.redis_commands import Killed, PlayDead, Sends, kill_this_process, mortal, single_commands
from tests.support.redis_server import PROGRAM, RedisServer

from deltasync.base.errors import Contradiction, InvalidInput, NotFound, ServiceUnavailable, StorageFailed
from deltasync.client import Position, Release, RowBatch
from deltasync.client.targets.redis_layout import Names, keys_of
from deltasync.client.targets.redis_store import RedisWriter
from deltasync.client.targets.redis_target import RedisRows, RedisTarget
from deltasync.client.targets.target import Reading
from deltasync.core.rows import Ids
from deltasync.core.tables import FREE_ID

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no redis-server or valkey-server is installed")
WHOLE = st.frozensets(st.sampled_from([table.name for table in TABLES]))
MAPPED = [USER.name, ITEM.name, BIAS.name]
# Something happens before each command by night, and before every fourth by day.
EVERY = 1 if examples() > 20 else 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def store(server: RedisServer) -> Iterator[Any]:
    with server.client() as client:
        client.config_set("maxmemory", "0")
        client.flushall()
        yield client


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands are sent one by one, so that anything may happen between any two."""
    with single_commands(monkeypatch):
        yield


def target_of(server: RedisServer, **options: Any) -> RedisTarget:
    return RedisTarget(server.client(), "clicks", **options)


def numbers(client: Any, name: str, dtype: np.dtype[Any]) -> dict[int, float]:
    """The first value of each row of a hash."""
    found = client.hgetall(f"clicks:{name}")
    return {int(keys_of([key])[0]): np.frombuffer(value, dtype)[0].item() for key, value in found.items()}


def rows_in(client: Any) -> dict[str, dict[int, float]]:
    return {table.name: numbers(client, f"rows:{table.name}", table.dtype) for table in (USER, ITEM, BIAS)}


def check_equal(client: Any, model: KeyedModel) -> None:
    """The store holds the model, and nothing else."""
    assert rows_in(client) == model.expected()
    assert numbers(client, f"free:{USER.name}", USER.dtype) == model.free()
    entries = numbers(client, f"rows:{RAW_IDS.name}", RAW_IDS.dtype)
    assert {row: int(entry) ^ FREE_ID for row, entry in entries.items() if entry} == model.entries()
    names = {f"clicks:rows:{table.name}" for table in TABLES} | {f"clicks:free:{USER.name}", "clicks:meta"}
    assert {name.decode() for name in client.keys("*")} <= names
    meta = {name.decode(): value.decode() for name, value in client.hgetall("clicks:meta").items()}
    assert (meta["history"], meta["number"], meta["version"]) == ("h", str(model.version), str(model.version))
    assert (meta["writing"], meta["step"]) == ("0", str(model.version * 2))
    assert meta["kept"] == (f"kept-{model.version}" if model.version % 3 else "")
    assert meta["event_time_unix_ns"] == (str(model.version * 10) if model.version % 2 else "")


def check_not_older(client: Any, past: list[dict[str, dict[int, float]]]) -> None:
    """No row is older than the version that the store tells; `past` is the model at each version."""
    told = int(client.hget("clicks:meta", "version") or 0)
    if not told:
        return
    held = rows_in(client)
    for table in MAPPED:
        for key in {key for version in past[told:] for key in version[table]} | held[table].keys():
            right = [version[table].get(key) for version in past[told:]]
            assert held[table].get(key) in right, (table, key)


class Feed:
    """A model, and what a service would send a target of it that may die and come again.

    Attributes:
        past: the model at each version.
    """

    def __init__(self) -> None:
        self.model = KeyedModel()
        self.past = [self.model.expected()]
        self._resync_at = 0
        self._whole_at: dict[str, int] = {}

    def change(self, change: Change, *, resync: bool = False, whole: frozenset[str] = frozenset()) -> None:
        self.model.change(change)
        self.past.append(self.model.expected())
        self._resync_at = self.model.version if resync else self._resync_at
        self._whole_at.update(dict.fromkeys(whole, self.model.version))

    def release(self, held: int) -> Release:
        """What is lacking after version `held`: all of what has been reset since."""
        whole = frozenset(name for name, version in self._whole_at.items() if version > held)
        return self.model.release(held, resync=not held or self._resync_at > held, whole=whole)


STEP = st.tuples(CHANGES, st.booleans(), WHOLE, st.none() | st.integers(0, 180))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEP, min_size=1, max_size=7))
def test_the_store_equals_the_model_after_any_releases_and_kills(
    server: RedisServer, store: Any, monkeypatch: pytest.MonkeyPatch, steps: list[Any]
) -> None:
    store.flushall()
    feed, target = first(server)
    for change, resync, whole, commands in [*steps, (Change(), False, frozenset(), None)]:
        feed.change(change, resync=resync, whole=whole)
        with single_commands(monkeypatch):
            try:
                if commands is not None:
                    target = RedisTarget(mortal(server.client(), commands + 4, PlayDead()), "clicks")
                target.apply(feed.release(target.position.number))
                check_equal(store, feed.model)
            except Killed:
                check_not_older(store, feed.past)
            target = target_of(server)


# What may happen to a row: raw ids go round in a ring, with their rows and without, some are new, some gone.
_SCENARIO = [
    Change(users=frozenset(range(ROWS)), items=frozenset({0, 1}), raw_ids={0: 0, 1: 1, 2: 7}),
    Change(raw_ids={0: 1, 1: 7, 2: 0, 3: -2}, rows_stay=True, deleted=frozenset({5})),
    Change(users=frozenset({0}), raw_ids={0: 7, 1: None, 2: 5, 4: 1}, rows_stay=True, items=frozenset({1})),
]


# What was given by the release that is cut off is taken back by the next one, which finds half of it.
_BACK = Change(raw_ids={0: 0, 1: 1, 2: 7, 3: None}, rows_stay=True)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize(
    ("resync", "then"),
    [
        (False, _SCENARIO[2]),
        pytest.param(True, _SCENARIO[2], marks=pytest.mark.nightly),
        pytest.param(False, _BACK, marks=pytest.mark.nightly),
        pytest.param(True, _BACK, marks=pytest.mark.nightly),
    ],
)
def test_a_process_killed_before_any_command_loses_nothing(
    server: RedisServer, store: Any, resync: bool, then: Change
) -> None:
    killed = 0
    while True:
        store.flushall()
        feed, _ = first(server)
        feed.change(_SCENARIO[1], resync=resync)
        signal_ = _run_in_a_process_that_dies(server, feed.release(1), killed)
        if signal_ == 0:
            break
        assert signal_ == signal.SIGKILL
        killed += EVERY
        check_not_older(store, feed.past)
        feed.change(then)
        target = target_of(server)
        target.apply(feed.release(target.position.number))
        check_equal(store, feed.model)
    assert killed > 30


def _run_in_a_process_that_dies(server: RedisServer, release: Release, commands: int) -> int:
    """Apply a release in a process that is killed after so many commands: the signal, 0 if it came through."""
    child = os.fork()
    if not child:
        try:
            RedisTarget(mortal(server.client(), commands, kill_this_process), "clicks").apply(release)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) * -1


@pytest.mark.usefixtures("one_by_one")
def test_no_target_continues_from_an_interrupted_resync(server: RedisServer, store: Any) -> None:
    # One of a consumer that is behind, say, after which the store is to follow the first one again.
    commands, ended = 0, False
    while not ended:
        store.flushall()
        feed, target = first(server)
        behind = other(feed.release(0), position=Position("g", 1))
        feed.change(_SCENARIO[2])
        target.apply(feed.release(1))
        sends = Sends(server)
        cut_off = RedisTarget(sends.client, "clicks")
        sends.do({commands: PlayDead(), commands + 1: lose_connection})
        try:
            cut_off.apply(behind)
            ended = True
        except Killed:
            check_not_older(store, feed.past)
        target = target_of(server)
        held = target.position.number if target.position.history == "h" else 0
        target.apply(feed.release(held))
        check_equal(store, feed.model)
        commands += EVERY
    assert commands > 30


def first(server: RedisServer, **options: Any) -> tuple[Feed, RedisTarget]:
    """A target that holds version 1."""
    feed, target = Feed(), target_of(server, **options)
    feed.change(_SCENARIO[0])
    target.apply(feed.release(0))
    return feed, target


def test_rows_are_looked_up(server: RedisServer, store: Any) -> None:
    rows = RedisRows(store, "clicks")
    with pytest.raises(NotFound, match=re.escape("prefix 'clicks', has no version yet")):
        rows.lookup(USER.name, np.array([7]))
    feed, _ = first(server)
    assert rows.newest() == Reading(
        position=Position("h", 1), version=1, step=2, step_end_unix_ns=5, event_time_unix_ns=10, kept="kept-1"
    )
    keys = np.array([7, 5, 0, 7, -(2**63)])
    values, found = rows.lookup(USER.name, keys)
    users = feed.model.expected()[USER.name]
    assert found.tolist() == [True, False, True, True, False]
    assert values.tolist() == [[users.get(key, 0)] * 2 for key in keys.tolist()]
    values, found = rows.lookup(ITEM.name, np.arange(ROWS))
    assert values.dtype == np.float16
    assert found.tolist() == [True, True, False, False, False, False]
    with pytest.raises(NotFound, match=f"has no table 'other'; tables: {USER.name}"):
        rows.lookup("other", np.array([7]))
    with pytest.raises(InvalidInput, match="expected int64"):
        rows.lookup(USER.name, np.array([7.0]))


def nve_finds(client: Any, config: dict[str, Any], keys: Ids) -> dict[int, bytes]:
    """What NVE's Redis plugin finds in a table of one hash: HMGET with raw keys, values up to a row's size."""
    assert config["num_partitions"] == 0
    names = [keys[at : at + 1].tobytes() for at in range(len(keys))]
    assert {len(name) for name in names} == {config["key_size"]}
    values = client.execute_command("HMGET", config["hash_key"], *names)
    found = {key: value for key, value in zip(keys.tolist(), values, strict=True) if value is not None}
    assert all(len(value) <= config["max_value_size"] for value in found.values())
    return found


def test_nve_finds_the_rows_with_the_documented_configuration(server: RedisServer, store: Any) -> None:
    [block] = [
        block.code for block in document("sync_service/docs/predictors.md").blocks() if block.language == "json"
    ]
    documented = json.loads(block)
    keys = np.array([-(2**63), *range(-3, ROWS + 3), 2**63 - 2])
    feed, target = first(server)
    for change in (Change(), *_SCENARIO[1:]):
        feed.change(change)
        target.apply(feed.release(target.position.number))
        for table in (USER, ITEM, BIAS):
            row_bytes = table.dim * table.dtype.itemsize
            config = documented | {"hash_key": f"clicks:rows:{table.name}", "max_value_size": row_bytes}
            assert config.keys() == documented.keys()
            expected = feed.model.expected()[table.name]
            rows = {key: np.full(table.dim, value, table.dtype).tobytes() for key, value in expected.items()}
            assert nve_finds(store, config, keys) == rows
            assert store.hlen(config["hash_key"]) == len(rows), "the plugin counts fields"
    assert documented["hash_key"] == Names("clicks").rows("user")


def test_a_reader_follows_changes_of_a_tables_form(server: RedisServer, store: Any) -> None:
    feed, target = first(server)
    rows = RedisRows(store, "clicks")
    assert rows.lookup(ITEM.name, np.array([0]))[0].dtype == np.float16
    feed.change(Change())
    target.apply(other(feed.release(1), tables=[USER, RAW_IDS, BIAS]))
    with pytest.raises(NotFound, match=r"has no table 'sparse\.item'"):
        rows.lookup(ITEM.name, np.array([0]))
    rows.lookup(USER.name, np.array([7]))
    store.flushall()
    longer = type(USER)(USER.name, ROWS, 3)
    batch = RowBatch.of_table(longer, np.array([7]), np.ones((1, 3), np.float32))
    target_of(server).apply(Release(Position("h", 3), 4, 5, True, [longer], [batch], version=3))
    values, found = rows.lookup(USER.name, np.array([7, 8]))
    assert values.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert found.tolist() == [True, False]
    values[0] = 2  # It is the caller's.
    store.hset(f"clicks:rows:{USER.name}", (7).to_bytes(8, "little"), b"half")
    with pytest.raises(
        Contradiction,
        match=r"has a row of 4 bytes in table 'sparse\.user', which is embedding, 3 values of float32",
    ):
        rows.lookup(USER.name, np.array([7]))


def test_commands_to_redis_have_a_bounded_size(server: RedisServer, store: Any) -> None:
    hashes = RedisWriter(store, 0, "meta", "the store")
    fields = [number.to_bytes(8, "little") for number in range(5000)]
    for times, commands in ((1, 5), (200, 31)):  # Bounded by the number of fields; by their bytes.
        store.config_resetstat()
        hashes.put("h", fields, [field * times for field in fields])
        together = -(-commands // 2)  # And with each two the note that they were given.
        assert store.info("commandstats")["cmdstat_hset"]["calls"] == commands + together
        assert store.info("commandstats")["cmdstat_exec"]["calls"] == together
        assert hashes.get("h", fields) == [field * times for field in fields]
    hashes.drop("h", fields[1:])
    assert list(hashes.scan("h")) == [{fields[0]: fields[0] * 200}]


def test_a_table_that_is_not_followed_any_more_is_removed(server: RedisServer, store: Any) -> None:
    feed, target = first(server)
    feed.change(Change())
    release = feed.release(1)
    target.apply(Release(release.position, 4, 5, False, [ITEM, BIAS], [], version=2))
    assert {name.decode() for name in store.keys("*")} == {
        "clicks:meta",
        f"clicks:rows:{ITEM.name}",
        f"clicks:rows:{BIAS.name}",
    }
    assert rows_in(store)[ITEM.name] == feed.model.expected()[ITEM.name]


def other(release: Release, **fields: Any) -> Release:
    return Release(**{**vars(release), **fields})


def test_another_model_or_other_tables_are_refused(server: RedisServer, store: Any) -> None:
    feed, _ = first(server)
    feed.change(Change(users=frozenset({1})))
    before = rows_in(store)
    larger = type(USER)(USER.name, ROWS, 4)
    for release, said in (
        (
            other(feed.release(0), model="ads"),
            "prefix 'clicks', has rows of model '', the consumer follows 'ads': use another prefix, or delete",
        ),
        (
            other(feed.release(0), tables=[larger, *TABLES[1:]], rows=[]),
            f"table 'sparse.user' in the store at {server.socket}, prefix 'clicks', is embedding, 2 values of "
            "float32 by raw id, the consumer sends embedding, 4 values of float32 by raw id: use another prefix",
        ),
        (
            other(feed.release(0), tables=[USER, ITEM, BIAS], rows=[]),
            "of float32 by raw id, the consumer sends embedding, 2 values of float32 by row number: use another",
        ),
    ):
        with pytest.raises(Contradiction, match=re.escape(said)):
            target_of(server).apply(release)
    assert rows_in(store) == before
    check = target_of(server)
    check.apply(feed.release(1))
    check_equal(store, feed.model)


def test_another_format_or_type_of_key_is_refused(server: RedisServer, store: Any) -> None:
    first(server)
    store.hset("clicks:meta", "format", "2")
    with pytest.raises(Contradiction, match="has rows of format '2', this version of deltasync uses format 1"):
        target_of(server)
    store.hset("clicks:meta", mapping={"format": "1", "tables": "["})
    with pytest.raises(Contradiction, match="its meta cannot be read"):
        target_of(server)
    store.flushall()
    store.set("clicks:meta", "something else")
    with pytest.raises(Contradiction, match="Another program has keys under this prefix"):
        target_of(server)


def test_another_writer_or_an_emptied_store_is_recognised(server: RedisServer, store: Any) -> None:
    feed, old = first(server)
    feed.change(Change(users=frozenset({1})))
    new = target_of(server)
    new.apply(feed.release(1))
    with pytest.raises(Contradiction, match="changed by another target while this target writes to it"):
        old.apply(feed.release(1))
    check_equal(store, feed.model)
    store.flushall()
    feed.change(Change(users=frozenset({1})))
    with pytest.raises(Contradiction, match="was emptied while this target writes to it"):
        new.apply(feed.release(2))
    assert not store.keys("*")
    again = target_of(server)
    assert again.position == Position()
    with pytest.raises(
        Contradiction, match=r"has no position, expected no position.*started without held=target.position"
    ):
        again.apply(feed.release(2))
    again.apply(feed.release(0))
    check_equal(store, feed.model)


@pytest.mark.usefixtures("one_by_one")
def test_a_replaced_target_writes_nothing_more(server: RedisServer, store: Any) -> None:
    refused = 0
    while True:
        store.flushall()
        feed, _ = first(server)
        sends = Sends(server)
        old = RedisTarget(sends.client, "clicks")
        feed.change(_SCENARIO[1])
        release = feed.release(1)

        def replace(feed: Feed = feed) -> None:
            feed.change(_SCENARIO[2])
            new = target_of(server)
            new.apply(feed.release(new.position.number))

        sends.do({refused: replace})
        try:
            old.apply(release)
        except Contradiction as error:
            said = str(error)
        else:
            break
        assert re.search("was changed by another target|has number 3 of history h", said)
        check_equal(store, feed.model)
        refused += EVERY
    assert feed.model.version == 2
    check_equal(store, feed.model)
    assert refused > 30


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("lost", [*(pytest.param(lost, marks=pytest.mark.nightly) for lost in (1, 7)), 3])
def test_a_server_that_loses_changes_is_recognised(server: RedisServer, store: Any, lost: int) -> None:
    # As where one that was restarted has no more of its log, or a replica that lags takes over.
    begin, found_out = 0, 0
    while True:
        store.flushall()
        feed, _ = first(server)
        sends, copy = Sends(server), dict[bytes, Any]()
        target = RedisTarget(sends.client, "clicks")
        feed.change(_SCENARIO[1])

        def keep(copy: dict[bytes, Any] = copy) -> None:
            copy.update({name: store.dump(name) for name in store.keys("*")})

        def bring_back(copy: dict[bytes, Any] = copy) -> None:
            store.flushall()
            for name, value in copy.items():
                store.restore(name, 0, value)

        sends.do({begin: keep, begin + lost: bring_back})
        try:
            target.apply(feed.release(1))
        except Contradiction as error:
            said = str(error)
            assert re.search("has lost changes: it has|was changed by", said)
            found_out += 1
            check_not_older(store, feed.past)
            feed.change(_SCENARIO[2])
            target = target_of(server)
            target.apply(feed.release(target.position.number))
        check_equal(store, feed.model)
        if sends.count <= begin + lost:
            break
        begin += EVERY
    assert found_out > 10 // EVERY


def test_a_full_store_is_an_error_that_loses_nothing(server: RedisServer, store: Any) -> None:
    feed, target = first(server)
    feed.change(Change(users=frozenset(range(ROWS))))
    store.config_set("maxmemory", "1")
    with pytest.raises(StorageFailed, match=re.escape(f"the store at {server.socket} reports: ") + ".*maxmemory"):
        target.apply(feed.release(1))
    store.config_set("maxmemory", "0")
    target.apply(feed.release(1))
    check_equal(store, feed.model)


def test_a_store_that_evicts_is_refused(server: RedisServer, store: Any, caplog: pytest.LogCaptureFixture) -> None:
    store.config_set("maxmemory", "1gb")
    store.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(Contradiction, match=r"evicts keys when its memory is full .*allkeys-lru"):
            target_of(server)
        store.config_set("maxmemory-policy", "volatile-lru")
        target_of(server)
    finally:
        store.config_set("maxmemory-policy", "noeviction")
    store.acl_setuser("app", enabled=True, nopass=True, keys="*", commands=["+@all", "-config"])
    RedisTarget(server.client(username="app", password="x"), "clicks")  # noqa: S106
    assert "does not reveal its maxmemory-policy" in caplog.text


def test_a_redis_user_without_rights_is_an_error(server: RedisServer, store: Any) -> None:
    feed = Feed()
    feed.change(_SCENARIO[0])
    store.acl_setuser("reader", enabled=True, nopass=True, keys="*", commands=["+@read", "+@transaction"])
    target = RedisTarget(server.client(username="reader", password="x"), "clicks")  # noqa: S106
    with pytest.raises(StorageFailed, match="Allow this user hashes"):
        target.apply(feed.release(0))
    with pytest.raises(StorageFailed, match="Check the user name and the password"):
        RedisTarget(server.client(username="nobody", password="x"), "clicks", retry_seconds=60)  # noqa: S106


def test_a_replica_of_the_store_is_named(server: RedisServer, store: Any) -> None:
    feed, target = first(server)
    feed.change(Change(users=frozenset({1})))
    store.replicaof("127.0.0.1", "1")
    try:
        with pytest.raises(StorageFailed, match="It is a replica: write to its master"):
            target.apply(feed.release(1))
    finally:
        store.replicaof("NO", "ONE")
    target.apply(feed.release(1))
    check_equal(store, feed.model)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_lost_connections_lose_no_rows(server: RedisServer, store: Any, after: bool) -> None:
    commands, lost = 0, [True]
    while lost:
        store.flushall()
        left, lost = iter([False] * commands + [True]), []

        def lose(left: Iterator[bool] = left, lost: list[bool] = lost) -> None:
            if next(left, False):
                lost.append(True)
                raise redis.ConnectionError("lost")

        feed = Feed()
        feed.change(_SCENARIO[0])
        RedisTarget(mortal(server.client(), 0, lose, after=after), "clicks").apply(feed.release(0))
        check_equal(store, feed.model)
        commands += EVERY
    assert commands > 10


def test_after_a_lost_answer_a_later_release_can_be_given(server: RedisServer, store: Any) -> None:
    unanswered = failed = 0
    while unanswered == failed:
        store.flushall()
        feed, _ = first(server)
        sends = Sends(server, after=True)
        target = RedisTarget(sends.client, "clicks", retry_seconds=0)
        feed.change(_SCENARIO[1])
        sends.do(dict.fromkeys(range(unanswered, 1000), lose_connection))
        try:
            target.apply(feed.release(1))
        except ServiceUnavailable:
            sends.do({})
            feed.change(_SCENARIO[2])
            target.apply(feed.release(target.position.number))
            failed += 1
        check_equal(store, feed.model)
        sends.client.close()
        unanswered += 1
    assert failed > 5


def lose_connection() -> None:
    raise redis.ConnectionError("lost")


def test_a_server_that_is_down_or_returns_empty_is_an_error(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        feed, target = first(server, retry_seconds=0.2)
        feed.change(Change(users=frozenset({1})))
        server.kill()
        with pytest.raises(ServiceUnavailable, match=f"the store at {server.socket} reports"):
            target.apply(feed.release(1))
        server.start()
        with pytest.raises(Contradiction, match="was emptied"):
            target.apply(feed.release(1))


@pytest.mark.parametrize("protocol", [2, 3])
def test_both_redis_protocols_work(server: RedisServer, store: Any, protocol: int) -> None:
    with server.client(protocol=protocol, db=3) as client:
        feed, target = Feed(), RedisTarget(client, "clicks")
        feed.change(_SCENARIO[0])
        target.apply(feed.release(0))
        feed.change(_SCENARIO[1], resync=True)
        target.apply(feed.release(1))
        check_equal(client, feed.model)
        client.hset("clicks:meta", "format", "2")
        with pytest.raises(
            Contradiction, match=f"{server.socket}, database 3, prefix 'clicks', has rows of format"
        ):
            RedisTarget(client, "clicks")


def test_a_client_of_another_kind_is_refused(server: RedisServer) -> None:
    with pytest.raises(InvalidInput, match="decode_responses"):
        RedisTarget(server.client(decode_responses=True), "clicks")
    others: list[Any] = [redis.asyncio.Redis(), redis.RedisCluster.__new__(redis.RedisCluster)]
    for client in others:
        with pytest.raises(InvalidInput, match=r"client: a redis\..*, expected a redis.Redis"):
            RedisTarget(client, "clicks")
        with pytest.raises(InvalidInput, match=r"expected a redis\.Redis"):
            RedisRows(client, "clicks")
    with pytest.raises(InvalidInput, match="prefix: empty"):
        RedisTarget(server.client(), "")
