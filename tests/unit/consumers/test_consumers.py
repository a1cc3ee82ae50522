"""Lag, offsets and limits of consumers and their replicas: what is decided and said of them."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.local_service import opened
from tests.support.seals import sealed
from tests.unit.support.async_tests import in_service

from deltasync.access.limits import LimitOptions
from deltasync.api.process import outcome
from deltasync.api.subscribe import StreamEnded, departure, superseded
from deltasync.base.errors import Contradiction, InvalidInput, LimitReached, NotFound, Superseded
from deltasync.base.events import EventKind, event_line
from deltasync.consumers.consumer import Consumer, ConsumerOptions, Pause, Replica
from deltasync.consumers.registry import consumer_offset, forgettable, may_leave, offset_in
from deltasync.core.policy import Policy
from deltasync.core.position import Position, can_continue
from deltasync.core.seal import Seal
from deltasync.core.tables import TableSpec
from deltasync.model.feed import FeedStatus
from deltasync.service.service import Service
from deltasync.status.lag import fleet_state, measure
from deltasync.status.records import Lag

ROW_BYTES = [TableSpec("a", 10, 2).row_bytes, TableSpec("b", 10, 4).row_bytes]
NONE, SOME, ONE = Lag(0, 0, 0, 0.0), Lag(2, 7, 100, 1.5), Lag(1, 1, 100, 1.5)


def seals(first: int, last: int) -> list[Seal]:
    """Each sealed at its version in seconds."""
    return [sealed(version, sealed_unix_ns=version * 10**9) for version in range(first, last + 1)]


def replica(name: str, version: int = 0, history: str = "h", *, away: int | None = None, **known: Any) -> Replica:
    stream = None if away is not None else asyncio.Event()
    return Replica(name, Position(history, version), stream=stream, since_ns=away or 0, **known)


@given(st.integers(1, 30), st.integers(0, 30), st.integers(0, 40))
def test_lag_is_the_distance_to_the_head(first_kept: int, more: int, offset: int) -> None:
    last = first_kept + more
    offset = min(offset, last)
    lacking = [0, 0] if offset == last else [2, 3]
    lag = measure(offset, seals(first_kept, last), ROW_BYTES, lacking, (last + 5) * 10**9)
    if offset == last:
        assert lag == NONE
        return
    oldest_unsent = max(offset + 1, first_kept)
    assert lag == Lag(last - offset, 5, 2 * (8 + 8) + 3 * (8 + 16), last + 5 - oldest_unsent)


def test_lag_is_zero_before_the_first_cut_and_never_negative() -> None:
    assert measure(0, [], ROW_BYTES, [0, 0], 10**9) == NONE
    assert measure(0, seals(1, 1), ROW_BYTES, [1, 0], 0).seconds == 0


@pytest.mark.parametrize(
    ("replicas", "lag", "status", "expected", "said"),
    [
        ([], NONE, {}, "empty", "no replica has subscribed, and none is expected to return"),
        ([], NONE, {"unpublished": "nothing is published"}, "empty", "nothing is published"),
        ([replica("a", away=1), replica("b", away=1)], SOME, {}, "away", "none of the 2 replicas is connected"),
        ([replica("a", checked=True)], NONE, {}, "in sync", "the only replica holds the newest version"),
        (
            [replica("a", checked=True), replica("b")],
            NONE,
            {},
            "delivered",
            "not confirmed by checksums yet: b",
        ),
        (
            [replica("a", checked=True, unbound=("t", "u")), replica("b")],
            NONE,
            {},
            "partial",
            "some replicas hold only some tables of the newest version: a lacks t, u",
        ),
        ([replica("a", unbound=("t",))], SOME, {"newest_release": 3}, "partial", "; 7 rows are postponed"),
        ([replica("a")], SOME, {"newest_release": 3}, "delivered", "; 7 rows are postponed"),
        ([replica("a", unbound=("t",))], SOME, {}, "behind", "7 rows of 2 versions"),
        ([replica("a")], NONE, {"unpublished": "nothing is published"}, "empty", "nothing is published"),
        ([replica("a", away=1)], NONE, {"unpublished": "nothing is published"}, "empty", "nothing is published"),
        ([replica("a")], NONE, {"unfit": "no table fits"}, "waiting", "no table fits"),
        ([replica("a", away=1), replica("b", checked=True)], NONE, {}, "delivered", "checksums yet: a; away: a"),
        ([replica("a")], NONE, {"failure": "no luck"}, "failed", "no luck"),
        ([replica("a", away=1)], NONE, {"failure": "no luck"}, "failed", "no luck"),
        (
            [replica("a", checked=True)],
            ONE,
            {"newest_release": 3},
            "current",
            "only replica holds the newest release; 1 row is postponed",
        ),
        ([replica("a")], ONE, {}, "behind", "1 row of 1 version not applied yet by a"),
        ([replica("a", checked=True)], SOME, {"newest_release": 3}, "current", "7 rows are postponed"),
        ([replica("a")], SOME, {}, "behind", "7 rows of 2 versions"),
        ([replica("a")], replace(SOME, versions=0), {}, "behind", "7 rows of a release not applied yet by a"),
        ([replica("a"), replica("b", away=1)], SOME, {}, "behind", "away: b"),
        (
            [replica("b", 5, "h"), replica("c", 3, "h"), replica("a", 3, "h")],
            SOME,
            {},
            "behind",
            "7 rows of 2 versions not applied yet by a, c",
        ),
    ],
)
def test_state_says_why(
    replicas: list[Replica], lag: Lag, status: dict[str, Any], expected: str, said: str
) -> None:
    where = FeedStatus(history="h", seals=(), tables=list, version_of=lambda number: number, seal_of=lambda _: 0)
    found, reason = fleet_state(replicas, lag, replace(where, **status), offset=3)
    assert found == expected
    assert said in reason


@given(st.lists(st.tuples(st.sampled_from("hx"), st.integers(0, 9))))
def test_a_fleet_has_what_the_last_of_it_has(positions: list[tuple[str, int]]) -> None:
    replicas = [replica(str(number), version, history) for number, (history, version) in enumerate(positions)]
    versions = [version if history == "h" else 0 for history, version in positions]
    assert [offset_in("h", lambda _: 0, each.applied) for each in replicas] == versions
    assert consumer_offset(replicas, "h", lambda _: 0) == min(versions, default=0)


def test_replicas_away_for_long_are_forgotten() -> None:
    replicas = [replica("here"), replica("back", away=90), replica("gone", away=89), replica("long", away=1)]
    assert sorted(forgettable(replicas, 100, 10)) == ["gone", "long"]


def test_the_last_replica_of_a_fleet_is_kept() -> None:
    replicas = [replica("older", away=1), replica("newer", away=2)]
    assert forgettable(replicas, 10**9, 10) == ["older"]
    assert forgettable(replicas[:1], 10**9, 10) == []


def test_a_guest_does_not_count_as_one_of_the_fleet() -> None:
    here, guest = replica("here", 5), replica("guest", 1, guest=True)
    assert consumer_offset([here, guest], "h", lambda _: 0) == 5
    assert consumer_offset([guest], "h", lambda _: 0) == 0
    away = [replica("long", away=1), replica("longer", away=0)]
    assert forgettable([*away, guest], 10**9, 10) == ["longer"]


def test_a_replica_that_was_idle_is_not_taken_for_one_that_is_away() -> None:
    """It acknowledged long ago, since nothing was published, and left just now."""
    idle = replica("idle", away=99)
    assert idle.acked_unix_ns == 0
    assert forgettable([idle, replica("here")], 100, 10) == []


@in_service()
async def test_an_ack_of_what_a_replica_holds_already_wakes_nobody(service: Service) -> None:
    """Idle replicas send them all the time, to show what they hold and how new it is."""
    consumer = await service.consumers.create("top", "clicks", Policy(top_k=1))
    of_it = service.registry.connect(consumer, "a", asyncio.Event())
    service.registry.acknowledge(consumer, of_it, Position("h", 1))
    woken = consumer.signal.changed()
    for _ in range(3):
        service.registry.acknowledge(consumer, of_it, Position("h", 1))
        await asyncio.sleep(0)
    assert not woken.done()
    service.registry.acknowledge(consumer, of_it, Position("h", 2))
    await asyncio.wait_for(woken, 20)


@in_service()
async def test_an_offset_keeps_its_seal_when_the_history_no_longer_has_that(service: Service) -> None:
    """Of a fleet that is held for long, who comes back goes on from there by its offset alone."""
    consumer = await service.consumers.create("held", "clicks", Policy())
    of_it = service.registry.connect(consumer, "a", asyncio.Event())
    service.registry.acknowledge(consumer, of_it, Position("h", 1, 7))
    service.registry.acknowledge(consumer, of_it, Position("h", 1))
    assert of_it.applied.seal == 7
    assert can_continue(Position("h", 1, 7), "h", 200_000, 0, acknowledged=of_it.applied).yes


async def test_a_pause_does_not_bring_back_a_consumer_that_is_deleted_meanwhile(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        await service.consumers.create("gone", "clicks", Policy())
        async with service.registry._creating:  # Another one is just being made.
            pausing = asyncio.create_task(service.registry.pause("gone", Pause(1, "test")))
            await asyncio.sleep(0)
            await service.consumers.delete("gone")
        with pytest.raises(NotFound):
            await pausing
    async with opened(tmp_path) as service:
        assert not service.registry.consumers


async def test_a_pause_that_comes_while_another_is_ended_holds(tmp_path: Path) -> None:
    async def nothing(_: Consumer) -> None: ...

    async with opened(tmp_path) as service:
        await service.consumers.create("held", "clicks", Policy())
        await service.registry.pause("held", Pause(1, "first"))
        async with service.registry._creating:
            resuming = asyncio.create_task(service.registry.resume("held", nothing))
            await asyncio.sleep(0)
            pausing = asyncio.create_task(service.registry.pause("held", Pause(2, "second")))
            await asyncio.sleep(0)
        await asyncio.gather(resuming, pausing)
        assert service.registry.get("held").pause
    async with opened(tmp_path) as service:
        pause = service.registry.get("held").pause
        assert pause
        assert pause.by == "second"


@pytest.mark.parametrize(
    ("known", "connected", "leaves"),
    [
        ("me", False, True),
        ("me", True, True),  # By a stream that is lost, which the service has yet to find out.
        ("", False, True),  # Before a restart of the service.
        ("", True, False),
        ("other", False, False),
        ("other", True, False),
    ],
)
def test_a_goodbye_without_a_stream_counts_for_the_instance_that_says_it(
    known: str, connected: bool, leaves: bool
) -> None:
    found = replica("a", away=None if connected else 1, instance=known)
    assert may_leave(found, "me").yes is leaves
    assert not may_leave(None, "me").yes
    assert not may_leave(replace(found, instance=""), "").yes
    assert not may_leave(replace(found, instance="", left="its stream broke off"), "me").yes, (
        "it names no instance"
    )


TOP = Policy(top_k=3)


def test_configuring_reports_what_has_changed_and_what_has_not() -> None:
    before = {name: ("m", Policy()) for name in ("same", "other", "gone", "wrong", "kept")}
    after = before | {"new": ("m", Policy()), "other": ("m", TOP)}
    wanted = [ConsumerOptions(name, "m", TOP) for name in ("new", "other", "same", "wrong")]
    wanted.append(ConsumerOptions("kept", "m"))
    assert outcome(before, after, wanted, {"wrong": "another model"}) == (
        "created: new; changed: other; unchanged: same, kept; refused: wrong; "
        "not in the configuration and unchanged: gone"
    )
    assert outcome({}, {}, [], {}) == "no consumers"


@pytest.mark.parametrize(
    ("error", "goodbye", "instance", "replaced", "kind", "reason"),
    [
        (StreamEnded(), True, "a", False, EventKind.REPLICA_LEFT, "it said goodbye"),
        (asyncio.CancelledError(), True, "a", False, EventKind.REPLICA_LEFT, "it said goodbye"),
        (StreamEnded(), False, "", False, EventKind.REPLICA_LEFT, "its stream ended"),
        (StreamEnded(), False, "a", False, EventKind.REPLICA_LOST, "its stream ended without a goodbye"),
        (asyncio.CancelledError(), False, "a", False, EventKind.REPLICA_LOST, "its connection was lost"),
        (GeneratorExit(), False, "", False, EventKind.REPLICA_LOST, "its connection was lost"),
        (Superseded("newer"), False, "a", True, EventKind.REPLICA_REPLACED, "newer"),
        (StreamEnded(), False, "a", True, EventKind.REPLICA_REPLACED, "a newer stream took over"),
        (asyncio.CancelledError(), False, "", True, EventKind.REPLICA_REPLACED, "a newer stream took over"),
        (InvalidInput("acked"), False, "a", False, EventKind.REPLICA_LEFT, "acked"),
        (KeyError("x"), False, "a", False, EventKind.REPLICA_LEFT, "KeyError: 'x'"),
    ],
)
def test_a_goodbye_forgets_and_a_lost_connection_does_not(
    error: BaseException, goodbye: bool, instance: str, replaced: bool, kind: EventKind, reason: str
) -> None:
    found = departure(error, goodbye=goodbye, instance=instance, replaced=replaced)
    assert (found.kind, found.reason) == (kind, reason)


@pytest.mark.parametrize(
    ("ours", "newer", "kind"),
    [
        ("a", "b", Contradiction),  # Two of one name.
        ("a", "a", Superseded),  # It has reconnected.
        ("", "b", Superseded),
        ("a", "", Superseded),
        ("", "", Superseded),
    ],
)
def test_only_another_of_its_name_has_to_stop(ours: str, newer: str, kind: type[Exception]) -> None:
    assert type(superseded("c", "r", ours, newer)) is kind


@in_service(limits=LimitOptions(consumers=2))
async def test_the_number_of_consumers_is_limited(service: Service) -> None:
    for name in ("one", "two", "two"):
        await service.consumers.create(name, "clicks", Policy())
    with pytest.raises(LimitReached, match=r"consumers: at most 2 are allowed \(limit consumers\)"):
        await service.consumers.create("three", "clicks", Policy())
    await service.consumers.configure([ConsumerOptions("three", "clicks")], "the settings")
    assert "limit consumers" in service.consumers.shortcomings["three"]
    await service.consumers.delete("one")
    await service.consumers.create("three", "clicks", Policy())


@in_service(limits=LimitOptions(replicas_per_consumer=2))
async def test_the_number_of_replicas_of_a_consumer_is_limited(service: Service) -> None:
    registry = service.registry
    consumer, streams = await registry.create("c", "clicks", Policy()), [asyncio.Event() for _ in range(4)]
    replicas = [registry.connect(consumer, name, streams[0]) for name in ("one", "two")]
    with pytest.raises(LimitReached, match=r"at most 2 are allowed \(limit replicas_per_consumer\)"):
        registry.connect(consumer, "three", streams[1])
    registry.connect(consumer, "one", streams[2])  # One that is known may always come back.
    registry.disconnect(consumer, replicas[0], streams[2], "gone")
    registry.connect(consumer, "three", streams[1])


@in_service()
async def test_an_event_reports_who_takes_over_the_name_of_a_replica(service: Service) -> None:
    registry, told = service.registry, list[str]()
    service.events.listen(lambda event: told.append(event_line(event)))
    consumer = await registry.create("c", "clicks", Policy())
    for by, instance in (("anna", "1"), ("anna", "1"), ("anna", "2"), ("", "3"), ("", "4")):
        stream = asyncio.Event()
        replica = registry.connect(consumer, "r", stream, instance, by)
        registry.acknowledge(consumer, replica, Position("h", 1))
        if instance == "2":
            registry.disconnect(consumer, replica, stream, "gone")
    lines = [line for line in told if line.startswith("replica taken over: ")]
    said = [
        "it belonged to anna, which is still connected",
        "it belonged to anna",
        "it belonged to a client without a token or certificate, which is still connected",
    ]
    assert lines == [f"replica taken over: consumer=c replica=r {text}" for text in said]


async def test_a_replica_that_has_held_nothing_leaves_no_name(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        registry = service.registry
        consumer = await registry.create("c", "clicks", Policy())
        for name in ("held", "nothing", "refused"):
            stream = asyncio.Event()
            replica = registry.connect(consumer, name, stream)
            registry.acknowledge(consumer, replica, Position("h", 3 if name == "held" else 0))
            if name == "held":  # Since when it holds nothing of what there is.
                registry.acknowledge(consumer, replica, Position("g", 0))
            registry.disconnect(consumer, replica, stream, "gone", expected=name == "refused")
        assert list(consumer.replicas) == ["held", "refused"]
    async with opened(tmp_path) as service:
        assert list(service.registry.get("c").replicas) == ["held", "refused"]
