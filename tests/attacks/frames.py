"""HTTP/2 as no library sends it: garbage, resets, settings and pings in floods, headers without end."""

import random

from tests.attacks import http2
from tests.attacks.attack import Family, Outcome, until
from tests.attacks.messages import PUBLISH
from tests.attacks.target import Target

FAMILY = Family()
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_PUBLISH = f"/deltasync.v1.{PUBLISH}"


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


@FAMILY.attack("random bytes and frames to both ports")
def garbage(target: Target) -> Outcome:
    source, made = random.Random(0), 0
    for number in until(target.seconds / 2):
        content = source.randbytes(source.randrange(1, 4000))
        if number % 3 == 1:
            kind, flags, stream = source.randrange(256), source.randrange(256), source.randrange(2**31)
            content = _PREFACE + frame(4, 0, 0) + frame(kind, flags, stream, content)
        try:
            with target.connect("grpc" if number % 3 else "http", 2.0) as connection:
                connection.sendall(content)
                made += 1
        except OSError:
            continue
    return Outcome(f"{made} connections")


@FAMILY.attack("streams that are opened and reset at once (rapid reset)")
def rapid_reset(target: Target) -> Outcome:
    opened, connections = 0, 0
    for _ in until(target.seconds):
        with http2.Connection(target) as connection:
            connections += 1
            headers = connection.headers(_PUBLISH)
            for number in until(target.seconds):
                stream = connection.frames.get_next_available_stream_id()
                connection.frames.send_headers(stream, headers)
                connection.frames.reset_stream(stream, 8)
                opened += 1
                if number % 100 == 99:
                    connection.flush()
                    if not connection.take():
                        break
            told = connection.told
    return Outcome(f"{opened} streams on {connections} connections; {told}")


@FAMILY.attack("a flood of HTTP/2 pings and settings")
def pings_and_settings(target: Target) -> Outcome:
    sent, connections, told = 0, 0, ""
    content = (frame(6, 0, 0, bytes(8)) + frame(4, 0, 0, b"\0\x04\0\x01\0\0")) * 500
    for _ in until(target.seconds):
        with http2.Connection(target) as connection:
            connections += 1
            for _ in until(target.seconds):
                if not connection.raw(content):
                    break
                sent += 1000
                connection.take()
            told = connection.told
    return Outcome(f"{sent} frames on {connections} connections; {told}")


@FAMILY.attack("headers that HPACK expands")
def large_headers(target: Target) -> Outcome:
    sent, connections, told = 0, 0, ""
    for _ in until(target.seconds):
        with http2.Connection(target) as connection:
            connections += 1
            big = ("x-large", "y" * 3900)
            connection.begin(_PUBLISH, big)
            for _ in range(50):
                connection.begin(_PUBLISH, *[big] * 1000)
                sent += 1000 * 3900
                if not connection.take():
                    break
            told = connection.told
    return Outcome(f"headers of {sent / 1e6:.0f} MB, unpacked, on {connections} connections; {told}")


@FAMILY.attack("endless header continuations")
def endless_headers(target: Target) -> Outcome:
    sent, connections, told = 0, 0, ""
    literal = b"\0\x01x\x7f\x81\x7f" + b"y" * 16_000
    for _ in until(target.seconds):
        with http2.Connection(target) as connection:
            connections += 1
            connection.raw(frame(1, 0, 1, b""))
            for _ in until(target.seconds):
                if not connection.raw(frame(9, 0, 1, literal)):
                    break
                sent += len(literal)
                connection.take()
            told = connection.told
    return Outcome(f"{sent / 1e6:.0f} MB on {connections} connections; {told}")
