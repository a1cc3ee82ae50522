"""A service that is away: it costs the trainer lag, and neither memory, threads, descriptors, nor many lines."""

import gc
import logging
import os
import threading
import time
import weakref
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest
from tests.support.fleet import TABLES, WAIT, Trainer, admin_of, follow, wait_until_in_sync
from tests.support.ports import free_port
from tests.support.server import RunningService
from tests.support.waiting import wait_for

from deltasync.client import (
    InvalidInput,
    NumpyTarget,
    Part,
    Policy,
    Publisher,
    PublisherOptions,
    RowBatch,
    Shard,
    Subscriber,
    SubscriberOptions,
)
from deltasync.client.connection import Tuning

TABLE = TABLES[0]


def whole(step: int) -> Part:
    rows = RowBatch(Shard.whole(TABLE), np.arange(TABLE.rows), np.full((TABLE.rows, TABLE.dim), step, "<f4"))
    return Part(step=step, step_end_unix_ns=time.time_ns(), rows=[rows], full=True)


def test_a_service_that_is_away_costs_a_trainer_only_lag(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    address = f"127.0.0.1:{free_port()}"
    options = PublisherOptions(service=address, model="clicks", run="r", run_started_unix_ns=1)
    tuning = Tuning(pauses=lambda: repeat(0.01))
    with Publisher(options, [TABLE], [Shard.whole(TABLE)], tuning=tuning) as publisher:
        assert (publisher.connection.connected, publisher.connection.attempts) == (False, 0)
        part = whole(1)
        waiting = publisher.publish(part)
        wait_for(lambda: publisher.connection.attempts >= 10)
        before = _held()
        wait_for(lambda: publisher.connection.attempts >= 60)
        wait_for(lambda: _held() <= before + 4)  # What ends may take a moment.
        with pytest.raises(InvalidInput, match="wait for the future of the previous part"):
            publisher.publish(whole(2))
        assert publisher.connection.last_error.startswith(address)
        assert not publisher.connection.connected
        assert len(_lines(caplog)) <= 2
        with RunningService(tmp_path / "data", grpc_port=int(address.rpartition(":")[2])) as service:
            assert waiting.result(WAIT).number == 1
            assert publisher.connection.connected
            assert (publisher.connection.attempts, "is connected again" in caplog.text) == (0, True)
            target = NumpyTarget()
            with follow(service, "predictors", "p", target):
                wait_until_in_sync(service, "predictors", waiting.result())
            service.stop()
            wait_for(lambda: not publisher.connection.connected)  # Though no part is under way.
            assert publisher.connection.last_error
    assert publisher.connection.last_error == "the publisher is closed"
    gone = weakref.ref(part)
    del part, waiting
    gc.collect()
    assert gone() is None


def test_a_replica_that_has_lost_its_stream_says_so_before_it_tries_again(tmp_path: Path) -> None:
    with RunningService(tmp_path / "data") as service:
        hourly = Tuning(pauses=lambda: repeat(3600.0))
        with follow(service, "predictors", "p", NumpyTarget(), tuning=hourly) as replica:
            wait_for(lambda: replica.connection.connected)
            service.stop()
            wait_for(lambda: not replica.connection.connected)
            assert replica.connection.attempts == 1
            assert "it reconnects" in replica.readiness.reason


def test_replicas_outlive_a_service_that_has_lost_their_consumer(tmp_path: Path) -> None:
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


def _held() -> int:
    """Threads and descriptors."""
    return threading.active_count() + len(os.listdir("/proc/self/fd"))


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name.startswith("deltasync.client")]
