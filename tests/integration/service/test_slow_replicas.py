"""Replicas that return from far behind, read slowly, or not at all: bounded memory, and nobody else is delayed."""

import gc
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from weakref import ref

import grpc
import numpy as np
import pytest
from tests.support.fleet import WAIT, Recorder, Trainer, admin_of, follow, wait_for_lag
from tests.support.server import RunningService
from tests.support.waiting import wait_for
from tests.support.wire import ReplicaStream, ack, size_of

from deltasync.client import Position, TableSpec
from deltasync.model.releases import FrozenRelease, Releases
from deltasync.v1 import subscribe_pb2

TABLE = TableSpec("user", 20_000, 16)
MEMORY_BYTES, BLOCK_BYTES = 300_000, 100_000  # A fifth of the table, and a fifteenth.

OPTIONS = {"release_memory_bytes": MEMORY_BYTES, "release_block_bytes": BLOCK_BYTES}
bounded = pytest.mark.parametrize("running", [OPTIONS], indirect=True)


class Frozen:
    """Releases that the service keeps in memory.

    Attributes:
        most: the most bytes that they took at any time.
        made: how many were made.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.most = self.made = 0
        self._live: list[ref[FrozenRelease]] = []
        noted = Releases.noted

        def note(releases: Releases, release: FrozenRelease) -> FrozenRelease:
            self._live.append(ref(release))
            self.made += 1
            self.most = max(self.most, self.now)
            return noted(releases, release)

        patch.setattr(Releases, "noted", note)

    @property
    def now(self) -> int:
        return sum(release.nbytes for each in self._live if (release := each()))


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Frozen:
    return Frozen(monkeypatch)


@pytest.fixture
def trainer(running: RunningService, frozen: Frozen) -> Iterator[Trainer]:
    with Trainer(running.grpc, [TABLE]) as trainer:
        trainer.publish_all()
        yield trainer


def returned(stack: ExitStack, running: RunningService, name: str, held: Position, rows: np.ndarray) -> Recorder:
    """A replica that comes back with what it held."""
    target = Recorder()
    target.tables = {TABLE.name: rows}
    stack.enter_context(follow(running, "predictors", name, target, held=held))
    return target


@bounded
def test_a_fleet_that_returns_while_cuts_go_on_takes_bounded_memory(
    running: RunningService, frozen: Frozen, trainer: Trainer
) -> None:
    """Each of another version, and one of which reads a chunk and no more for now."""
    before: list[tuple[Position, np.ndarray]] = []
    for _ in range(20):
        head = trainer.change(2_000)
        before.append((head, trainer.rows[TABLE.name].copy()))
    with ExitStack() as stack, ReplicaStream(running.grpc, replica="slow", budget=1) as slow:
        first = slow.until("chunk").rows
        targets = [
            returned(stack, running, f"r{number}", held, rows.copy())
            for number, (held, rows) in enumerate(before[:-1])
        ]
        for _ in range(10):
            head = trainer.change(1_000)
        wanted = {f"r{number}" for number in range(19)}
        wait_for_lag(running, "predictors", lambda lag: _holding(lag, head.number) >= wanted)
        assert all(each.bytes() == trainer.expected() for each in targets)
        assert 0 < frozen.most <= MEMORY_BYTES + 20 * BLOCK_BYTES
        received = size_of([first])
        slow.send(ack(received))
        while (message := slow.receive()).WhichOneof("message") != "release_end":
            if message.WhichOneof("message") == "chunk":
                received += size_of([message.chunk.rows])
                slow.send(ack(received))
        assert message.release_end.position.version == head.number
        slow.send(ack(received, head))
        wait_for_lag(running, "predictors", lambda lag: "slow" in _holding(lag, head.number))
    gc.collect()
    wait_for(lambda: frozen.now <= 1_000 * TABLE.row_bytes)  # The newest cut is kept until the next one.


def _holding(lag: Any, version: int) -> set[str]:
    return {each["replica"] for each in lag["replicas"] if each["offset"] >= version}


@bounded
def test_replicas_that_take_nothing_hold_up_nobody(
    running: RunningService, frozen: Frozen, trainer: Trainer
) -> None:
    with ExitStack() as stack:
        stalled = [stack.enter_context(ReplicaStream(running.grpc, replica=f"s{n}", budget=1)) for n in range(3)]
        for each in stalled:
            each.until("chunk")
        made = frozen.made
        for _ in range(3):
            head = trainer.publish_all()
            target = Recorder()
            with follow(running, "predictors", "new", target) as new:
                new.wait_for(head, WAIT)
            assert target.bytes() == trainer.expected()
        assert frozen.made == made + 3, "they keep a block each, and nothing that is frozen"


@pytest.mark.parametrize("running", [OPTIONS | {"watch_seconds": 0.02, "quiet_seconds": 0.1}], indirect=True)
@pytest.mark.usefixtures("trainer")
def test_a_replica_that_takes_nothing_is_given_up(running: RunningService) -> None:
    with ReplicaStream(running.grpc, replica="stalled", budget=1) as stalled:
        stalled.until("opened")
        lag = wait_for_lag(
            running, "predictors", lambda lag: lag["replicas"] and not lag["replicas"][0]["connected"]
        )
    (line,) = lag["replicas"]
    assert re.match("it has received nothing of its", line["left"])


@bounded
def test_who_says_goodbye_in_the_middle_of_a_release_is_forgotten(
    running: RunningService, frozen: Frozen, trainer: Trainer
) -> None:
    with ReplicaStream(running.grpc, replica="leaves", budget=1) as leaving:
        leaving.until("chunk")
        leaving.send(subscribe_pb2.SubscribeRequest(ack=subscribe_pb2.Ack(goodbye=True)))
        leaving.end()
        wait_for_lag(running, "predictors", lambda lag: not lag["replicas"])
    assert trainer.publish_all().number == 2
    gc.collect()
    assert frozen.now == 0


@bounded
def test_a_pause_breaks_off_what_a_replica_is_sent_from_far_behind(
    running: RunningService, trainer: Trainer
) -> None:
    """Though all of it is older than what the pause is for."""
    admin, target = admin_of(running), Recorder()
    with ReplicaStream(running.grpc, replica="slow", budget=1) as slow:
        received = size_of([slow.until("chunk").rows])
        trainer.publish_all()
        admin.pause_consumer("predictors", "nonsense")
        slow.send(ack(received))
        code, text = slow.refusal()
        assert code is grpc.StatusCode.ABORTED
        said = r"consumer 'predictors' is paused; reconnect \(paused since \S+ by admin token \(\S+\): nonsense\)"
        assert re.fullmatch(said, text)
        with follow(running, "predictors", "slow", target) as replica:
            lag = wait_for_lag(running, "predictors", lambda lag: lag["replicas"][0]["connected"])
            assert (lag["state"], lag["offset"]) == ("paused", 0)
            assert not replica.ready
            admin.resume_consumer("predictors")
            replica.wait_for(2, WAIT)
            assert target.bytes() == trainer.expected()
            assert [release.position.number for release in target.releases] == [2]
