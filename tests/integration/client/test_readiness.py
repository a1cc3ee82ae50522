"""What "ready" promises: what a replica holds was the newest no longer ago than its consumer's limit, or, without
a limit, at least once since it was started. Each way in which it could be false:

1.  a replica has just started: nothing is held, or the consumer's model does not exist;
2.  it says that it holds something (`held`): shown by nobody before the service says so;
3.  it was away, frozen or slow, the service is gone, or clocks are set or differ: `unit/client/test_readiness.py`;
4.  it holds other rows than it was sent, or does not hold what it says that it does;
5.  it could not apply a release, has stopped, or was closed;
6.  a table has grown out of its target: what it holds of that gets older;
7.  it learns nothing of another limit;
8.  the service is of before, and says nothing.

And no replica that is ready is made to look otherwise by a trainer that pauses, or by a steady stream of cuts.
"""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from tests.support.fleet import (
    AT_ONCE,
    TABLES,
    USER,
    WAIT,
    Recorder,
    Trainer,
    admin_of,
    follow,
)
from tests.support.server import RunningService
from tests.support.state import Reachable
from tests.support.wire import ReplicaStream, ack

from deltasync.base.clock import steady_ns
from deltasync.client import (
    CallbackTarget,
    Decision,
    DeltasyncError,
    NumpyTarget,
    Policy,
    Release,
    Subscriber,
    SubscriberOptions,
    TableSpec,
)
from deltasync.client.connection import Tuning

LIMIT = 30.0
POLICIES = {
    "limited": Policy(ready_within_seconds=LIMIT),
    "top": Policy(top_k=0.5, ready_within_seconds=LIMIT),
}
# Idle streams look for changes often.
OPTIONS: dict[str, Any] = {"progress_seconds": 0.02, "releases": AT_ONCE}
EVERY = ["predictors", "limited", "top"]


class Clock:
    """A clock that goes on by itself, and can be moved on."""

    ahead_ns = 0

    def __call__(self) -> int:
        return steady_ns() + self.ahead_ns

    def move_on(self, seconds: float) -> None:
        self.ahead_ns += int(seconds * 1e9)


@pytest.fixture
def clock() -> Clock:
    """The clock of the replicas."""
    return Clock()


@pytest.fixture
def service_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("model.model", "views.view", "views.release_maker"):
        monkeypatch.setattr(f"deltasync.{module}.steady_ns", clock)
    return clock


@pytest.fixture
def impatient_threads() -> Iterator[None]:
    """The interpreter switches threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Told:
    """What `on_readiness` is told."""

    def __init__(self) -> None:
        self.decisions: SimpleQueue[Decision] = SimpleQueue()

    def __call__(self, decision: Decision) -> None:
        self.decisions.put(decision)

    def next(self) -> Decision:
        return self.decisions.get(timeout=WAIT)


class Watched(Recorder):
    """Notes whether its subscriber was ready before each release."""

    def __init__(self) -> None:
        super().__init__()
        self.subscriber: Subscriber | None = None
        self.known = threading.Event()
        self.ready: list[bool] = []

    def apply(self, release: Release) -> None:
        assert self.known.wait(WAIT)
        assert self.subscriber
        self.ready.append(self.subscriber.ready)
        super().apply(release)

    def watch(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self.known.set()


@pytest.mark.parametrize("consumer", EVERY)
def test_a_replica_is_ready_once_it_holds_the_newest_and_not_before(
    service: RunningService, consumer: str
) -> None:
    target, told = Watched(), Told()
    with follow(service, consumer, "a", target, on_readiness=told) as replica:
        target.watch(replica)
        with pytest.raises(TimeoutError, match=r"replica 'a' is not ready: (it has|the service has no rows)"):
            replica.wait_until_ready(0)
        with Trainer(service.grpc) as trainer:
            head = trainer.publish_all()
            replica.wait_until_ready(WAIT)
            replica.wait_for(head, WAIT)
        assert told.next().yes
        assert replica.ready, replica.readiness
        assert target.ready[0] is False
    assert told.next() == replica.readiness == Decision(False, "its subscriber was closed")
    assert told.decisions.empty()
    with pytest.raises(TimeoutError, match="replica 'a' is not ready: its subscriber was closed"):
        replica.wait_until_ready(WAIT)
    assert not [thread for thread in threading.enumerate() if thread.name == "deltasync-readiness"]


def test_a_replica_has_a_version_exactly_when_it_is_ready(
    service: RunningService, trainer: Trainer, impatient_threads: None
) -> None:
    head = trainer.publish_all()
    for name in map(str, range(80)):
        with follow(service, "predictors", name, CallbackTarget(lambda _: None)) as replica:
            if int(name) % 2:
                replica.wait_until_ready(WAIT)
                assert (replica.held, replica.version) == (head, head)
            else:
                replica.wait_for(head, WAIT)
                assert replica.ready, replica.readiness


def test_a_replica_of_a_model_that_does_not_exist_says_so(service: RunningService) -> None:
    with follow(service, "limited", "a", NumpyTarget()) as replica:
        while "the service has no rows for its consumer yet" not in replica.readiness.reason:
            assert not replica.ready
        with Trainer(service.grpc) as trainer:
            trainer.publish_all()
            replica.wait_until_ready(WAIT)


@pytest.mark.parametrize("consumer", EVERY)
@pytest.mark.parametrize("make", [lambda: CallbackTarget(lambda _: None), NumpyTarget], ids=["callback", "arrays"])
def test_a_pause_of_the_trainer_keeps_replicas_ready(
    service: RunningService, clock: Clock, service_clock: Clock, consumer: str, make: Any
) -> None:
    """However long, and whatever their targets: what they hold is the newest, and the service keeps saying so."""
    with Trainer(service.grpc) as trainer:
        trainer.publish_all()
    with follow(service, consumer, "a", make(), tuning=Tuning(clock=clock)) as replica:
        replica.wait_until_ready(WAIT)
        service_clock.move_on(3600)
        clock.move_on(3600)
        replica.wait_until_ready(WAIT)


@pytest.mark.parametrize("consumer", EVERY)
def test_a_replica_with_earlier_rows_is_ready_once_the_service_confirms(tmp_path: Path, consumer: str) -> None:
    with RunningService(tmp_path / "data", policies=POLICIES, **OPTIONS) as service:
        with Trainer(service.grpc) as trainer, follow(service, consumer, "a", NumpyTarget()) as replica:
            replica.wait_for(trainer.publish_all(), WAIT)
        address, held = service.grpc, replica.held
    target = NumpyTarget()
    target.tables = {name: rows.copy() for name, rows in trainer.rows.items()}
    options = SubscriberOptions(service=address, consumer=consumer, replica="a", held=held)
    with Subscriber(options, target) as replica:
        while not replica.readiness.reason.startswith("it reconnects"):
            assert not replica.ready
        with RunningService(
            tmp_path / "data", policies=POLICIES, grpc_port=int(address.rpartition(":")[2]), **OPTIONS
        ):
            replica.wait_until_ready(WAIT)
            assert replica.held == held


@pytest.mark.parametrize("consumer", EVERY)
def test_one_that_holds_other_rows_is_not_ready_until_repaired(service: RunningService, consumer: str) -> None:
    target, told = Recorder(), Told()
    with Trainer(service.grpc) as trainer, follow(service, consumer, "a", target, on_readiness=told) as replica:
        replica.wait_for(trainer.publish_all(), WAIT)
        assert told.next().yes
        target.tables["item"][7] += 1
        assert told.next() == Decision(False, "its rows differ from the service's in item")
        assert told.next().yes
        with target.reading():
            assert target.bytes() == trainer.expected()


@pytest.mark.parametrize("consumer", EVERY)
def test_a_replica_that_has_lost_its_rows_is_repaired_before_it_is_ready(
    service: RunningService, consumer: str
) -> None:
    with Trainer(service.grpc) as trainer:
        with follow(service, consumer, "a", NumpyTarget()) as replica:
            replica.wait_for(trainer.publish_all(), WAIT)
        target, told = Watched(), Told()
        with follow(service, consumer, "a", target, held=replica.held, on_readiness=told) as empty:
            target.watch(empty)
            empty.wait_until_ready(WAIT)
            assert target.bytes() == trainer.expected()
            assert target.ready == [False, False], "asked to show it, then repaired"


class Part(NumpyTarget):
    """May come to have no place for a table any more."""

    lost: frozenset[str] = frozenset()

    def bound(self) -> frozenset[str]:
        return frozenset(self.tables) - self.lost - {"left out"}


def test_a_table_that_a_target_can_follow_no_more_gets_older(service: RunningService, clock: Clock) -> None:
    target, others = Part(), Part()
    tables = [*TABLES, TableSpec("left out", 10, 4)]
    with (
        Trainer(service.grpc, tables) as trainer,
        follow(service, "limited", "a", target, tuning=Tuning(clock=clock)) as replica,
        follow(service, "predictors", "b", others) as other,
    ):
        replica.wait_for(trainer.publish_all(), WAIT)
        replica.wait_until_ready(WAIT)
        other.wait_until_ready(WAIT)
        target.lost = others.lost = frozenset({"user"})
        replica.wait_for(trainer.change(3), WAIT)
        assert replica.ready, "what it holds of it is not old yet"
        clock.move_on(2 * LIMIT)
        assert not replica.ready
        assert replica.readiness.reason.endswith("; its target no longer updates user")
        replica.wait_for(trainer.change(3), WAIT)
        assert not replica.ready
        other.wait_for(replica.held, WAIT)
        assert other.ready, "its consumer has no limit"


@pytest.mark.parametrize("consumer", EVERY)
def test_under_a_steady_stream_of_cuts_one_that_is_behind_is_ready(service: RunningService, consumer: str) -> None:
    turns = threading.Semaphore(0)

    class Slow(Watched):
        def apply(self, release: Release) -> None:
            assert turns.acquire(timeout=WAIT)
            super().apply(release)

    target = Slow()
    with Trainer(service.grpc) as trainer, follow(service, consumer, "a", target) as replica:
        target.watch(replica)
        trainer.publish_all()
        for _ in range(40):
            head = trainer.change(5)
            turns.release()
        for _ in range(10):
            turns.release()
        replica.wait_for(head, WAIT)
        ready = list(target.ready)  # Before it is closed: rows that a policy has left may still come.
    assert ready[0] is False
    assert all(ready[3:]), ready


def opened_limit(service: Reachable, consumer: str) -> float:
    with ReplicaStream(service.grpc, consumer=consumer, replica="raw") as stream:
        found: float = stream.until("opened").ready_within_seconds
        return found


def test_another_limit_is_told_and_sends_no_row_again(service: RunningService) -> None:
    target = Recorder()
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "a", target) as replica:
        head = trainer.publish_all()
        replica.wait_until_ready(WAIT)
        for policy in (Policy(ready_within_seconds=7), Policy(ready_within_seconds=8.5), Policy()):
            admin_of(service).update_consumer("predictors", policy)
            words = f"the limit is {policy.ready_within_seconds or 0:.15g} s"
            while (words if policy.ready_within_seconds else "it has caught up") not in replica.readiness.reason:
                assert replica.ready
            assert opened_limit(service, "predictors") == (policy.ready_within_seconds or 0)
        replica.wait_for(head, WAIT)
        assert (replica.held, len(target.releases)) == (head, 1)
        assert service.get_json("/consumers/predictors")["policy"]["ready_within_seconds"] is None
        admin_of(service).update_consumer("top", Policy(top_k=0.5, ready_within_seconds=7))
    assert target.received_rows == sum(table.rows for table in TABLES)


def test_tokens_come_back_and_are_not_looked_into(service: RunningService, trainer: Trainer) -> None:
    with ReplicaStream(service.grpc, consumer="limited", replica="raw") as stream:
        head = trainer.publish_all()
        _, end = stream.release()
        assert (end.token, end.behind_ns) == (0, 0)
        for token in (2**64 - 1, 3):
            message = ack(0, head)
            message.ack.token = token
            stream.send(message)
            while (progress := stream.until("progress")).token != token:
                assert progress.token in (0, 2**64 - 1)
            assert progress.behind_ns == 0
        stream.send(ack(0, head))
        trainer.set(USER, 3, 1.0)
        assert stream.release()[1].token == 3


def test_a_consumer_that_is_deleted_stops_its_replicas(service: RunningService, trainer: Trainer) -> None:
    told = Told()
    with follow(service, "limited", "a", NumpyTarget(), on_readiness=told) as replica:
        trainer.publish_all()
        assert told.next().yes
        admin_of(service).delete_consumer("limited")
        assert "its subscriber has stopped: consumer 'limited'" in told.next().reason
        with pytest.raises(DeltasyncError):
            replica.wait_until_ready(WAIT)
