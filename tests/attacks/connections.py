"""Connections that take their time, or do nothing."""

import contextlib
import socket
import time

from tests.attacks import http2
from tests.attacks.attack import Family, Outcome, until
from tests.attacks.messages import PUBLISH
from tests.attacks.target import Target, wait_until

FAMILY = Family()
_DESCRIPTORS = 1024


def _idle(target: Target, port: str, number: int, first: bytes = b"", more: bytes = b"") -> Outcome:
    """So many connections that send something first, and a little more every now and then."""
    end = time.monotonic() + target.seconds
    with contextlib.ExitStack() as stack:
        held: list[socket.socket] = []
        refused = 0
        for _ in range(number):
            try:
                connection = stack.enter_context(target.connect(port, 2.0))
                connection.sendall(first)
                held.append(connection)
            except OSError:
                refused += 1
            if time.monotonic() > end:
                break
        while time.monotonic() < end:
            wait_until(min(end, time.monotonic() + 0.5))
            held = [each for each in held if not more or _sent(each, more)]
        left = sum(map(_is_open, held))
    return Outcome(
        f"{len(held)} connections were made, {refused} refused; {left} are open after {target.seconds:.0f} s"
    )


def _sent(connection: socket.socket, content: bytes) -> bool:
    try:
        connection.sendall(content)
    except OSError:
        return False
    return True


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1 << 16, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@FAMILY.attack(
    "1,100 silent HTTP connections against 1,024 file descriptors",
    descriptors=_DESCRIPTORS,
)
def idle_http(target: Target) -> Outcome:
    return _idle(target, "http", 1100)


@FAMILY.attack(
    "1,100 silent gRPC connections",
    descriptors=_DESCRIPTORS,
)
def idle_grpc(target: Target) -> Outcome:
    return _idle(target, "grpc", 1100)


@FAMILY.attack("300 HTTP requests whose headers arrive slowly")
def slow_http(target: Target) -> Outcome:
    return _idle(target, "http", 300, b"GET /metrics HTTP/1.1\r\nhost: x\r\n", b"x-slow: y\r\n")


@FAMILY.attack("300 HTTP requests whose bodies arrive slowly")
def slow_body(target: Target) -> Outcome:
    first = b"POST /consumers/predictors/pause HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n"
    return _idle(target, "http", 300, first, b"x")


@FAMILY.attack("endless HTTP headers, lines and bodies")
def large_http(target: Target) -> Outcome:
    starts = (
        b"GET /" + b"x" * (1 << 16),
        b"GET / HTTP/1.1\r\nx: ",
        b"POST /consumers HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 10000000000\r\n\r\n",
        b"POST /consumers HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nFFFFFFF\r\n",
    )
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(target.connect("http")) for _ in range(12)]
        for number, connection in enumerate(held):
            connection.sendall(starts[number % len(starts)])
        sent = 0
        for _ in until(target.seconds):
            held = [each for each in held if _sent(each, b"x" * (1 << 16))]
            sent += len(held) << 16
            if not held:
                break
    return Outcome(f"{sent / 1e6:.0f} MB were taken; {len(held)} of 12 connections are open at the end")


@FAMILY.attack("200 gRPC messages that arrive slowly")
def slow_grpc(target: Target) -> Outcome:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(http2.Connection(target)) for _ in range(4)]
        streams = [(each, each.begin(f"/deltasync.v1.{PUBLISH}")) for each in connections for _ in range(50)]
        for connection, stream in streams:
            connection.data(stream, b"\0" + (1 << 20).to_bytes(4, "big"))
        end = time.monotonic() + target.seconds
        while time.monotonic() < end:
            for connection, stream in streams:
                connection.data_if_room(stream, b"x")
            for connection in connections:
                connection.take()
            wait_until(min(end, time.monotonic() + 0.5))
        return Outcome("; ".join(sorted({each.told for each in connections})))
