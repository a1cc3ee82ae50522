"""A part that one of two ranks is refused, by a service that is a stand-in: the other is not left waiting."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from deltasync.client import Part, Position
from deltasync.core.errors import DeltasyncError, InvalidInput, ResyncRequired
from deltasync.trainer import sync as trainer_sync
from deltasync.trainer.distributed import agreement
from deltasync.trainer.sync import DeltaSync, SyncOptions

RANKS = 2
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


class ThreadAgreement(agreement.Agreement):
    """An agreement of threads instead of processes."""

    of_thread = threading.local()

    def __init__(self) -> None:
        self.rank, self.world_size = self.of_thread.rank, RANKS
        self._together: Together = self.of_thread.together
        self._group = None

    def reach(self, **values: Any) -> agreement.Consensus:
        every = self._together.every(self.rank, values)
        names = [name for name in values if name not in ("ready", "deletes")]
        return agreement.Consensus(
            ready=all(each["ready"] for each in every),
            deletes=min(each["deletes"] for each in every),
            **{name: any(each[name] for each in every) for name in names},
        )

    def differing(self, _digests: Any) -> list[str]:
        return []

    def new_run(self) -> tuple[str, int]:
        return self._together.every(self.rank, ("run", 1))[0]


class Service:
    """Seals a cut once it has all parts; refuses rank 1 the second, once."""

    def __init__(self, error: DeltasyncError) -> None:
        self._lock = threading.Lock()
        self._error: DeltasyncError | None = error
        self._parts: dict[int, Future[Position]] = {}
        self.sealed: list[tuple[bool, ...]] = []
        self._full: dict[int, bool] = {}

    def take(self, rank: int, part: Part, done: "Future[Position]") -> None:
        with self._lock:
            if self.sealed and rank == 1 and self._error:
                done.set_exception(self._error)
                self._error = None
                return
            self._parts[rank], self._full[rank] = done, part.full
            if len(self._parts) == RANKS:
                self.sealed.append(tuple(self._full[each] for each in range(RANKS)))
                for each in self._parts.values():
                    each.set_result(Position("a" * 32, len(self.sealed)))
                self._parts = {}

    def forget(self, rank: int) -> None:
        with self._lock:
            self._parts.pop(rank, None)


def play(service: Service, monkeypatch: pytest.MonkeyPatch, story: Callable[[DeltaSync, nn.Linear], None]) -> None:
    """Let two ranks do the same."""
    together = Together()

    class RankPublisher:
        deletes = wanted = ()

        def __init__(self, options: Any, *_: Any) -> None:
            self._rank = options.rank

        def publish(self, part: Part) -> "Future[Position]":
            done: Future[Position] = Future()
            service.take(self._rank, part, done)
            return done

        def close(self) -> None:
            service.forget(self._rank)

    monkeypatch.setattr(trainer_sync, "Publisher", RankPublisher)
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


def test_of_a_part_that_is_refused_for_good_the_others_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []

    def story(sync: DeltaSync, _: nn.Linear) -> None:
        with pytest.raises(DeltasyncError) as error:
            sync.flush(20)
        heard.append(str(error.value))

    play(Service(InvalidInput("a row of NaN")), monkeypatch, story)
    assert sorted(heard) == ["a row of NaN", "another rank cannot publish: its log says why"]


def test_where_one_must_publish_every_row_all_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(ResyncRequired("publish every row first"))

    def story(sync: DeltaSync, _: nn.Linear) -> None:
        assert sync.flush(20).number == 2

    play(service, monkeypatch, story)
    assert service.sealed == [(True, True), (True, True)]
