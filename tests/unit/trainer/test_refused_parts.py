"""A part that one of two ranks is refused, by a service that is a stand-in: the other is not left waiting."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import nn

from deltasync.base.errors import DeltasyncError, InvalidInput, ResyncRequired
from deltasync.client import Part, Position
from deltasync.client.connection import Connection
from deltasync.trainer import run as trainer_run
from deltasync.trainer import sync as trainer_sync
from deltasync.trainer.distributed import agreement
from deltasync.trainer.run import StallDetector
from deltasync.trainer.sync import DeltaSync, SyncOptions

RANKS = 2
SEAL = 2**64 - 9  # Of a version: this and its number.
T = TypeVar("T")


class Together:
    """What two ranks, each in a thread of its own, do together."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=20)
        self._values: list[Any] = [None] * RANKS

    def every(self, rank: int, value: T) -> list[T]:
        """What each rank has said."""
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


def every(value: T) -> list[T]:
    """What each rank has said, in its thread."""
    together: Together = ThreadAgreement.of_thread.together
    return together.every(ThreadAgreement.of_thread.rank, value)


class ThreadAgreement(agreement.Agreement):
    """An agreement of threads instead of processes."""

    of_thread = threading.local()

    def __init__(self, *_names: str) -> None:
        super().__init__(*_names)
        self.rank, self.world_size = self.of_thread.rank, RANKS
        self._together: Together = self.of_thread.together

    def reach(self, count: int, state: agreement.Consensus) -> agreement.Consensus:
        assert self._together.every(self.rank, count) == [count] * RANKS
        every = [vars(each) for each in self._together.every(self.rank, state)]
        flags = {name: any(each[name] for each in every) for name in every[0] if name != "deletes"}
        return agreement.Consensus(**flags, deletes=min(each["deletes"] for each in every))

    def differing(self, _digests: Any) -> list[str]:
        return []

    def any_of(self, flag: bool) -> bool:
        return any(self._together.every(self.rank, flag))

    def lowest(self, position: Position) -> Position:
        return min(self._together.every(self.rank, position), key=lambda each: each.number)

    def new_run(self) -> tuple[str, int]:
        return self._together.every(self.rank, ("run", 1))[0]


class Service:
    """Seals a cut once it has all parts; refuses rank 1 the second, once, or each rank by an error of its own."""

    def __init__(self, *errors: DeltasyncError) -> None:
        self._lock = threading.Lock()
        self._errors = dict(enumerate(errors, RANKS - len(errors)))
        self._parts: dict[int, Future[Position]] = {}
        self.sealed: list[tuple[bool, ...]] = []
        self._full: dict[int, bool] = {}
        self.steps: list[set[int]] = []  # Of the parts of each cut.

    def take(self, rank: int, part: Part, done: "Future[Position]") -> None:
        with self._lock:
            if self.sealed and rank in self._errors:
                done.set_exception(self._errors.pop(rank))
                return
            if not self._parts:
                self.steps.append(set())
            self.steps[-1].add(part.step)
            self._parts[rank], self._full[rank] = done, part.full
            if len(self._parts) == RANKS:
                self.sealed.append(tuple(self._full[each] for each in range(RANKS)))
                for each in self._parts.values():
                    each.set_result(Position("a" * 32, len(self.sealed), seal=SEAL + len(self.sealed)))
                self._parts = {}

    def forget(self, rank: int) -> None:
        with self._lock:
            self._parts.pop(rank, None)


def play(service: Service, monkeypatch: pytest.MonkeyPatch, story: Callable[[DeltaSync, nn.Linear], None]) -> None:
    """Let two ranks do the same."""
    together = Together()

    class RankPublisher:
        deletes = wanted = ()
        connection = Connection(True, 0, 0.0, 0, "")

        def __init__(self, options: Any, *_: Any) -> None:
            self._rank = options.rank

        def publish(self, part: Part) -> "Future[Position]":
            done: Future[Position] = Future()
            service.take(self._rank, part, done)
            return done

        def close(self) -> None:
            service.forget(self._rank)

        abort = close

    monkeypatch.setattr(trainer_run, "Publisher", RankPublisher)
    monkeypatch.setattr(trainer_sync, "Agreement", ThreadAgreement)

    def rank(number: int) -> None:
        ThreadAgreement.of_thread.rank, ThreadAgreement.of_thread.together = number, together
        model = nn.Linear(3, 4)
        sync = DeltaSync(model, SyncOptions(service="localhost:1", model="m", publish_every=1))
        try:
            sync.flush(20)
            with torch.no_grad():
                model.weight += 1
            sync.step()
            story(sync, model)
        finally:
            sync.abort()

    with ThreadPoolExecutor(RANKS) as threads:
        for each in [threads.submit(rank, number) for number in range(RANKS)]:
            each.result()


def test_where_one_must_publish_every_row_all_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(ResyncRequired("publish every row first"))

    def story(sync: DeltaSync, _: nn.Linear) -> None:
        assert sync.flush(20).number == 2

    play(service, monkeypatch, story)
    assert service.sealed == [(True, True), (True, True)]


@pytest.mark.parametrize(
    ("head", "full"),
    [
        (Position("b" * 32, 1, seal=SEAL + 1), False),
        (Position("b" * 32, 1, seal=7), True),
        (Position("b" * 32, 1), True),
        (Position("b" * 32), True),
    ],
)
def test_all_go_on_from_what_the_service_has(monkeypatch: pytest.MonkeyPatch, head: Position, full: bool) -> None:
    """Published by a service whose second version was refused to one rank alone, as if it had lost one."""
    service = Service(ResyncRequired("the newest one is only 1", head=head))

    def story(sync: DeltaSync, model: nn.Linear) -> None:
        # As of the version before: the one under way is the second.
        sync._run.position = Position("a" * 32, 2, seal=5)
        assert sync.flush(20).number == 2
        with torch.no_grad():
            model.weight += 1
        sync.step()
        assert sync.flush(20).number == 3

    play(service, monkeypatch, story)
    assert service.sealed == [(True, True), (full, full), (False, False)]


def test_rows_that_ranks_are_told_of_are_published_with_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rank has none of them: else it would wait with its part for the others."""
    moved = ("moved", np.array([1]))  # To another rank, when the model was resharded meanwhile.
    rows: list[list[tuple[str, Any]]] = [[("weight", np.array([0, 2])), moved], []]
    service = Service(*(ResyncRequired("publish what came after", changed=changed) for changed in rows))

    def story(sync: DeltaSync, _: nn.Linear) -> None:
        assert sync.flush(20).number == 2

    play(service, monkeypatch, story)
    assert service.sealed == [(True, True), (False, False)]


def test_where_only_one_is_told_of_rows_all_parts_are_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service was put back between their opens, say. Parts of different steps would never meet again."""
    told = ResyncRequired("publish what came after", changed=[("weight", np.array([0, 2]))])
    service = Service(told, ResyncRequired("publish every row first"))

    def story(sync: DeltaSync, _: nn.Linear) -> None:
        assert sync.flush(20).number == 2

    play(service, monkeypatch, story)
    assert [len(steps) for steps in service.steps] == [1, 1]


def test_training_goes_on_where_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(InvalidInput("a row of NaN"))

    def story(sync: DeltaSync, model: nn.Linear) -> None:
        for in_trouble in (True, False):
            while not all(every(bool(sync.trouble) is in_trouble)):
                sync.step()
        assert sync.stats.refusals == 1

    play(service, monkeypatch, story)
    assert service.sealed[:2] == [(True, True), (False, False)]


# Waiting for a part of another rank: counted in time, from when it began.


def test_it_is_long_after_a_minute_without_an_end() -> None:
    now = [0.0]
    stall = StallDetector(now=lambda: now[0])
    stall.update(waits=True)
    now[0] = 59.0
    stall.update(waits=True)
    assert not stall.stalled
    now[0] = 60.0
    assert stall.stalled
    stall.update(waits=False)
    assert not stall.stalled
    stall.update(waits=True)
    assert not stall.stalled
