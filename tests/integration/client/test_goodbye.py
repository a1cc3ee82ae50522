"""Replicas that leave: with a goodbye, without one, in the middle of a release, and two of one name."""

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.support.fleet import WAIT, Recorder, Trainer, follow, lost, wait_for_lag, wait_until_in_sync
from tests.support.metrics import samples_of
from tests.support.process import environment
from tests.support.proxy import Proxy
from tests.support.server import RunningService
from tests.support.waiting import wait_for
from tests.support.wire import RankStream, ReplicaStream, chunk, close, subscribe_open

from deltasync.client import Contradiction, NumpyTarget, Release, Shard, Subscriber, TableSpec
from deltasync.client.connection import Tuning
from deltasync.v1 import subscribe_pb2, subscribe_pb2_grpc

_DIES_IN_A_RELEASE = """
import os, signal, sys
from tests.support.wire import ReplicaStream
replica = ReplicaStream(sys.argv[1], budget=1 << 30, replica="dies")
replica.until("chunk")
os.kill(os.getpid(), signal.SIGKILL)
"""


def events(service: RunningService, kind: str) -> float:
    return samples_of(service)["deltasync_events_total", (("event", kind),)]


class Lost(NumpyTarget):
    """Cannot apply anything more."""

    def apply(self, release: Release) -> None:
        raise RuntimeError("cannot write: the GPU is lost")


def test_a_replica_that_stops_says_why(tmp_path: Path) -> None:
    """So that it is not taken for one that was killed."""
    with RunningService(tmp_path / "data") as service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        with lost(follow(service, "predictors", "p", Lost())) as replica:
            lag = wait_for_lag(service, "predictors", lambda lag: any(each["left"] for each in lag["replicas"]))
            (line,) = lag["replicas"]
            assert line["left"] == "it stopped: RuntimeError: cannot write: the GPU is lost"
            assert line["left"] in line["reason"]
            assert not line["connected"]
            with pytest.raises(RuntimeError, match="the GPU is lost"):
                replica.wait_for(1, WAIT)  # The service may know of it first.
        (told,) = (each for each in service.get_json("/events") if each["event"] == "replica_lost")
        assert told["text"] == line["left"]


class Slow(NumpyTarget):
    """Takes as long as a test wants for a release."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def apply(self, release: Release) -> None:
        self.goes_on.wait(60)
        super().apply(release)


def test_a_replica_that_is_slow_is_not_taken_for_one_that_is_sent_nothing(tmp_path: Path) -> None:
    with RunningService(tmp_path / "data") as service, Trainer(service.grpc) as trainer:
        target = Slow()
        with follow(service, "predictors", "p", target):
            sealed = trainer.publish_all()
            wait_for_lag(
                service,
                "predictors",
                lambda lag: any("it is slow to read or apply" in each["reason"] for each in lag["replicas"]),
            )
            target.goes_on.set()
            (line,) = wait_until_in_sync(service, "predictors", sealed)["replicas"]
            assert (line["unacked"], line["unacked_seconds"], line["reason"]) == (0, 0.0, "")


def test_a_replica_that_says_goodbye_is_forgotten(tmp_path: Path) -> None:
    with RunningService(tmp_path / "data") as service, Trainer(service.grpc) as trainer:
        with follow(service, "predictors", "stays", Recorder()):
            target = Recorder()
            with follow(service, "predictors", "leaves", target) as leaves:
                wait_until_in_sync(service, "predictors", trainer.publish_all(), 2)
            wait_for_lag(service, "predictors", lambda lag: len(lag["replicas"]) == 1)
            wait_until_in_sync(service, "predictors", trainer.change(3))
            with follow(service, "predictors", "leaves", target, held=leaves.held) as back:
                back.wait_for(2, 20)
                assert target.received_rows == 106  # It goes on from what it holds.
        lag = wait_for_lag(service, "predictors", lambda lag: not lag["replicas"])
        assert lag["state"] == "empty"
        assert events(service, "replica_left") == 3
    with RunningService(tmp_path / "data") as service:
        assert service.get_json("/consumers/predictors")["replicas"] == []


def test_one_that_dies_in_the_middle_of_a_release_is_a_line_with_a_reason(
    running: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    """And no error with a traceback: `running` looks for those."""
    big = TableSpec("big", 60_000, 64)
    values = np.ones((3000, 64), np.float32)
    with RankStream(running.grpc, tables=[big], shards=[Shard.whole(big)]) as rank:
        rank.opened()
        rank.send(*(chunk(1, 0, np.arange(first, first + 3000), values) for first in range(0, big.rows, 3000)))
        rank.send(close(1, big.rows, full=True))
        rank.sealed()
        for _ in range(3):
            subprocess.run(
                [sys.executable, "-c", _DIES_IN_A_RELEASE, running.grpc], env=environment(), check=False
            )
        wait_for_lag(running, "predictors", lambda lag: not lag["replicas"])  # It has never held anything.
        assert events(running, "replica_joined") == events(running, "replica_left") + events(
            running, "replica_lost"
        ) + events(running, "replica_replaced")


def test_of_two_of_one_name_the_older_one_stops(running: RunningService, caplog: pytest.LogCaptureFixture) -> None:
    with Trainer(running.grpc) as trainer:
        trainer.publish_all()
        older = follow(running, "predictors", "twin", NumpyTarget())
        older.wait_for(1, 20)
        with follow(running, "predictors", "twin", NumpyTarget()) as newer:
            newer.wait_for(1, 20)
            with pytest.raises(
                Contradiction, match=r"another replica named 'twin' of consumer 'predictors'.* a different name"
            ):
                older.wait_for(2, 20)
            with pytest.raises(Contradiction):
                older.check()
            assert not older.ready
            trainer.change(3)
            newer.wait_for(2, 20)
            newer.check()
            older.close()  # Has nothing to say any more.
            assert events(running, "replica_replaced") == 1
            assert len(running.get_json("/consumers/predictors")["replicas"]) == 1


@pytest.fixture
def waiting(running: RunningService) -> Iterator[Subscriber]:
    """A replica whose connection is lost, and that tries again in an hour."""
    hourly = Tuning(pauses=lambda: repeat(3600.0))
    with Proxy(running.grpc) as proxy, Trainer(running.grpc) as trainer:
        through = type("Through", (), {"grpc": proxy.address})()
        with follow(through, "predictors", "leaves", Recorder(), tuning=hourly) as replica:
            wait_until_in_sync(running, "predictors", trainer.publish_all())
            proxy.cut()
            wait_for_lag(running, "predictors", lambda lag: lag["state"] == "away")
            wait_for(lambda: replica.connection.attempts)  # The replica has found out, too.
            yield replica


def test_one_that_is_closed_while_unconnected_is_forgotten(running: RunningService, waiting: Subscriber) -> None:
    waiting.close()
    wait_for_lag(running, "predictors", lambda lag: not lag["replicas"])
    assert events(running, "replica_forgotten") == 1
    waiting.close()  # Has nothing to say any more.


def test_one_of_its_name_that_has_come_since_stays(running: RunningService, waiting: Subscriber) -> None:
    with follow(running, "predictors", "leaves", NumpyTarget()) as newer:
        newer.wait_for(1, 20)
        waiting.close()
        lag = running.get_json("/consumers/predictors")
        assert [each["connected"] for each in lag["replicas"]] == [True]
        newer.check()
        assert events(running, "replica_forgotten") == 0


def test_whom_nobody_can_tell_is_not_waited_for(
    running: RunningService, waiting: Subscriber, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "deltasync.client")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # Takes connections, and says nothing.
        host, port = silent.getsockname()
        waiting._route.endpoint = replace(waiting._route.endpoint, address=f"{host}:{port}")
        waiting.close()
    assert "replica leaves of consumer predictors could not sign off and counts as disconnected" in caplog.text
    assert running.get_json("/consumers/predictors")["state"] == "away"


def test_a_goodbye_overtakes_the_news_that_a_connection_is_lost(running: RunningService) -> None:
    """The service does not know of that yet: for it there is a stream."""
    leave = subscribe_pb2.LeaveRequest(consumer="predictors", replica="p0", instance="me")
    with (
        Trainer(running.grpc) as trainer,
        ReplicaStream(running.grpc, bare=True) as lost,
        grpc.insecure_channel(running.grpc) as channel,
    ):
        stub = subscribe_pb2_grpc.SubscribeServiceStub(channel)
        trainer.publish_all()
        opening = subscribe_open()
        opening.open.instance = "me"
        lost.send(opening)
        lost.until("opened")
        for other in ({"instance": "other"}, {"replica": "p1"}, {"consumer": "no"}):
            changed = subscribe_pb2.LeaveRequest()
            changed.CopyFrom(leave)
            changed.MergeFrom(subscribe_pb2.LeaveRequest(**other))
            stub.Leave(changed, timeout=20)
        assert running.get_json("/consumers/predictors")["replicas"][0]["connected"]
        for _ in range(2):
            stub.Leave(leave, timeout=20)
        assert running.get_json("/consumers/predictors")["replicas"] == []
        lost.rest()
        assert events(running, "replica_left") == 1
    assert running.get_json("/consumers/predictors")["replicas"] == []


def test_one_that_reconnects_does_not_stop_itself(running: RunningService) -> None:
    with Trainer(running.grpc) as trainer, ReplicaStream(running.grpc, bare=True) as old:
        trainer.publish_all()
        opening = subscribe_open()
        opening.open.instance = "me"
        old.send(opening)
        old.until("opened")
        with ReplicaStream(running.grpc, bare=True) as again:
            again.send(opening)
            again.until("opened")
            code, text = old.refusal()
    assert (code.name, text) == ("ABORTED", "a newer stream of replica 'p0' took over")
