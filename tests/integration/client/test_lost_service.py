"""A service that has lost its data: replicas serve what they have, wait, and follow once it is recovered."""

from functools import partial
from pathlib import Path

import pytest
from tests.support.fleet import WAIT, Trainer, admin_of
from tests.support.ports import free_port
from tests.support.server import RunningService
from tests.support.waiting import wait_for

from deltasync.client import NotFound, NumpyTarget, Policy, Subscriber, SubscriberOptions


def test_replicas_outlive_a_service_that_does_not_know_their_consumer_any_more(tmp_path: Path) -> None:
    start = partial(RunningService, grpc_port=free_port(), http_port=free_port())
    target = NumpyTarget()
    with start(tmp_path / "first", policies={"readers": Policy(ready_within_seconds=3600)}) as service:
        options = SubscriberOptions(service=service.grpc, consumer="readers", replica="a")
        replica = Subscriber(options, target)
        with replica, Trainer(service.grpc, run="before") as trainer:
            replica.wait_for(trainer.publish_all(), WAIT)
            service.stop()
            with start(tmp_path / "second") as empty, Trainer(empty.grpc, started=2) as again:
                wait_for(lambda: "no consumer 'readers'" in replica.connection.last_error)
                replica.check()
                assert "no consumer 'readers'" in replica.readiness.reason
                assert target.tables["user"].shape == (60, 8)
                admin_of(empty).create_consumer("readers", "clicks", Policy())
                replica.wait_for(again.publish_all(), WAIT)
                assert (target.tables["user"] == again.rows["user"]).all()


def test_a_consumer_that_a_replica_has_never_followed_stops_it(running: RunningService) -> None:
    options = SubscriberOptions(service=running.grpc, consumer="predictorz", replica="a")
    with Subscriber(options, NumpyTarget()) as replica, pytest.raises(NotFound, match="predictors"):
        replica.wait_for(1, WAIT)
