"""Several services on one log: whatever dies, moves or forgets, nothing is lost, and replicas are equal then."""

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.cluster import MODEL, TABLE, Cluster, Trainer, same
from tests.support.fleet import Recorder
from tests.support.process import ADMIN_TOKEN, ServiceProcess
from tests.support.waiting import wait_for

from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint
from deltasync.client.subscriber import Subscriber
from deltasync.core.policy import Policy

TIMEOUT = 60


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, services=3, brokers=1) as cluster:
        yield cluster


@pytest.fixture
def calm(tmp_path: Path) -> Iterator[Cluster]:
    """Nobody takes a model over that is not given away."""
    with Cluster(tmp_path, services=3, brokers=1, lease_seconds=15) as cluster:
        yield cluster


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, services=3, brokers=3) as cluster:
        yield cluster


Replicas = list[tuple[Subscriber, Recorder]]


def follow(cluster: Cluster) -> tuple[Trainer, Replicas]:
    trainer = cluster.trainer()
    trainer.publish()
    replicas = [cluster.replica(name) for name in ("a", "b")]
    check(trainer, replicas)
    return trainer, replicas


def check(trainer: Trainer, replicas: Replicas) -> None:
    for subscriber, target in replicas:
        subscriber.wait_for(trainer.head, TIMEOUT)
        assert same(target, trainer.rows)


def publish(trainer: Trainer, times: int = 5) -> None:
    for _ in range(times):
        trainer.publish()


def in_sync(service: ServiceProcess) -> dict[str, Any]:
    """The lag, from where this process redirects to, as `curl -L` does; empty before the last ack is there."""
    lag: dict[str, Any] = service.get_json("/consumers/predictors")
    return lag if lag["state"] == "in sync" else {}


def wait_until_ready(service: ServiceProcess, status: int = 200) -> None:
    deadline = time.monotonic() + TIMEOUT
    while service.get("/readyz")[0] != status:
        assert time.monotonic() < deadline, service.get("/readyz")
        time.sleep(0.05)


def test_a_model_is_published_and_served_through_any_process(calm: Cluster) -> None:
    trainer, replicas = follow(calm)
    publish(trainer)
    check(trainer, replicas)


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_when_the_owner_is_killed_another_goes_on(cluster: Cluster, times: int) -> None:
    trainer, replicas = follow(cluster)
    for _ in range(times):
        publish(trainer, 3)
        owner = cluster.owner()
        owner.kill()
        publish(trainer, 3)
        check(trainer, replicas)
        assert cluster.owner() is not owner
        owner.start()


def test_a_takeover_sends_replicas_of_a_view_only_changed_rows(cluster: Cluster) -> None:
    trainer = cluster.trainer()
    trainer.publish()
    policy = Policy(top_k=TABLE.rows, min_interval_seconds=0.01)
    Admin(Endpoint(cluster.owner().http, ADMIN_TOKEN)).create_consumer("ranked", MODEL, policy)
    subscriber, target = cluster.replica("r", "ranked")
    for _ in range(2):
        publish(trainer, 3)
        subscriber.wait_for(trainer.head, TIMEOUT)
        owner, received = cluster.owner(), target.received_rows
        owner.kill()
        publish(trainer, 1)
        subscriber.wait_for(trainer.head, TIMEOUT)
        assert same(target, trainer.rows)
        assert target.received_rows - received < TABLE.rows // 2
        owner.start()
    assert [release.resync for release in target.releases].count(True) == 1


@pytest.mark.nightly
def test_two_that_are_killed_at_once_leave_one_that_goes_on(cluster: Cluster) -> None:
    trainer, replicas = follow(cluster)
    killed = [cluster.owner(), next(each for each in cluster.services if each is not cluster.owner())]
    for each in killed:
        each.kill()
    publish(trainer)
    check(trainer, replicas)


def test_an_owner_that_ends_hands_its_models_over(cluster: Cluster) -> None:
    trainer, replicas = follow(cluster)
    owner = cluster.owner()
    assert owner.terminate() == 0
    publish(trainer)
    check(trainer, replicas)
    assert cluster.owner() is not owner


@pytest.mark.nightly
def test_the_leading_broker_may_be_killed_while_it_is_published(three: Cluster) -> None:
    trainer, replicas = follow(three)
    publish(trainer, 3)
    leader = three.brokers.leader("deltasync_clicks")
    assert leader
    three.brokers.kill(leader)
    publish(trainer, 5)
    check(trainer, replicas)
    three.brokers.start(leader)
    three.brokers.wait()
    publish(trainer, 5)
    check(trainer, replicas)


@pytest.mark.nightly
def test_rows_that_a_restored_broker_lacks_come_from_elsewhere(cluster: Cluster) -> None:
    trainer, replicas = follow(cluster)
    (broker,) = cluster.brokers.brokers
    publish(trainer, 3)
    cluster.brokers.kill(broker)
    shutil.copytree(broker.folder / "store", cluster.folder / "copy")
    cluster.brokers.start(broker)
    cluster.brokers.wait()
    publish(trainer, 5)
    check(trainer, replicas)
    cluster.brokers.kill(broker)
    shutil.rmtree(broker.folder / "store")
    shutil.copytree(cluster.folder / "copy", broker.folder / "store")
    cluster.brokers.start(broker)
    cluster.brokers.wait()
    publish(trainer, 7)  # More than were forgotten: else versions of both pasts have the same numbers.
    check(trainer, replicas)


def test_any_process_sends_who_asks_to_the_owner(calm: Cluster) -> None:
    trainer, replicas = follow(calm)
    publish(trainer)
    check(trainer, replicas)
    owner = calm.owner()
    lags = [wait_for(partial(in_sync, each)) for each in calm.services]
    for each, lag in zip(calm.services, lags, strict=True):
        assert (lag["head"], lag["state"]) == (trainer.head.number, "in sync")
        versions = each.get_json("/versions?model=clicks&last=2")
        assert [line["version"] for line in versions] == [trainer.head.number, trainer.head.number - 1]
        owned = {process["process"]: process["models"] for process in each.get_json("/processes")}
        assert owned == {calm.name_of(other): ["clicks"] if other is owner else [] for other in calm.services}
        status = each.get_json("/status")
        assert [line["consumer"] for line in status["consumers"]] == (["predictors"] if each is owner else [])
    volumes = {each["volume"]: each["free_bytes"] for each in owner.get_json("/status")["processes"][0]["volumes"]}
    assert (volumes["log"], volumes["checkpoints"] > 0) == (None, True)


def test_a_model_of_a_killed_process_has_an_owner_or_is_named(cluster: Cluster) -> None:
    trainer, _ = follow(cluster)
    owner = cluster.owner()
    other = next(each for each in cluster.services if each is not owner)
    owner.kill()
    alive, deadline = {cluster.name_of(owner): True}, time.monotonic() + TIMEOUT
    while alive[cluster.name_of(owner)]:
        assert time.monotonic() < deadline
        lines = other.get_json("/processes")
        assert [model for line in lines for model in (*line["models"], *line["unowned"])] == ["clicks"]
        alive = {line["process"]: line["alive"] for line in lines}
    trainer.publish()


def test_a_model_is_moved_while_it_is_published(calm: Cluster) -> None:
    trainer, replicas = follow(calm)
    published, stop = list[int](), threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            published.append(trainer.publish().number)

    with ThreadPoolExecutor(1) as threads:
        training = threads.submit(go_on)
        try:
            for _ in range(2):
                owner = calm.owner()
                to = next(each for each in calm.services if each is not owner)
                Admin(Endpoint(owner.http, ADMIN_TOKEN)).move_model("clicks", calm.name_of(to))
                before = len(published)
                while len(published) < before + 3:
                    assert not training.done() or training.result()
                assert calm.owner() is to
        finally:
            stop.set()
        training.result(TIMEOUT)
    check(trainer, replicas)
    assert published == sorted(set(published))


def test_a_process_is_drained_through_any_other(calm: Cluster) -> None:
    trainer, replicas = follow(calm)
    owner = calm.owner()
    other = next(each for each in calm.services if each is not owner)
    assert Admin(Endpoint(other.http, ADMIN_TOKEN)).drain_process(calm.name_of(owner)) == ["clicks"]
    publish(trainer)
    check(trainer, replicas)
    assert calm.owner() is not owner
    (line,) = calm.owner().get_json("/models")
    assert (line["model"], line["checkpoint"]["reason"]) == ("clicks", "")
    draining = {each["process"]: each["draining"] for each in other.get_json("/processes")}
    assert draining[calm.name_of(owner)]


@pytest.mark.nightly
def test_an_owner_without_brokers_refuses_requests_until_they_return(tmp_path: Path) -> None:
    with Cluster(tmp_path, services=3, brokers=1, proxies=True) as cluster:
        trainer, replicas = follow(cluster)
        for _ in range(2):
            owner = cluster.owner()
            for proxy in cluster.proxies[cluster.name_of(owner)]:
                proxy.stall()
            publish(trainer)
            check(trainer, replicas)
            after = cluster.owner()
            assert after is not owner
            assert [owner.get(path)[0] for path in ("/readyz", "/tables", "/consumers/predictors")] == [503] * 3
            assert "have not confirmed this process's lease" in owner.get("/readyz")[1]
            assert [owner.get(path)[0] for path in ("/status", "/metrics")] == [200] * 2
            for proxy in cluster.proxies[cluster.name_of(owner)]:
                proxy.go_on()
            publish(trainer)
            check(trainer, replicas)
            wait_until_ready(owner)


@pytest.mark.nightly
@pytest.mark.parametrize("with_leader", [True, False])
def test_a_network_that_is_cut_in_two_and_heals_loses_nothing(tmp_path: Path, with_leader: bool) -> None:
    """The owner is on the smaller side, with the broker that leads its log, or with another."""
    with Cluster(tmp_path, services=3, brokers=3, proxies=True) as cluster:
        trainer, replicas = follow(cluster)
        owner, leader = cluster.owner(), cluster.brokers.leader("deltasync_clicks")
        broker = next(each for each in cluster.brokers.brokers if (each == leader) is with_leader)
        cluster.cut(owner, broker)
        publish(trainer, 3)  # The larger side goes on by itself.
        check(trainer, replicas)
        wait_until_ready(owner, 503)
        cluster.heal(owner, broker)
        publish(trainer, 3)
        check(trainer, replicas)
        wait_until_ready(owner)
