"""A service that went back: replicas do not keep rows of what was discarded, whoever they are."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.fleet import TABLES, WAIT, Recorder, Trainer, admin_of, follow, wait_for_lag
from tests.support.local_service import back_up
from tests.support.metrics import samples_of
from tests.support.process import ServiceProcess
from tests.support.server import RunningService
from tests.support.state import lag_of
from tests.support.wire import ReplicaStream, ack

from deltasync.client import CallbackTarget, Policy, Position, Release, Subscriber
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions
from deltasync.service.restore import restore

TOP = Policy(top_k=40, min_interval_seconds=0.01)
CONSUMERS = {"plain": "plain", "store": "plain", "ranked": "ranked"}  # Of each replica.
GoBack = Callable[[Path, Path], None]


class Store:
    """What a callback makes of releases: nothing shows what it holds."""

    def __init__(self) -> None:
        self.tables: dict[str, Any] = {}
        self.resyncs = 0

    def apply(self, release: Release) -> None:
        self.resyncs += release.resync
        for table in release.tables:
            if release.resets(table) or table.name not in self.tables:
                self.tables[table.name] = np.zeros((table.rows, table.dim), table.dtype)
        for rows in release.rows:
            self.tables[rows.table.name][rows.ids] = rows.values


class Fleet:
    """Three replicas, whose rows outlive their subscribers."""

    def __init__(self) -> None:
        self.store = Store()
        self.targets: dict[str, Any] = {
            "plain": Recorder(),
            "store": CallbackTarget(self.store.apply),
            "ranked": Recorder(),
        }
        self.held = dict.fromkeys(self.targets, Position())

    def start(self, service: ServiceProcess) -> dict[str, Subscriber]:
        return {
            name: follow(service, CONSUMERS[name], name, target, held=self.held[name])
            for name, target in self.targets.items()
        }

    def stop(self, followers: dict[str, Subscriber]) -> None:
        """Stop all; of targets that know what they hold, that is what they go on from."""
        for name, each in followers.items():
            each.close()
            target = self.targets[name]
            self.held[name] = target.position if isinstance(target, Recorder) else each.held
            assert self.held[name].seal == each.held.seal != 0

    def tables(self, name: str) -> dict[str, bytes]:
        tables = self.store.tables if name == "store" else self.targets[name].tables
        return {table: rows.tobytes() for table, rows in tables.items()}


def by_hand(copy: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(copy / "data", folder)


def by_restore(copy: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    restore(copy / "backup", folder)


def _publish(trainer: Trainer, count: int) -> Position:
    for _ in range(count):
        head = trainer.change(7)
    return head


def _past(service: ServiceProcess, fleet: Fleet, copy: Path) -> None:
    """Ten versions, of which there is a copy, and ten more; the fleet holds both."""
    with service:
        admin_of(service).create_consumer("ranked", "clicks", TOP)
        followers = fleet.start(service)
        with Trainer(service.grpc) as trainer:
            trainer.publish_all()
            _wait(service, followers, _publish(trainer, 9))
            fleet.stop(followers)
            assert service.terminate() == 0
            shutil.copytree(service.data_dir, copy / "data")
            back_up(service.data_dir, copy / "backup")
            service.start()
            followers = fleet.start(service)
            _wait(service, followers, _publish(trainer, 10))
        fleet.stop(followers)
        assert service.terminate() == 0


def _wait(
    service: ServiceProcess, followers: dict[str, Subscriber], head: Position, newcomers: Sequence[str] = ()
) -> None:
    """Until all hold a version: the fleet, and of each of these consumers a newcomer."""
    for each in followers.values():
        each.wait_for(head.number, WAIT)
    wanted = Counter([*(CONSUMERS[name] for name in followers), *newcomers])
    for consumer, number in wanted.items():
        wait_for_lag(service, consumer, partial(_have_everything, head=head, number=number))


def _have_everything(lag: dict[str, Any], head: Position, number: int) -> bool:
    """So many are there, and hold nothing else; from before it went back they may hold a later version."""
    there = [each for each in lag["replicas"] if each["connected"]]
    lacks = [each["rewound"] or each["lag"]["rows"] or each["lag"]["versions"] for each in there]
    return lag["head"] >= head.number and len(there) == number and not any(lacks)


@pytest.mark.parametrize(
    ("go_back", "published"),
    [
        pytest.param(by_hand, 10, id="by hand, as old"),
        *(
            pytest.param(by_hand, published, id=f"by hand, {age}", marks=pytest.mark.nightly)
            for published, age in ((0, "older"), (20, "newer"))
        ),
        *(
            pytest.param(by_restore, published, id=f"by restore, {age}", marks=pytest.mark.nightly)
            for published, age in ((0, "older"), (10, "as old"), (20, "newer"))
        ),
    ],
)
def test_nobody_keeps_what_was_discarded(tmp_path: Path, go_back: GoBack, published: int) -> None:
    """Those who come back find a head that is older than what they hold, as old, and newer."""
    fleet, folder = Fleet(), tmp_path / "service"
    service = ServiceProcess(folder, "--consumer", "plain=clicks")
    _past(service, fleet, tmp_path)
    discarded = {name: fleet.tables(name) for name in fleet.targets}
    go_back(tmp_path, folder)
    with service:
        head = Position(number=10)
        if published:
            with Trainer(service.grpc, run="later", started=2, seed=5) as trainer:
                trainer.publish_all()
                head = _publish(trainer, published - 1)
        before = {name: fleet.held[name] for name in fleet.targets}
        resyncs = fleet.store.resyncs
        followers = fleet.start(service)
        newcomers = {consumer: Recorder() for consumer in ("plain", "ranked")}
        others = {each: follow(service, each, "new", target) for each, target in newcomers.items()}
        assert head.number == 10 + published
        _wait(service, followers, head, list(others))
        for name in fleet.targets:
            assert fleet.tables(name) == newcomers[CONSUMERS[name]].bytes()
            assert fleet.tables(name) != discarded[name]
            assert followers[name].held.history == before[name].history or go_back is by_restore
        if published:
            assert fleet.tables("plain") == trainer.expected()
        assert fleet.store.resyncs == resyncs + 1
        samples = samples_of(service)
        assert samples["deltasync_events_total", (("event", "replica_rewound"),)] == 3
        assert samples["deltasync_consumer_rewinds_total", (("consumer", "plain"),)] == 2
        for each in (*followers.values(), *others.values()):
            each.close()


@pytest.mark.nightly
@pytest.mark.parametrize("go_back", [by_hand, by_restore])
def test_who_holds_what_was_not_discarded_goes_on(tmp_path: Path, go_back: GoBack) -> None:
    """Whatever the history is called now, and with rows in proportion to what was published since."""
    fleet, folder = Fleet(), tmp_path / "service"
    service = ServiceProcess(folder, "--consumer", "plain=clicks")
    with service:
        admin_of(service).create_consumer("ranked", "clicks", TOP)
        followers = fleet.start(service)
        with Trainer(service.grpc) as trainer:
            trainer.publish_all()
            _wait(service, followers, _publish(trainer, 3))
            fleet.stop(followers)
            followers = {name: follow(service, name, "other", Recorder()) for name in ("plain", "ranked")}
            _wait(service, followers, _publish(trainer, 3))
            for each in followers.values():
                each.close()
        assert service.terminate() == 0
    shutil.copytree(folder, tmp_path / "data")
    back_up(folder, tmp_path / "backup")
    go_back(tmp_path, folder)
    received = {name: fleet.targets[name].received_rows for name in ("plain", "ranked")}
    resyncs = fleet.store.resyncs
    with service:
        followers = fleet.start(service)
        _wait(service, followers, Position(number=7))
        for name, rows in received.items():
            assert 0 < fleet.targets[name].received_rows - rows <= 3 * 7 * len(TABLES)
            assert fleet.tables(name) == trainer.expected()
        assert fleet.tables("store") == trainer.expected()
        assert fleet.store.resyncs == resyncs
        assert samples_of(service)["deltasync_events_total", (("event", "replica_rewound"),)] == 0
        for each in followers.values():
            each.close()


def test_lag_names_what_a_rewound_replica_held_until_its_next_version(running: RunningService) -> None:
    with Trainer(running.grpc) as trainer:
        trainer.publish_all()
        head = trainer.change(5)
    discarded = Position(head.history, 9, 77)
    with ReplicaStream(running.grpc, held=discarded) as replica:
        opened = replica.until("opened")
        assert opened.resync
        assert "but the newest is 2" in opened.reason
        lag = wait_for_lag(running, "predictors", lambda lag: lag["replicas"][0]["connected"])
        (line,) = lag["replicas"]
        assert lag["state"] == "behind"
        assert "rows of a discarded history are being replaced in p0 (had 9)" in lag["reason"]
        assert (line["offset"], line["rewound"]["held"], line["rewound"]["history"]) == (0, 9, head.history)
        assert line["rewound"]["seconds"] >= 0
        rows, end = replica.release()
        assert end.rows == sum(table.rows for table in TABLES)
        replica.send(ack(sum(len(each.ids) + len(each.values) for each in rows), head))
        wait_for_lag(running, "predictors", lambda lag: lag["replicas"][0]["rewound"] is None)
    other = Position(head.history, 1, 78)  # Of another past, at a version that there is.
    with ReplicaStream(running.grpc, held=other) as replica:
        assert "which is not in the service's history" in replica.until("opened").reason
    with ReplicaStream(running.grpc) as replica:  # A new process, which holds nothing.
        assert replica.until("opened").reason == "the replica holds nothing"
        assert lag_of(running)["replicas"][0]["rewound"] is None


def test_an_offset_has_the_seal_that_the_service_knows(running: RunningService, tmp_path: Path) -> None:
    """Whatever a replica says: it is what shows later that it is of this past."""
    with Trainer(running.grpc) as trainer:
        head = trainer.publish_all()
    with ReplicaStream(running.grpc) as replica:
        replica.until("opened")
        replica.release()
        replica.send(ack(0, Position(head.history, head.number, 12345)))
        wait_for_lag(running, "predictors", lambda lag: lag["offset"] == head.number)
    running.stop()
    with closing(LmdbStore(LogOptions(directory=tmp_path / "data" / "log"))) as log:
        (record,) = log.items("offset/predictors/").values()
    assert json.loads(record)["seal"] == head.seal != 0


@pytest.mark.parametrize("consumer", ["predictors", "ranked"])
def test_who_follows_a_service_that_begins_anew_is_rewound(tmp_path: Path, consumer: str) -> None:
    """Whatever its history is: the versions that it holds of the model are no more."""
    target = Recorder()
    with RunningService(tmp_path / "old", policies={"ranked": TOP}) as service:
        with Trainer(service.grpc) as trainer:
            trainer.publish_all()
            follower = follow(service, consumer, "r", target)
            follower.wait_for(trainer.change(5), WAIT)
        port = int(service.grpc.rpartition(":")[2])
    with RunningService(tmp_path / "new", policies={"ranked": TOP}, grpc_port=port) as service:
        with Trainer(service.grpc, run="later", started=2, seed=9) as trainer:
            later = trainer.publish_all()
        follower.wait_for(later, WAIT)
        assert target.bytes() == trainer.expected()
        assert samples_of(service)["deltasync_consumer_rewinds_total", (("consumer", consumer),)] == 1
        follower.close()


def test_who_is_given_everything_for_another_reason_is_not_rewound(running: RunningService) -> None:
    """Its consumer was made anew, with a policy: what it holds is of the model's past."""
    admin, target = admin_of(running), Recorder()
    admin.create_consumer("top", "clicks", TOP)
    with Trainer(running.grpc) as trainer:
        trainer.publish_all()
        with follow(running, "top", "r", target) as follower:
            follower.wait_for(trainer.change(5), WAIT)
        admin.delete_consumer("top")
        admin.create_consumer("top", "clicks", TOP)
        head = trainer.change(5)
    with follow(running, "top", "r", target, held=follower.held) as follower:
        follower.wait_for(head, WAIT)
    assert sum(release.resync for release in target.releases) == 2
    assert target.bytes() == trainer.expected()
    assert samples_of(running)["deltasync_events_total", (("event", "replica_rewound"),)] == 0
