"""gRPC messages that are nearly right: every call answers them with a status of its own, and goes on."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.besieged import TOKEN, Besieged, check_refusal
from tests.support.examples import examples
from tests.support.wire import WHOLE, ack, close, full_part, part, publish_open, random_rows, subscribe_open
from tests.support.wire import whole_part as whole

from deltasync.core.position import Position
from deltasync.v1 import publish_pb2, subscribe_pb2, tables_pb2
from deltasync.wire.errors import protocol_to_metadata

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
            unbound=[1],
            token=7,
        )
    ),
    subscribe_pb2.SubscribeRequest(ack=subscribe_pb2.Ack(goodbye=True)),
]
UNARY: dict[str, Message] = {
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


T = TypeVar("T")

_WHOLE = (0, 1, 2, -1, 127, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53, 2**62, 2**63 - 1, 2**64 - 1)
_REAL = (0.0, -1.0, 0.5, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", "x", " ", ".", "../x", "a\0b", "line\nERROR forged", "\x1b[2J", "\u202e", "*", "x" * 129, "é" * 4000)
_CONTENTS = (
    b"",
    b"\0",
    b"\xff" * 8,
    bytes(7),
    bytes(4096),
    b"\0\0\xc0\x7f" * 4,
    b"\xff\xff\xff\xff\xff\xff\xff\x7f",
)
_WHOLE_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


@st.composite
def mutated_bytes(draw: Callable[..., Any], content: bytes, other: bytes = b"") -> bytes:
    """`content` with some of its bytes flipped, put in, taken out, said twice, or taken from another message."""
    found = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at, size = draw(st.integers(0, len(found))), draw(st.integers(1, 12))
        kind = draw(st.sampled_from(("flip", "insert", "delete", "twice", "splice", "cut", "length")))
        if kind == "flip" and at < len(found):
            found[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "insert":
            found[at:at] = draw(st.binary(min_size=size, max_size=size))
        elif kind == "delete":
            del found[at : at + size]
        elif kind == "twice":
            found[at:at] = found[at : at + size]
        elif kind == "splice":
            found[at:] = other[draw(st.integers(0, len(other))) :]
        elif kind == "length":
            found[at : at + 1] = b"\xff\xff\xff\xff\x07"
        else:
            del found[at:]
    return bytes(found)


@st.composite
def mutated_message(draw: Callable[..., Any], message: Message) -> bytes:
    """`message` with some of its fields, however deep, changed to what nobody would send."""
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(draw(st.integers(1, 3))):
        owner, field = draw(st.sampled_from(_fields(changed)))
        _change(draw, owner, field)
    return changed.SerializeToString()


def mutated_order(contents: Sequence[T]) -> st.SearchStrategy[list[T]]:
    """The messages of a stream in any order, some of them twice and others not at all."""
    return st.lists(st.sampled_from(contents), max_size=len(contents) + 2)


def _fields(message: Message) -> list[tuple[Message, Any]]:
    """All fields of a message, and of those in it."""
    found: list[tuple[Message, Any]] = [(message, field) for field in message.DESCRIPTOR.fields]
    for field, value in message.ListFields():
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                found += _fields(inner)
    return found


def _change(draw: Callable[..., Any], owner: Message, field: FieldDescriptor) -> None:
    kind = draw(st.sampled_from(("clear", "set", "set", "set")))
    values = getattr(owner, field.name)
    if kind == "clear":
        owner.ClearField(field.name)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        if not field.is_repeated:
            values.SetInParent()
        elif values:
            values.extend([draw(st.sampled_from(list(values)))] * draw(st.sampled_from((1, 50))))
        else:
            values.add()
    elif field.is_repeated:
        values.extend([draw(_hostile(field))] * draw(st.sampled_from((1, 2, 500))))
    else:
        setattr(owner, field.name, draw(_hostile(field)))


def _hostile(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Values that a field can have, and hardly ever has."""
    if field.cpp_type in _WHOLE_RANGES:
        least, most = _WHOLE_RANGES[field.cpp_type]
        return st.sampled_from([number for number in _WHOLE if least <= number <= most])
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return st.sampled_from(_REAL)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    return st.sampled_from(_CONTENTS if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS)


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
