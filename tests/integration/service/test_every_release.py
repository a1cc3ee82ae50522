"""Every release equals the model at the version and step that it names, through all that happens to a service."""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest
from tests.support.every_version import Compared, ComparedIds, EveryVersion, Rows, Seen, Step
from tests.support.fleet import admin_of, follow, lost, wait_for_lag
from tests.support.process import ServiceProcess
from tests.support.waiting import wait_for

from deltasync.client import (
    DeltasyncError,
    Mode,
    Part,
    Policy,
    Position,
    Publisher,
    PublisherOptions,
    RowBatch,
    ServiceUnavailable,
    Shard,
    TableKind,
    TableSpec,
    ValueType,
)
from deltasync.core.table_form import value_type_of

WAIT = 20.0
USER = TableSpec("user", 17_000, 128)
ITEM = TableSpec("item", 10_000, 16, np.dtype("<f2"))
ITEM_IDS = TableSpec("item/ids", ITEM.rows, 1, np.dtype("<i8"), TableKind.ID_MAP, of="item")
OVER = TableSpec("over.weight", 4, 8, kind=TableKind.PARAMETER)
CHANGED = {"user": 60, "item": 60}
MORE_ROWS = 500
# Small against the tables: what is sent of them whole is sent while they go on changing.
SETTINGS = ("--release-memory-bytes", "1048576", "--checkpoint-bytes", "1000000")

OUTSTANDING_BYTES = 2 << 20
MOST_FLEETS = 9
# Where releases are rare, a change of policy comes many versions after the last one, and the next one is not made
# yet when replicas are back that have to connect again for other tables.
RARELY = 0.4
# These leave no rows for later. The first ones have embedding tables alone.
COMPLETE = {
    "fp16": Policy(tables=("user",), value_type=ValueType.FP16, min_interval_seconds=RARELY),
    "int8": Policy(tables=("user",), value_type=ValueType.INT8, min_interval_seconds=RARELY),
    "bf16": Policy(value_type=ValueType.BF16, min_interval_seconds=RARELY),
    "all": Policy(),
}
RANKED = {
    "each": Policy(top_k=100, top_k_per_table=True, max_age_seconds=RARELY, min_interval_seconds=RARELY),
    "share": Policy(top_k=0.8, value_type=ValueType.INT8, min_interval_seconds=RARELY),
    "bytes": Policy(max_bytes=50_000, value_type=ValueType.FP16),
    "items": Policy(tables=("item",), top_k=40, max_age_seconds=1.0),
}
KINDS = {**COMPLETE, **RANKED, "ids": Policy(mode=Mode.IDS)}
# Two of them are given other policies.
FROM_THE_START = {
    "everything": Policy(),
    "share": Policy(top_k=0.5, value_type=ValueType.INT8),
    "bytes": RANKED["bytes"],
    "ids": KINDS["ids"],
    "complete": COMPLETE["fp16"],
    "ranked": RANKED["each"],
}


class Training(threading.Thread):
    """Changes rows of all tables and publishes them, until told to stop.

    Attributes:
        versions: every step, from before it is published.
        acknowledged: the position of each step that was sealed, in order.
    """

    def __init__(self, address: str, seed: int) -> None:
        super().__init__(name="training")
        self.versions = EveryVersion()
        self.acknowledged: list[Position] = []
        self._address = address
        self._random = np.random.default_rng(seed)
        self._tables = {each.name: each for each in (USER, ITEM, ITEM_IDS, OVER)}
        self._raw_id = 0
        self._moved = threading.Condition()
        self._stopping = threading.Event()
        self._wishes: list[Callable[[], None]] = []
        self._runs = 0
        self._publisher: Publisher | None = None
        self._failure: BaseException | None = None

    @property
    def head(self) -> Position:
        return self.acknowledged[-1]

    @property
    def tables(self) -> list[TableSpec]:
        return list(self.versions.steps[-1].tables.values())

    def run(self) -> None:
        try:
            self._begin_run()
            while not self._stopping.is_set():
                if self._wishes:
                    self._wishes.pop(0)()
                else:
                    self._change_some()
            self._end_run()
        except BaseException as error:  # noqa: BLE001  # handed over to the test's thread
            self._failure = error
            with self._moved:
                self._moved.notify_all()

    def wait_for_cuts(self, count: int) -> None:
        """Wait until so many more were sealed."""
        with self._moved:
            wanted = len(self.acknowledged) + count
            assert self._moved.wait_for(lambda: self._failure or len(self.acknowledged) >= wanted, WAIT)
        self.check()

    def publish_all(self) -> None:
        """Have one of the next cuts hold all rows, and wait for it."""
        self._wish(self._change_all)

    def begin_run(self) -> None:
        """Have a new run take over, whose tables have more rows, and wait for its first cut."""
        self._wish(self._begin_run)

    def check(self) -> None:
        assert self._failure is None, self._failure

    def stop(self) -> None:
        self._stopping.set()
        self.join(WAIT)
        assert not self.is_alive()
        self.check()

    def _wish(self, wish: Callable[[], None]) -> None:
        done = threading.Event()

        def granted() -> None:
            wish()
            done.set()

        self._wishes.append(granted)
        assert done.wait(WAIT), self._failure

    def _begin_run(self) -> None:
        if self._runs:
            self._end_run()
            user = self._tables["user"]
            self._tables["user"] = TableSpec("user", user.rows + MORE_ROWS, user.dim)
        self._runs += 1
        tables = list(self._tables.values())
        options = PublisherOptions(
            service=self._address, model="clicks", run=f"r{self._runs}", run_started_unix_ns=self._runs
        )
        self._publisher = Publisher(options, tables, [Shard.whole(each) for each in tables])
        self._change_all()

    def _end_run(self) -> None:
        assert self._publisher
        self._publisher.close()

    def _change_all(self) -> None:
        changed = {name: self._changed(name, np.arange(spec.rows)) for name, spec in self._tables.items()}
        self._publish(changed, full=True)

    def _change_some(self) -> None:
        """Of each table some rows, of which a part changes often; of the users some are deleted."""
        changed = {"over.weight": self._changed("over.weight", np.arange(OVER.rows))}
        for name, count in CHANGED.items():
            drawn = self._random.random(count) ** 3 * self._tables[name].rows
            changed[name] = self._changed(name, np.unique(drawn.astype(np.int64)))
        deleted = self._random.random(len(changed["user"].ids)) < 0.05
        changed["user"].values[deleted] = 0
        changed["user"].deleted[deleted] = True
        changed["item/ids"] = self._changed("item/ids", changed["item"].ids[:3])
        self._publish(changed)

    def _changed(self, name: str, ids: Any) -> Rows:
        """New values of rows; of maps, new raw ids."""
        spec = self._tables[name]
        if spec.kind is TableKind.ID_MAP:
            values = np.arange(self._raw_id + 1, self._raw_id + 1 + len(ids)).reshape(-1, 1)
            self._raw_id += len(ids)
        else:
            values = self._random.standard_normal((len(ids), spec.dim), np.float32).astype(spec.dtype)
        return Rows(ids, values, np.zeros(len(ids), np.bool_))

    def _publish(self, changed: Mapping[str, Rows], *, full: bool = False) -> None:
        number, batches = len(self.versions.steps) + 1, list[RowBatch]()
        for name, rows in changed.items():
            shard, live = Shard.whole(self._tables[name]), ~rows.deleted
            batches.append(RowBatch(shard, rows.ids[live], rows.values[live]))
            if rows.deleted.any():
                batches.append(RowBatch.deletes(shard, rows.ids[rows.deleted]))
        self.versions.steps.append(Step(number, dict(self._tables), changed))
        part = Part(step=number, step_end_unix_ns=time.time_ns(), rows=batches, full=full)
        assert self._publisher
        position = self._publisher.publish(part).result(WAIT)
        wrong = self.versions.contradicts(position.number, number)
        assert not wrong, wrong
        with self._moved:
            self.acknowledged.append(position)
            self._moved.notify_all()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._stopping.set()
        self.join(WAIT)


class Follower:
    """A replica that may go away and come back."""

    def __init__(self, service: ServiceProcess, consumer: str, name: str, target: Compared | ComparedIds) -> None:
        self.target = target
        self._service, self._consumer, self._name = service, consumer, name
        self.come(Position())

    def come(self, held: Position) -> None:
        self.replica = follow(
            self._service,
            self._consumer,
            self._name,
            self.target,
            held=held,
            max_outstanding_bytes=OUTSTANDING_BYTES,
        )

    def leave(self, *, says_goodbye: bool) -> None:
        if says_goodbye:
            self.replica.close()
        else:
            with lost(self.replica):
                pass

    def wait_for(self, version: int) -> None:
        try:
            self.replica.wait_for(version, WAIT)
        except TimeoutError as error:
            raise AssertionError(self._service.get_json(f"/consumers/{self._consumer}")) from error
        self.check()

    def check(self) -> None:
        self.replica.check()
        assert not self.target.wrong, "\n".join(self.target.wrong)


class Fleet:
    """A consumer and its replicas."""

    def __init__(self, service: ServiceProcess, name: str, policy: Policy, training: Training) -> None:
        self.name, self.policy = name, policy
        self._service, self._training = service, training
        self._complete = policy.top_k is None and policy.max_bytes is None
        self._seen = Seen()
        admin_of(service).create_consumer(name, "clicks", policy)
        self.followers = [self._follower("a", first=True)]

    def join(self, name: str) -> None:
        """Have one more replica."""
        self.followers.append(self._follower(name, first=False))

    def change(self, policy: Policy) -> None:
        """Give it another policy, and wait until its replicas hold tables as that wants them, and then a later
        version.
        """
        admin_of(self._service).update_consumer(self.name, policy)
        self.policy = policy
        for each in self.followers:
            assert isinstance(each.target, Compared)
            wait_for(partial(self._as_wanted, each.target), f"{policy} is not in force", WAIT)
        self.go_on()

    def go_on(self) -> None:
        """Wait until all replicas hold a version that is sealed from now on."""
        head = self._training.head
        for each in self.followers:
            each.wait_for(head.number + 1)

    def _as_wanted(self, target: Compared) -> bool:
        followed = [each for each in self._training.tables if self.policy.follows(each)]
        held = {each.name: value_type_of(each) for each in target.specs.values() if each.kind.ranked}
        return held == {each.name: self.policy.form_of(each).value_type for each in followed if each.kind.ranked}

    def everything_is_held(self) -> None:
        """Wait until nothing is left for later, and compare all rows."""
        done = "delivered" if self.policy.mode is Mode.IDS else "in sync"
        wait_for_lag(
            self._service,
            self.name,
            lambda lag: lag["state"] == done and lag["lag"]["versions"] == lag["lag"]["rows"] == 0,
        )
        for each in self.followers:
            each.wait_for(self._training.head.number)
            if isinstance(each.target, Compared):
                assert not list(each.target.whole_is_wrong())

    def close(self) -> None:
        for each in self.followers:
            each.replica.close()

    def _follower(self, name: str, *, first: bool) -> Follower:
        if self.policy.mode is Mode.IDS:
            return Follower(self._service, self.name, name, ComparedIds(self._training.versions))
        target = Compared(self._training.versions, self._seen, complete=self._complete, first=first)
        return Follower(self._service, self.name, name, target)


class World:
    """A service, a trainer that never stops, and consumers of all kinds."""

    def __init__(self, service: ServiceProcess, training: Training, seed: int, stack: ExitStack) -> None:
        self._service, self._training, self._stack = service, training, stack
        self._random = random.Random(seed)
        self._checkpoints: list[threading.Thread] = []
        self._failures: list[DeltasyncError] = []
        self._made = 0
        self.fleets = {name: self._fleet(name, policy) for name, policy in FROM_THE_START.items()}

    def happen(self, events: Sequence[str]) -> None:
        """Let these happen, one by one, at random moments."""
        for each in events:
            self._training.wait_for_cuts(self._random.randint(1, 8))
            getattr(self, each)()
            for fleet in self.fleets.values():
                for follower in fleet.followers:
                    follower.check()

    def kill(self) -> None:
        """kill -9 of the service, and a start."""
        self._service.kill()
        self._service.start()
        self._one().go_on()

    def checkpoint(self) -> None:
        """A checkpoint, which may still be written when the next thing happens."""

        def make() -> None:
            try:
                admin_of(self._service).make_checkpoint("clicks")
            except ServiceUnavailable:  # It was killed meanwhile.
                pass
            except DeltasyncError as error:
                self._failures.append(error)

        self._checkpoints.append(threading.Thread(target=make, name="checkpoint", daemon=True))
        self._checkpoints[-1].start()

    def consumer(self) -> None:
        """Another consumer, while the trainer publishes."""
        self._made += 1
        name = self._random.choice(list(KINDS))
        fleet = self._fleet(f"{name}-{self._made}", KINDS[name])
        fleet.go_on()
        if len(self.fleets) < MOST_FLEETS:
            self.fleets[fleet.name] = fleet
        else:
            fleet.close()
            admin_of(self._service).delete_consumer(fleet.name)

    def other_type(self) -> None:
        """Another policy that leaves nothing for later."""
        self._change("complete", list(COMPLETE.values()))

    def other_ranking(self) -> None:
        """Another policy that may leave rows for later, or not."""
        self._change("ranked", [*RANKED.values(), *COMPLETE.values()])

    def away(self) -> None:
        """A replica goes away, and comes back after some cuts."""
        fleet = self._one()
        follower = self._random.choice(fleet.followers)
        follower.leave(says_goodbye=self._random.random() < 0.5)
        self._training.wait_for_cuts(self._random.randint(1, 20))
        follower.come(follower.replica.held)
        fleet.go_on()

    def late(self) -> None:
        """A replica of a consumer that others follow already, for a moment."""
        fleet = self._one()
        fleet.join("late")
        fleet.go_on()
        fleet.followers.pop().leave(says_goodbye=True)

    def full_cut(self) -> None:
        """All rows change."""
        self._training.publish_all()
        self._one().go_on()

    def new_run(self) -> None:
        """Another run takes over, with more rows."""
        self._training.begin_run()
        self._one().go_on()

    def end(self) -> None:
        """Stop the trainer, and compare what everybody holds then, and what the service has after a kill."""
        for each in self.fleets.values():
            each.go_on()
        self._training.stop()
        for thread in self._checkpoints:
            thread.join(WAIT)
        assert not self._failures
        for fleet in self.fleets.values():
            fleet.everything_is_held()
        self._service.kill()
        self._service.start()
        for fleet in self.fleets.values():
            fleet.join("last")
        for fleet in self.fleets.values():
            fleet.everything_is_held()

    def _change(self, name: str, policies: Sequence[Policy]) -> None:
        fleet = self.fleets[name]
        fleet.change(policies[(policies.index(fleet.policy) + 1) % len(policies)])

    def _one(self) -> Fleet:
        return self._random.choice(list(self.fleets.values()))

    def _fleet(self, name: str, policy: Policy) -> Fleet:
        fleet = Fleet(self._service, name, policy, self._training)
        self._stack.callback(fleet.close)
        return fleet


def compare_all(folder: Path, events: Sequence[str], seed: int) -> None:
    with ServiceProcess(folder / "data", *SETTINGS) as service, ExitStack() as stack:
        training = stack.enter_context(Training(service.grpc, seed))
        training.wait_for_cuts(3)
        world = World(service, training, seed, stack)
        for fleet in world.fleets.values():
            fleet.go_on()
        world.happen(events)
        world.end()
        assert service.terminate() == 0


QUICK = ["consumer", "other_type", "other_ranking", "checkpoint", "kill", "away", "new_run"]
ALL = [*QUICK, "late", "full_cut", "consumer", "other_type", "other_type", "other_ranking", "checkpoint", "kill"]


def test_every_release_equals_the_version_it_names(tmp_path: Path) -> None:
    compare_all(tmp_path, QUICK, seed=1)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [2, 3])
def test_every_release_equals_the_version_it_names_through_many_events(tmp_path: Path, seed: int) -> None:
    events = [each for each in ALL for _ in range(3)]
    random.Random(seed).shuffle(events)
    compare_all(tmp_path, events, seed)
