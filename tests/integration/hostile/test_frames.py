"""HTTP/2 and TCP as no library sends them: none of it reaches the log, and nobody waits for what never comes."""

import contextlib
import random

import grpc
import pytest
from tests.attacks.frames import frame
from tests.attacks.http2 import Connection, message
from tests.attacks.messages import PUBLISH, SUBSCRIBE
from tests.attacks.target import Target
from tests.support.besieged import Besieged
from tests.support.wire import publish_open

pytestmark = pytest.mark.usefixtures("unharmed")

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
_METHODS = [f"/deltasync.v1.{method}" for method in (PUBLISH, SUBSCRIBE)]


@pytest.fixture
def target(service: Besieged) -> Target:
    return Target(service.grpc, service.http)


def test_what_a_peer_says_at_its_leave_is_not_logged(service: Besieged, target: Target) -> None:
    """gRPC by itself writes it to the log as it is."""
    with target.connect("grpc") as connection:
        goodbye = frame(7, 0, 0, bytes(4) + (2).to_bytes(4, "big") + b"\n2026-01-01 00:00:00,000 ERROR forged\n")
        connection.sendall(_PREFACE + goodbye + frame(6, 0, 0, bytes(8)))
        got = b""
        while frame(6, 1, 0, bytes(8)) not in got:  # It has read what came before.
            got += connection.recv(1 << 16) or pytest.fail("the service has ended the connection")
    assert b"forged" not in service.log.read_bytes()


@pytest.mark.parametrize("port", ["grpc", "http"])
def test_bytes_of_no_protocol(target: Target, port: str) -> None:
    source = random.Random(0)
    for number in range(100):
        with target.connect(port) as connection, contextlib.suppress(OSError):
            connection.sendall((_PREFACE if number % 2 else b"") + source.randbytes(source.randrange(3000)))


def test_connections_that_end_in_the_middle_of_a_message(target: Target) -> None:
    whole = message(publish_open(model="fuzzed"))
    for size in range(0, len(whole), 7):
        with Connection(target) as connection:
            connection.data(connection.begin(_METHODS[0]), whole[:size])


def test_senders_that_never_finish_keep_nobody_waiting(service: Besieged, target: Target) -> None:
    """While they are there, others publish and are sent what is published."""
    with contextlib.ExitStack() as stack:
        for number in range(20):
            connection = stack.enter_context(Connection(target))
            for method in _METHODS:
                connection.data(connection.begin(method), b"\0\0\x0f\0\0" + bytes(number))
            stack.enter_context(target.connect("http")).sendall(b"GET /metrics HTTP/1.1\r\nx: ")
        service.check_honest()
        with grpc.insecure_channel(service.grpc) as channel:
            grpc.channel_ready_future(channel).result(20)
