"""What happens to trainers and replicas is told: who came, left or was refused, what was sealed and released."""

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fleet import WAIT, Recorder, Trainer, follow, wait_until_in_sync
from tests.support.server import TOKEN, RunningService
from tests.support.wire import RankStream, ReplicaStream, Stream

from deltasync.client import Admin, Endpoint
from deltasync.core.policy import Policy
from deltasync.v1 import publish_pb2_grpc


@pytest.fixture
def service(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[RunningService]:
    caplog.set_level(logging.DEBUG, "deltasync.events")
    with RunningService(tmp_path / "data", policies={"top": Policy(top_k=1)}) as service:
        yield service


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "deltasync.events"]


def wait_for_line(caplog: pytest.LogCaptureFixture, pattern: str) -> str:
    """What happens at the end of a stream is told when the service has seen it."""
    deadline = time.monotonic() + WAIT
    while not (found := [line for line in lines(caplog) if re.fullmatch(pattern, line)]):
        assert time.monotonic() < deadline, lines(caplog)
        time.sleep(0.005)
    return found[-1]


def test_who_comes_and_goes_is_told(service: RunningService, caplog: pytest.LogCaptureFixture) -> None:
    with Trainer(service.grpc) as trainer, follow(service, "top", "a", Recorder()):
        wait_until_in_sync(service, "top", trainer.publish_all())
        wait_until_in_sync(service, "top", trainer.change(5))
    wait_for_line(caplog, r"rank joined: model=clicks rank=0 run=\w+ nothing is published yet")
    wait_for_line(caplog, r"cut sealed: model=clicks version=1 rows=\d+")
    wait_for_line(caplog, r"replica joined: consumer=top replica=a the replica holds nothing")
    wait_for_line(caplog, r"release made: consumer=top number=\d+")
    wait_for_line(caplog, r"replica left: consumer=top replica=a it said goodbye")
    wait_for_line(caplog, r"rank left: model=clicks rank=0 run=\w+ it has finished")


def test_who_is_refused_is_told_with_the_reason(service: RunningService, caplog: pytest.LogCaptureFixture) -> None:
    with RankStream(service.grpc, model="a\nb") as stream:
        stream.refusal()
    wait_for_line(caplog, r"publisher refused: model=a\\nb model name 'a\\nb': use 1 to 128 .*")
    with ReplicaStream(service.grpc, consumer="predictor") as replica:
        replica.refusal()
    wait_for_line(caplog, r"replica refused: consumer=predictor replica=\w+ no consumer 'predictor'; .*")
    assert all(line.isprintable() for line in lines(caplog))


def test_who_goes_without_a_word_is_not_refused(service: RunningService, caplog: pytest.LogCaptureFixture) -> None:
    with Stream(service.grpc, lambda channel: publish_pb2_grpc.PublishServiceStub(channel).Publish) as stream:
        stream.end()
        assert stream.rest() == []
    with RankStream(service.grpc, model="") as refused:
        refused.refusal()
    wait_for_line(caplog, r"publisher refused: .*")
    assert len([line for line in lines(caplog) if line.startswith("publisher refused")]) == 1


def test_changes_of_consumers_are_told(service: RunningService, caplog: pytest.LogCaptureFixture) -> None:
    admin = Admin(Endpoint(service.http, TOKEN, by="anna"))
    admin.create_consumer("new", "clicks", Policy())
    admin.update_consumer("new", Policy(top_k=3))
    admin.delete_consumer("new")
    told = [line for line in lines(caplog) if "consumer=new" in line]
    assert [re.sub(r"anna as admin token \(127\.0\.0\.1:\d+\)", "ANNA", line) for line in told] == [
        "consumer changed: consumer=new model=clicks by=ANNA policy: every changed row",
        "consumer changed: consumer=new model=clicks by=ANNA policy: top_k=3 rows; before: every changed row",
        "consumer changed: consumer=new by=ANNA deleted",
    ]


def test_checkpoints_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "deltasync.events")
    with RunningService(tmp_path / "data", checkpoint_bytes=1) as service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        wait_for_line(caplog, "checkpointed: model=clicks version=1 .*")
