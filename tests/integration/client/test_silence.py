"""Connections that look alive, because a proxy answers pings, while nothing passes through them."""

from collections.abc import Iterator
from itertools import count

import pytest
from tests.support.fleet import WAIT, Recorder, Trainer, follow, wait_until_in_sync
from tests.support.grpc_proxy import GrpcProxy
from tests.support.proxy import Proxy
from tests.support.server import RunningService
from tests.support.waiting import wait_for
from tests.support.wire import RankStream, ReplicaStream

from deltasync.client import Endpoint, Subscriber

# Runs begin one after the other, in whatever order the tests come.
STARTS = count(1)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with RunningService(tmp_path_factory.mktemp("service"), silence_seconds=2.0) as service:
        with Trainer(service.grpc, run="first", started=next(STARTS)) as trainer:
            trainer.publish_all()
        yield service


@pytest.fixture
def proxy(service: RunningService) -> Iterator[GrpcProxy]:
    with GrpcProxy(service.grpc) as proxy:
        yield proxy


def follow_through(proxy: GrpcProxy | Proxy, target: Recorder) -> Subscriber:
    return follow(type("Proxied", (), {"grpc": proxy.address})(), "predictors", "p", target)


def test_both_sides_of_a_dead_connection_notice_and_go_on(service: RunningService, proxy: GrpcProxy) -> None:
    target = Recorder()
    with (
        Trainer(proxy.address, started=next(STARTS)) as trainer,
        follow_through(proxy, target) as replica,
    ):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        before = [*proxy.peers]
        proxy.fall_silent()
        head = trainer.change(5)
        replica.wait_for(head, WAIT)
        wait_until_in_sync(service, "predictors", head)
        assert target.bytes() == trainer.expected()
        assert "has sent nothing for 2 s" in replica.connection.last_error
        assert "has sent nothing for 2 s" in trainer.publisher.connection.last_error
        assert not {*before} & {*proxy.peers[len(before) :]}, "a new stream has a new connection"


def test_both_sides_notice_a_half_open_tcp_connection(service: RunningService) -> None:
    target, before = Recorder(), len(lost(service))
    with (
        Proxy(service.grpc) as proxy,
        Trainer(proxy.address, run="half-open", started=next(STARTS)) as trainer,
        follow_through(proxy, target) as replica,
    ):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        proxy.stall()
        clients = (trainer.publisher, replica)
        wait_for(lambda: not any(each.connection.connected for each in clients))
        wait_for(lambda: lost(service)[before:] and not any(each["connected"] for each in ranks_of(service)))
        proxy.go_on()
        wait_until_in_sync(service, "predictors", trainer.change(5))
        assert target.bytes() == trainer.expected()


def test_an_idle_publisher_and_the_service_notice_a_dead_connection(
    service: RunningService, proxy: GrpcProxy
) -> None:
    with Trainer(proxy.address, run="idle", started=next(STARTS)) as trainer:
        trainer.publish_all()
        proxy.fall_silent()
        wait_for(lambda: not trainer.publisher.connection.connected)
        assert "has sent nothing for 2 s" in trainer.publisher.connection.last_error
        (rank,) = wait_for(lambda: [each for each in ranks_of(service) if not each["connected"]])
        assert rank["left"] == "nothing has come from it for 2 s"
        trainer.change(1)
        assert trainer.publisher.connection.connected


def test_a_silent_replica_is_away_and_clients_without_alive_stay(
    service: RunningService, proxy: GrpcProxy
) -> None:
    """Clients in other languages need not send it."""
    model = "by-hand"
    with RankStream(service.grpc, model=model) as rank, ReplicaStream(service.grpc, replica="by-hand") as replica:
        rank.publish_all()
        replica.until("opened")
        events = len(lost(service))
        with Trainer(service.grpc, run="away", started=next(STARTS)) as trainer, follow_through(proxy, Recorder()):
            trainer.publish_all()
            wait_for(lambda: replicas(service).get("p", {}).get("offset"))
            # Otherwise its next stream might replace this one before the service notices.
            proxy.fall_silent(for_good=True)
            event, *_ = wait_for(lambda: lost(service)[events:])
            assert event == "nothing has come from it for 2 s"
            connected = {name: each["connected"] for name, each in replicas(service).items()}
        assert connected == {"by-hand": True, "p": False}
        (rank_line,) = (each for each in service.get_json("/trainers") if each["model"] == model)
        assert rank_line["connected"]


def test_a_silent_service_is_given_up_after_the_endpoints_timeout(
    service: RunningService, proxy: GrpcProxy
) -> None:
    proxy.fall_silent(for_good=True)
    endpoint = Endpoint(proxy.address, timeout_seconds=0.5)
    with follow(type("Proxied", (), {"grpc": endpoint})(), "predictors", "p", Recorder()) as replica:
        wait_for(lambda: "has sent nothing for 0.5 s" in replica.connection.last_error)
        assert not replica.ready


def ranks_of(service: RunningService) -> list[dict[str, object]]:
    return [each for each in service.get_json("/trainers") if each["model"] == "clicks"]


def replicas(service: RunningService) -> dict[str, dict[str, object]]:
    return {each["replica"]: each for each in service.get_json("/consumers/predictors")["replicas"]}


def lost(service: RunningService) -> list[str]:
    return [each["text"] for each in service.get_json("/events") if each["event"] == "replica_lost"]
