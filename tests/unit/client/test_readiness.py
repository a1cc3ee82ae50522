"""A replica that says it is ready is: what it holds was the newest no longer ago than its limit, in truth.

The truth is a time that nobody in the system can read: the clocks of service and replica are off by any amount,
and messages wait for any time on their way, and with who is frozen.
"""

import itertools
import logging
import threading
from collections import deque
from dataclasses import replace
from queue import SimpleQueue

import pytest
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.examples import stateful

from deltasync.base.clock import FOREVER_NS, Succession
from deltasync.base.decision import Decision
from deltasync.client.readiness import Evidence, Readiness, decide, newest_ns

SECOND = 10**9
WAIT = 20.0
TIMES = st.sampled_from([0, 1, 2, 3, 5, 8, 13, 40])
OFFSETS = st.integers(1_000, 10**6)


class Stream:
    """One connection: what is on its way, and what the service has read."""

    def __init__(self, opened_ns: int) -> None:
        self.opened_ns = opened_ns
        self.token = 0
        self.down: deque[tuple[int, int, int]] = deque()
        self.acks: deque[int] = deque()


class Replication(RuleBasedStateMachine):
    """A trainer's versions, a service that may restart, and a replica that may be slow, frozen or cut off."""

    @initialize(
        service=OFFSETS, replica=OFFSETS, limit=st.none() | st.sampled_from([1, 5, 20]), held=st.booleans()
    )
    def start(self, service: int, replica: int, limit: int | None, held: bool) -> None:
        self.now = 0  # The truth.
        self.superseded = {0: 0}  # When each version stopped being the newest.
        self.newest = self.sent = self.held = 0
        self.service_clock, self.replica_clock = service, replica
        self.succession = Succession()
        for _ in range(3):
            self.cut()
            self.now += 10
        self.started = self.now
        self.held = self.sent = 2 if held else 0  # What a new process has from disk.
        self.evidence = Evidence(started_ns=self.replica_ns, limit_ns=limit)
        self.has_held_newest = False
        self.stream = Stream(self.replica_ns)

    @property
    def replica_ns(self) -> int:
        return self.replica_clock + self.now

    @rule(time=TIMES)
    def wait(self, time: int) -> None:
        self.now += time

    @rule()
    def cut(self) -> None:
        self.superseded[self.newest] = self.now
        self.newest += 1
        self.succession.add(self.newest, self.service_clock + self.now)

    @rule(share=st.floats(0, 1))
    def send_release(self, share: float) -> None:
        """What was frozen a while ago, or just now."""
        assume(self.sent < self.newest)
        self.sent = max(self.sent + 1, round(self.sent + share * (self.newest - self.sent)))
        self.send(self.sent)

    @rule()
    @precondition(lambda self: self.sent)
    def send_progress(self) -> None:
        self.send(self.sent)

    def send(self, number: int) -> None:
        behind = self.succession.behind_ns(number, self.service_clock + self.now)
        self.stream.down.append((number, self.stream.token, behind))

    @rule(acks=st.booleans(), takes=TIMES)
    @precondition(lambda self: self.stream.down)
    def take(self, acks: bool, takes: int) -> None:
        number, token, behind = self.stream.down.popleft()
        assert number >= self.held
        self.now += takes  # Applying it.
        self.held = number
        self.evidence = self.evidence.holding(newest_ns(token, behind, self.stream.opened_ns))
        self.has_held_newest |= self.superseded.get(self.held, self.now) >= self.started
        if acks:
            self.stream.acks.append(self.replica_ns)

    @rule()
    @precondition(lambda self: self.stream.acks)
    def read_ack(self) -> None:
        self.stream.token = self.stream.acks.popleft()

    @rule()
    def reconnect(self) -> None:
        self.stream, self.sent = Stream(self.replica_ns), self.held

    @rule(clock=OFFSETS)
    def restart_service(self, clock: int) -> None:
        self.service_clock, self.succession = clock, Succession()
        self.succession.add(self.newest, self.service_clock + self.now)
        self.reconnect()

    @rule()
    def settle(self) -> None:
        """When all goes on at once, a replica becomes ready with two messages."""
        self.reconnect()
        self.sent = self.newest
        self.send(self.newest)
        self.take(True, 0)
        self.read_ack()
        self.send(self.newest)
        self.take(False, 0)
        assert decide(self.evidence, self.replica_ns).yes

    @invariant()
    def what_it_says_is_true(self) -> None:
        if not decide(self.evidence, self.replica_ns).yes:
            return
        limit = self.evidence.limit_ns
        until = self.superseded.get(self.held, self.now)
        assert self.held
        if limit is None:
            assert self.has_held_newest
        else:
            assert self.now - until <= limit, f"version {self.held} was the newest until {until}, now {self.now}"


Replication.TestCase.settings = stateful(stateful_step_count=40)
TestReplication = Replication.TestCase


def fresh(seconds_ago: float, limit: float | None, now: int = 100 * SECOND) -> Decision:
    limit_ns = None if limit is None else int(limit * SECOND)
    evidence = Evidence(started_ns=90 * SECOND, limit_ns=limit_ns).holding(now - int(seconds_ago * SECOND))
    return decide(evidence, now)


def test_a_replica_is_ready_within_its_limit_and_not_beyond() -> None:
    assert fresh(10, 10) == Decision(True, "its rows were the newest 10.0 s ago, the limit is 10 s")
    assert fresh(10.1, 10) == Decision(False, "its rows were the newest 10.1 s ago, the limit is 10 s")
    assert fresh(50, 60).yes, "what it held when it started is young enough"


def test_without_a_limit_it_has_to_hold_the_newest_once() -> None:
    assert fresh(9, None) == Decision(True, "it has caught up since it started")
    assert not fresh(11, None).yes


def test_what_keeps_it_from_being_ready_is_said() -> None:
    new = Evidence(started_ns=0)
    assert decide(new, 1) == Decision(False, "it has not yet connected to the service")
    ready = new.holding(0)
    assert decide(ready, 1).yes
    assert decide(replace(ready, wrong=("user", "item")), 1) == Decision(
        False, "its rows differ from the service's in item, user"
    )
    assert decide(replace(ready, ended="its subscriber was closed"), 1) == Decision(
        False, "its subscriber was closed"
    )
    late = replace(ready, limit_ns=SECOND, lacking="it reconnects: nobody there")
    assert decide(late, 3 * SECOND).reason.endswith("the limit is 1 s; it reconnects: nobody there")


def test_what_nobody_knows_the_age_of_shows_nothing_and_spoils_nothing() -> None:
    assert newest_ns(5, FOREVER_NS, 3) is None
    assert newest_ns(5, FOREVER_NS + 10, 3) is None
    unknown = Evidence(started_ns=0).holding(None)
    assert not decide(unknown, 1).yes
    assert decide(Evidence(started_ns=0).holding(7).holding(None), 8).yes
    assert not decide(Evidence(started_ns=0).holding(7).holding(None, reset=True), 8).yes


def test_what_does_not_continue_what_was_held_is_as_old_as_it_is() -> None:
    held = Evidence(started_ns=0, limit_ns=10).holding(100)
    assert held.holding(50).newest_ns == 100
    assert held.holding(50, reset=True).newest_ns == 50


class Clock:
    def __init__(self) -> None:
        self.now = 100 * SECOND

    def __call__(self) -> int:
        return self.now


class Told:
    """What is told, in the order in which it is."""

    def __init__(self) -> None:
        self.decisions: SimpleQueue[Decision] = SimpleQueue()

    def __call__(self, decision: Decision) -> None:
        self.decisions.put(decision)

    def next(self) -> Decision:
        return self.decisions.get(timeout=WAIT)


def test_each_change_is_told_once_and_the_end_too() -> None:
    clock, told = Clock(), Told()
    readiness = Readiness("a", told, clock)
    for _ in range(3):
        readiness.holds(clock())
    assert told.next().yes
    readiness.note(wrong=("user",))
    assert told.next().reason == "its rows differ from the service's in user"
    readiness.note(wrong=())
    assert told.next().yes
    readiness.end("it has failed")
    readiness.end("it was closed")
    assert told.next() == Decision(False, "it has failed")
    readiness.close()
    assert told.decisions.empty()


def test_a_change_that_is_over_by_then_is_told_too() -> None:
    told, go_on = Told(), threading.Event()

    def slowly(decision: Decision) -> None:
        assert go_on.wait(WAIT)
        told(decision)

    readiness = Readiness("a", slowly, Clock())
    readiness.holds(100 * SECOND)
    readiness.note(wrong=("user",))
    readiness.note(wrong=())
    go_on.set()
    assert [told.next().yes for _ in range(3)] == [True, False, True]
    readiness.end("done")
    readiness.close()


def test_a_close_does_not_wait_for_a_callback_that_does_not_return(caplog: pytest.LogCaptureFixture) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hang(_: Decision) -> None:
        begun.set()
        go_on.wait()

    readiness = Readiness("a", hang, Clock(), patience_seconds=0.01)
    readiness.holds(100 * SECOND)
    assert begun.wait(WAIT)
    readiness.end("done")
    readiness.close()
    assert "replica a: on_readiness has not returned for 0.01 s; the replica is closed without it" in caplog.text
    go_on.set()


@pytest.mark.parametrize("later", [False, True], ids=["limited", "limited later"])
def test_the_end_of_the_limit_is_told_though_nothing_comes(later: bool) -> None:
    """By the real clock: nobody wakes the thread but a limit that comes while it waits."""
    told, started = Told(), itertools.count(1)
    readiness = Readiness("a", told, lambda: next(started) * 10**6)
    if not later:
        readiness.note(limit_ns=20_000_000)
    readiness.holds(10**6)
    assert told.next().yes
    if later:
        readiness.note(limit_ns=20_000_000)
    assert not told.next().yes
    readiness.end("done")
    readiness.close()
    assert told.decisions.empty()


def test_what_a_callback_raises_is_logged_and_the_next_change_is_told(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()

    def fail(decision: Decision) -> None:
        told(decision)
        raise RuntimeError("no room in the load balancer")

    readiness = Readiness("a", fail, Clock())
    readiness.holds(100 * SECOND)
    assert told.next().yes
    readiness.end("done")
    assert not told.next().yes
    readiness.close()
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in errors] == ["replica a: on_readiness failed"] * 2
    assert "no room in the load balancer" in caplog.text


def test_a_callback_may_ask_and_end_it() -> None:
    """It is called under no lock, and may be the one that closes."""
    asked = Told()

    def ask(decision: Decision) -> None:
        other = threading.Thread(target=lambda: asked(readiness.wait(0)))
        other.start()
        other.join()
        readiness.end("done")
        readiness.close()

    readiness = Readiness("a", ask, Clock())
    readiness.holds(100 * SECOND)
    assert asked.next().yes
    assert not asked.next().yes
    readiness.close()


def test_waiting_ends_when_it_is_ready_has_ended_or_lasts_too_long() -> None:
    readiness = Readiness("a", None, Clock())
    assert readiness.wait(0) == Decision(False, "it has not yet connected to the service")
    threading.Thread(target=lambda: readiness.holds(100 * SECOND)).start()
    assert readiness.wait(WAIT).yes
    readiness.note(wrong=("user",))
    threading.Thread(target=lambda: readiness.end("done")).start()
    assert readiness.wait(WAIT) == Decision(False, "done")
    readiness.close()
