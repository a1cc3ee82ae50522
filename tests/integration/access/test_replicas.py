"""Replicas whose rights are taken away, or given another token: they go on, and need no restart."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.guarded import ROLES, GuardedService, token_of
from tests.support.wire import TABLES

from deltasync.client import (
    Endpoint,
    NumpyTarget,
    Part,
    Publisher,
    PublisherOptions,
    Subscriber,
    SubscriberOptions,
)
from deltasync.core.errors import NotPermitted
from deltasync.core.rows import RowBatch
from deltasync.core.tables import Shard

WAIT = 20.0


@pytest.fixture
def service(tmp_path: Path) -> Iterator[GuardedService]:
    with GuardedService(tmp_path) as service:
        yield service


def publish(service: GuardedService) -> None:
    endpoint = Endpoint(service.grpc, token=token_of("trainer"))
    options = PublisherOptions(service=endpoint, model="clicks", run="run", run_started_unix_ns=1)
    shards = [Shard.whole(table) for table in TABLES]
    rows = [
        RowBatch(each, np.arange(each.rows), np.ones((each.rows, each.cols), each.table.dtype)) for each in shards
    ]
    with Publisher(options, TABLES, shards) as publisher:
        publisher.publish(Part(rows=rows, step=1, step_end_unix_ns=1, full=True)).result(WAIT)


def subscribed(service: GuardedService, token_file: Path) -> Subscriber:
    endpoint = Endpoint(service.grpc, token_file=token_file)
    return Subscriber(SubscriberOptions(service=endpoint, consumer="predictors", replica="p0"), NumpyTarget())


def wait_until(replica: Subscriber, there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not there():
        assert time.monotonic() < deadline, replica.connection
        replica.check()
        time.sleep(0.01)


def test_a_replica_goes_on_with_its_new_token_once_the_old_one_is_revoked(
    service: GuardedService, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(token_of("predictor"))
    with subscribed(service, token_file) as replica:
        wait_until(replica, lambda: replica.connection.connected)
        service.write_roles({name: roles for name, roles in ROLES.items() if name != "predictor"})
        wait_until(replica, lambda: bool(replica.connection.last_error))
        token_file.write_text(token_of("new"))
        service.write_roles({**ROLES, "new": ROLES["predictor"]})
        publish(service)
        replica.wait_for(1, WAIT)


def test_a_replica_that_never_had_the_right_stops(service: GuardedService, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(token_of("watcher"))
    with subscribed(service, token_file) as replica, pytest.raises(NotPermitted, match="role subscribe"):
        replica.wait_for(1, WAIT)
