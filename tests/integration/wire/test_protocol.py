"""Sides that do not understand each other are told so, for good, and nothing is done."""

import queue
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.fleet import USER, WAIT
from tests.support.server import TOKEN, RunningService

from deltasync.client import (
    Contradiction,
    NumpyTarget,
    Part,
    Publisher,
    PublisherOptions,
    Shard,
    Subscriber,
    SubscriberOptions,
)

NEWER = ("deltasync-protocol", "2")
TOO_NEW = "the client speaks protocol 2, the service protocol 1: update the service"
TOO_OLD = "the client speaks protocol 1, the service protocol 2: update the client"


@pytest.fixture(params=["client", "service"])
def said(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One side is newer than the other understands; what is said then."""
    if request.param == "client":
        monkeypatch.setattr("deltasync.client.endpoint.protocol_to_metadata", lambda: NEWER)
        return TOO_NEW
    monkeypatch.setattr("deltasync.wire.errors.PROTOCOL", 2)
    return TOO_OLD


def test_a_publisher_stops(running: RunningService, said: str) -> None:
    options = PublisherOptions(service=running.grpc, model="clicks", run="r", run_started_unix_ns=1)
    with Publisher(options, [USER], [Shard.whole(USER)]) as publisher, pytest.raises(Contradiction, match=said):
        publisher.publish(Part(step=1, step_end_unix_ns=1, full=True)).result(WAIT)
    assert running.get_json("/tables") == []


def test_a_subscriber_stops(running: RunningService, said: str) -> None:
    options = SubscriberOptions(service=running.grpc, consumer="predictors", replica="p0")
    with Subscriber(options, NumpyTarget()) as subscriber, pytest.raises(Contradiction, match=said):
        subscriber.wait_for(1, WAIT)
    assert running.get_json("/consumers/predictors")["replicas"] == []


def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    assert isinstance(refused.value, grpc.Call)
    return refused.value.code(), refused.value.details() or ""


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        ("2", grpc.StatusCode.FAILED_PRECONDITION, TOO_NEW),
        ("two", grpc.StatusCode.INVALID_ARGUMENT, "deltasync-protocol: 'two', expected a number such as 1"),
    ],
)
def test_a_call_is_refused_whatever_it_holds(
    running: RunningService, number: str, code: grpc.StatusCode, words: str
) -> None:
    """A stream is even before its first message, and a message that only a newer side could read is not read."""
    metadata = (("deltasync-protocol", number), ("authorization", f"Bearer {TOKEN}"))
    with grpc.insecure_channel(running.grpc) as channel:
        leave: Any = channel.unary_unary("/deltasync.v1.SubscribeService/Leave")
        assert refusal(lambda: leave(b"\xff", timeout=WAIT, metadata=metadata)) == (code, words)
        for name in ("PublishService/Publish", "SubscribeService/Subscribe"):
            requests = queue.SimpleQueue[bytes | None]()
            stream: Any = channel.stream_stream(f"/deltasync.v1.{name}")
            answers = stream(iter(requests.get, None), timeout=WAIT, metadata=metadata)
            assert refusal(lambda answers=answers: next(answers)) == (code, words)
            requests.put(None)


@pytest.mark.parametrize("number", ["2", "two"])
def test_health_is_told_to_whoever_asks(running: RunningService, number: str) -> None:
    with grpc.insecure_channel(running.grpc) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        request = health_pb2.HealthCheckRequest(service="deltasync.v1.PublishService")
        answer = check(request, timeout=WAIT, metadata=(("deltasync-protocol", number),))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
