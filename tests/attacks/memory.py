"""Messages that take much more memory of the service than they cost to send."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.attacks import http2
from tests.attacks.attack import Answers, Family, Outcome
from tests.attacks.messages import (
    PUBLISH,
    SUBSCRIBE,
    Stream,
    asked,
    at_once,
    full_part,
    opening,
    subscription,
    table_of,
)
from tests.attacks.target import CONSUMER, Target

from deltasync.v1 import publish_pb2, tables_pb2

FAMILY = Family()


@FAMILY.attack("82 kB that announce 8,192 empty shards")
def zero_shards(target: Target) -> Outcome:
    count = 8192
    shards = [publish_pb2.Shard(row_offset=n, col_offset=n, cols=1 + n) for n in range(count)]
    request = opening("strange-shards", 2 * count, 2 * count + 2, shards=shards)
    request.open.tables[0].rows = 2 * count
    answers = asked(
        target, PUBLISH, request, publish_pb2.PublishRequest(close=publish_pb2.PartClose(step=1, full=True))
    )
    return Outcome(f"a message of {request.ByteSize():,} bytes: {answers.outcome.said}")


@FAMILY.attack("4.4 MB that announce 300,000 tables")
def many_tables(target: Target) -> Outcome:
    tables = [table_of(f"t{n}", 1, 1) for n in range(300_000)]
    request = opening("strange-tables", tables=tables, shards=[])
    answers = asked(target, PUBLISH, request)
    return Outcome(f"a message of {request.ByteSize():,} bytes: {answers.outcome.said}")


@FAMILY.attack("30 opens with 15 MiB of unknown fields")
def unknown_fields(target: Target) -> Outcome:
    unknown = b"\xfa\x3f" + _varint(15 << 20) + bytes(15 << 20)

    def open_of(number: int) -> bytes:
        inner = opening(f"strange-{number}").open.SerializeToString() + unknown
        return b"\x0a" + _varint(len(inner)) + inner

    return at_once(target, PUBLISH, 30, open_of, 6)


@FAMILY.attack("60 unfinished messages of 15 MiB")
def unfinished_messages(target: Target) -> Outcome:
    with http2.Connection(target) as connection:
        size, piece, sent = 15 << 20, bytes(16_000), 0
        streams = [connection.begin(f"/deltasync.v1.{PUBLISH}") for _ in range(60)]
        for stream in streams:
            connection.data(stream, b"\0" + (size).to_bytes(4, "big"))
        deadline = time.monotonic() + target.seconds
        while time.monotonic() < deadline and sent < 60 * (size - len(piece)):
            for stream in streams:
                sent += connection.data_if_room(stream, piece)
            if not connection.take(0.01):
                break
        connection.take(2.0)
        return Outcome(f"{sent / 1e6:.0f} MB sent of {60 * size / 1e6:.0f}; {connection.told}")


@FAMILY.attack("500 replicas that never acknowledge")
def no_credit(target: Target) -> Outcome:
    answers, lock = Answers(), threading.Lock()
    with target.channels(10) as channels:
        streams = []
        for number in range(500):
            stream = Stream(target, channels[number % 10], SUBSCRIBE)
            stream.send(subscription(f"stranger-{number}", max_outstanding_bytes=2**62))
            streams.append(stream)
        deadline = time.monotonic() + target.seconds / 2
        with ThreadPoolExecutor(20) as pool:

            def first(stream: Any) -> None:
                for _ in stream.answers:
                    with lock:
                        answers.counts["answers"] += 1
                    return

            for future in [pool.submit(first, stream) for stream in streams]:
                error: Any = future.exception(timeout=30)
                if error:
                    answers.refused(error)
        time.sleep(max(0.0, deadline - time.monotonic()))
    return answers.outcome


@FAMILY.attack("chunks of 1 MiB for a cut that never ends")
def unsealed_parts(target: Target) -> Outcome:
    answers, rows, dim = Answers(), 200_000, 250

    def requests() -> Iterator[Any]:
        yield opening("strange-parts", rows, dim, world_size=2)
        each = full_part(1, 1000, dim, 1.0).part.rows[0].rows
        deadline = time.monotonic() + target.seconds
        for first in range(0, rows, 1000):
            ids = b"".join((first + row).to_bytes(8, "little") for row in range(1000))
            sent = tables_pb2.TableRows(rows=tables_pb2.Rows(ids=ids, values=each.values))
            yield publish_pb2.PublishRequest(chunk=publish_pb2.PartChunk(step=1, rows=sent))
            if time.monotonic() > deadline:
                return

    with target.channel() as channel:
        answers.take(target.streams(channel, PUBLISH, requests()))
    return answers.outcome


@FAMILY.attack("2,000 replica names that appear and vanish")
def replica_names(target: Target) -> Outcome:
    answers = Answers()
    with target.channels(4) as channels, ThreadPoolExecutor(8) as pool:

        def attack(number: int) -> None:
            stream = Stream(target, channels[number % 4], SUBSCRIBE)
            stream.send(subscription(f"stranger-{number:05}", CONSUMER, max_outstanding_bytes=1))
            try:
                next(stream.answers)
                answers.add("let in")
            except Exception as error:  # noqa: BLE001  # counted
                answers.refused(error)  # type: ignore[arg-type]
            stream.answers.cancel()
            stream.end()

        list(pool.map(attack, range(2000)))
    return answers.outcome


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])
