"""kill -9 of the service while replicas of several policies follow: no view claims more than replicas hold."""

import random
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest
from tests.support.fleet import WAIT, Recorder, Trainer, admin_of, follow, wait_for_lag, wait_until_in_sync
from tests.support.process import ServiceProcess

from deltasync.client import Position, Subscriber, TableSpec
from deltasync.core.policy import Policy
from deltasync.core.value_types import ValueType
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions

TABLES = [TableSpec("user", 1500, 8), TableSpec("item", 800, 16, np.dtype("<f2"))]
POLICIES = {
    "half": Policy(top_k=0.5, value_type=ValueType.INT8),
    "each": Policy(top_k=300, top_k_per_table=True),
    "small": Policy(max_bytes=20_000, value_type=ValueType.BF16),
    "all": Policy(),
}
FLEETS = {"half": ["a", "b"], "each": ["a"], "small": ["a"], "all": ["a"]}


class Training(threading.Thread):
    """Changes and publishes rows, until told to stop.

    Attributes:
        head: the last position that was acknowledged.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(name="training")
        self._trainer = trainer
        self._stopping = threading.Event()
        self._moved = threading.Condition()
        self.head = trainer.publish_all()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                head = self._trainer.change(60)
                with self._moved:
                    self.head = head
                    self._moved.notify_all()
        except BaseException as error:  # noqa: BLE001  # handed over to the test's thread
            self.failure = error

    def wait_for(self, version: int) -> None:
        with self._moved:
            assert self._moved.wait_for(lambda: self.head.number >= version, WAIT), self.failure

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._stopping.set()
        self.join(WAIT)


class Fleet:
    """The replicas of one consumer."""

    def __init__(self, service: ServiceProcess, consumer: str, names: list[str], stack: ExitStack) -> None:
        self.consumer, self._service = consumer, service
        self.targets = {name: Recorder() for name in names}
        self.replicas: dict[str, Subscriber] = {
            name: stack.enter_context(follow(service, consumer, name, target))
            for name, target in self.targets.items()
        }

    def offsets_are_what_was_applied(self) -> None:
        """The offset is read first: what a replica holds only grows."""
        lag = self.lag()
        for line in lag["replicas"]:
            held = self.replicas[line["replica"]].held
            assert held.history in ("", lag["history"]) or not line["offset"]
            assert line["offset"] <= held.number

    def nothing_was_damaged(self) -> None:
        assert not any(line["damaged"] for line in self.lag()["replicas"])
        for target in self.targets.values():
            assert not any(release.whole for release in target.releases)
            assert [release.resync for release in target.releases].count(True) == 1

    def those_at_the_same_release_held_the_same(self) -> None:
        first, *others = self.targets.values()
        for other in others:
            common = first.held.keys() & other.held.keys()
            assert common
            assert all(first.held[position] == other.held[position] for position in common)

    def lag(self) -> dict[str, Any]:
        lag: dict[str, Any] = self._service.get_json(f"/consumers/{self.consumer}")
        return lag


# A checkpoint, and the log cut, at every occasion.
OFTEN = ("--checkpoint-bytes", "1")


def kill_and_follow(folder: Path, kills: int, seed: int, *options: str) -> None:
    moments = random.Random(seed)
    with ServiceProcess(folder / "data", *options) as service, ExitStack() as stack:
        for name, policy in POLICIES.items():
            admin_of(service).create_consumer(name, "clicks", policy)
        fleets = [Fleet(service, name, names, stack) for name, names in FLEETS.items()]
        trainer = stack.enter_context(Trainer(service.grpc, TABLES))
        with Training(trainer) as training:
            for _ in range(kills):
                training.wait_for(training.head.number + 2)
                # Not to wait for something: the kill is to come at any moment of a release.
                time.sleep(moments.uniform(0, 0.3))
                service.kill()
                service.start()
                for fleet in fleets:
                    fleet.offsets_are_what_was_applied()
            training.wait_for(training.head.number + 2)
        assert training.failure is None
        for fleet in fleets:
            everybody_holds(service, fleet, trainer, training.head)
            fleet.nothing_was_damaged()
            fleet.those_at_the_same_release_held_the_same()
        _, metrics = service.get("/metrics")
        damages = [line for line in metrics.splitlines() if line.startswith("deltasync_consumer_damages_total{")]
        assert len(damages) == len(POLICIES)
        assert all(line.endswith(" 0.0") for line in damages)
        assert service.terminate() == 0


def everybody_holds(service: ServiceProcess, fleet: Fleet, trainer: Trainer, head: Position) -> None:
    wait_for_lag(service, fleet.consumer, lambda lag: len(lag["replicas"]) == len(fleet.targets))
    wait_until_in_sync(service, fleet.consumer, head)
    expected = trainer.expected(POLICIES[fleet.consumer].value_type)
    late = Recorder()
    with follow(service, fleet.consumer, "late", late) as replica:
        replica.wait_for(1, WAIT)
    assert late.bytes() == expected
    for target in fleet.targets.values():
        assert target.bytes() == expected


def the_log_was_cut(folder: Path) -> None:
    log = LmdbStore(LogOptions(directory=folder / "data" / "log"))
    for name in POLICIES:
        assert not list(log.read(f"releases/{name}", 1, 1))
    log.close()


@pytest.mark.parametrize(
    ("options", "kills"),
    [((), 3), pytest.param(("--table-memory", "{}/scratch"), 2, marks=pytest.mark.nightly)],
    ids=["memory", "files"],
)
def test_nothing_is_lost_by_kills_in_the_middle_of_releases(
    tmp_path: Path, options: tuple[str, ...], kills: int
) -> None:
    kill_and_follow(tmp_path, kills, 1, *OFTEN, *(each.format(tmp_path) for each in options))
    the_log_was_cut(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(("seed", "options"), [(2, OFTEN), (3, ("--checkpoint-bytes", "1000000"))])
def test_nothing_is_lost_by_many_kills(tmp_path: Path, seed: int, options: tuple[str, ...]) -> None:
    """With a checkpoint at every occasion, or hardly ever."""
    kill_and_follow(tmp_path, 15, seed, *options)
