"""gRPC messages that are nearly right: every call answers them with a status of its own, and goes on."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.besieged import TOKEN, Besieged, check_refusal
from tests.support.examples import examples
from tests.support.mutations import mutated_bytes, mutated_message, mutated_order
from tests.support.wire import WHOLE, ack, close, full_part, part, publish_open, random_rows, subscribe_open
from tests.support.wire import whole_part as whole

from deltasync.core.position import Position
from deltasync.v1 import publish_pb2, subscribe_pb2, tables_pb2
from deltasync.wire.protocol import protocol_to_metadata

pytestmark = pytest.mark.usefixtures("unharmed")

# All are to be read.
ARGUMENTS = [f"--limit=opens_per_second{of}=1000000" for of in ("", "_per_peer")]
EXAMPLES = 2 * examples()
_many = settings(
    max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
# These stand for the service's history, and for a run of its own for each example.
_HISTORY, _RUN, _STARTED = "0" * 32, b"run-1", 300_000_000
_POSITION = Position(_HISTORY, 3)
_numbers = itertools.count(1)

PUBLISHED: list[Message] = [
    publish_open(
        model="fuzzed",
        started=_STARTED,
        continues=_POSITION,
        takes_deletes=True,
        takes_changes=True,
        process="host 1",
    ),
    *full_part(1, random_rows(0), WHOLE),
    *part(2, [(0, [3, 4], np.ones((2, 4), "<f4")), (1, [1], np.ones((1, 6), "<f2"))]),
    whole(3, [(0, [7], np.ones((1, 4), "<f4"))]),
    close(4, 0),
]
SUBSCRIBED: list[Message] = [
    subscribe_open(consumer="probes", replica="fuzzed", held=_POSITION, budget=100),
    subscribe_open(consumer="probes", replica="fuzzed"),
    ack(100, _POSITION),
    ack(100),
    subscribe_pb2.SubscribeRequest(
        ack=subscribe_pb2.Ack(
            received_bytes=5,
            applied=tables_pb2.Position(history=_HISTORY, version=1, seal=5),
            sums=[tables_pb2.Checksum(slot=0, sum=4)],
            wanted=[tables_pb2.WantedRows(table=0, ids=[1, 2])],
            unbound=[1],
            token=7,
        )
    ),
    subscribe_pb2.SubscribeRequest(ack=subscribe_pb2.Ack(goodbye=True)),
]
UNARY: dict[str, Message] = {
    "PublishService/Wanted": publish_pb2.WantedRequest(model="fuzzed", run="run-1"),
    "SubscribeService/Leave": subscribe_pb2.LeaveRequest(consumer="probes", replica="fuzzed", instance="x"),
}
STREAMS = {"PublishService/Publish": PUBLISHED, "SubscribeService/Subscribe": SUBSCRIBED}
_TIMEOUT_SECONDS = 20.0


@pytest.fixture(scope="module")
def channel(service: Besieged) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(service.grpc) as channel:
        yield channel


def call_stream(channel: grpc.Channel, method: str, contents: Sequence[bytes]) -> None:
    call: Any = channel.stream_stream(f"/deltasync.v1.{method}")
    responses = call(iter(contents), timeout=_TIMEOUT_SECONDS, metadata=[protocol_to_metadata()])
    try:
        for _ in responses:
            pass
    except grpc.RpcError:
        pass
    check_refusal(responses.code(), responses.details())


def call_once(channel: grpc.Channel, method: str, content: bytes) -> None:
    call: Any = channel.unary_unary(f"/deltasync.v1.{method}")
    metadata = [protocol_to_metadata(), ("authorization", f"Bearer {TOKEN}")]
    try:
        call(content, timeout=_TIMEOUT_SECONDS, metadata=metadata)
    except grpc.RpcError as error:
        refused: Any = error
        check_refusal(refused.code(), refused.details())


@st.composite
def streams(draw: Callable[..., Any], messages: Sequence[Message]) -> list[bytes]:
    """Contents of a stream's messages, of which one or two are no longer what they were."""
    contents = [message.SerializeToString() for message in messages]
    if draw(st.booleans()):
        contents = [contents[0], *draw(mutated_order(contents[1:]))]
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(contents) - 1))
        if draw(st.booleans()):
            contents[at] = draw(mutated_bytes(contents[at], draw(st.sampled_from(contents))))
        else:
            contents[at] = draw(mutated_message(draw(st.sampled_from(list(messages)))))
    return contents


@pytest.mark.nightly
@_many
@given(contents=streams(PUBLISHED))
def test_streams_of_ranks(channel: grpc.Channel, contents: list[bytes]) -> None:
    number = next(_numbers)
    run = b"r%04d" % (number % 10_000)
    before, began = _began(_STARTED), _began(_STARTED + number)
    call_stream(
        channel, "PublishService/Publish", [each.replace(_RUN, run).replace(before, began) for each in contents]
    )


def _began(unix_ns: int) -> bytes:
    return publish_pb2.PublishOpen(run_started_unix_ns=unix_ns).SerializeToString()


@_many
@given(contents=streams(SUBSCRIBED))
def test_streams_of_replicas(service: Besieged, channel: grpc.Channel, contents: list[bytes]) -> None:
    history = service.head.history.encode()
    call_stream(
        channel, "SubscribeService/Subscribe", [each.replace(_HISTORY.encode(), history) for each in contents]
    )


@_many
@given(data=st.data(), method=st.sampled_from(sorted(UNARY)))
def test_calls(channel: grpc.Channel, data: st.DataObject, method: str) -> None:
    message = UNARY[method]
    content = message.SerializeToString()
    other = data.draw(st.sampled_from(sorted(UNARY)))
    mutated = mutated_bytes(content, UNARY[other].SerializeToString())
    if message.DESCRIPTOR.fields:
        mutated |= mutated_message(message)
    call_once(channel, method, data.draw(mutated))
