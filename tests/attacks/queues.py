"""Acks, as many as the service takes."""

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
from tests.attacks import http2
from tests.attacks.attack import Answers, Family, Outcome, until
from tests.attacks.messages import SUBSCRIBE, Stream, subscription
from tests.attacks.target import Target

from deltasync.v1 import subscribe_pb2, tables_pb2

FAMILY = Family()


def _acking(target: Target, replica: str, answers: Answers, pause_seconds: float) -> None:
    """A replica that takes everything, and repeats its newest ack for ever."""
    held: list[Any] = [None]
    got = threading.Event()

    def requests() -> Iterator[Any]:
        yield subscription(replica, max_outstanding_bytes=1 << 40)
        got.wait(target.seconds)
        for _ in until(target.seconds):
            yield held[0]
            time.sleep(pause_seconds)

    with target.channel() as channel:
        taken = 0
        try:
            for written in target.streams(channel, SUBSCRIBE, requests()):
                answer = subscribe_pb2.SubscribeResponse.FromString(written)
                end = answer.release.end if answer.HasField("release") else answer.release_end
                rows = [answer.chunk.rows] if answer.HasField("chunk") else answer.release.rows
                taken += sum(len(each.rows.ids) + len(each.rows.values) for each in rows)
                if end.HasField("position"):
                    ack = subscribe_pb2.Ack(received_bytes=taken, applied=end.position)
                    held[0] = subscribe_pb2.SubscribeRequest(ack=ack).SerializeToString()
                    got.set()
                    answers.add("releases")
        except grpc.RpcError as error:
            answers.refused(error)


def _replicas(target: Target, number: int, pause_seconds: float) -> Outcome:
    answers = Answers()
    threads = [
        threading.Thread(target=_acking, args=(target, f"stranger-{n}", answers, pause_seconds), daemon=True)
        for n in range(number)
    ]
    for thread in itertools.chain(threads):
        thread.start()
    for thread in threads:
        thread.join(target.seconds + 10)
    return answers.outcome


@FAMILY.attack("replicas that repeat one ack without a pause, on a slow disk", slow_disk=True)
def repeated_acks(target: Target) -> Outcome:
    with ExitStack() as stack:
        try:
            head = _head(target)
        except grpc.RpcError as error:
            answers = Answers()
            answers.refused(error)
            return answers.outcome
        opened = http2.message(subscription("stranger", held=head, max_outstanding_bytes=1))
        connections = [stack.enter_context(http2.Connection(target)) for _ in range(2)]
        streams = [(each, each.begin(f"/deltasync.v1.{SUBSCRIBE}")) for each in connections]
        for number, (connection, stream) in enumerate(streams):
            connection.data(stream, opened.replace(b"stranger", b"strang-%d" % number))
        ack = http2.message(subscribe_pb2.SubscribeRequest(ack=subscribe_pb2.Ack(applied=head, token=1)))
        many, sent = ack * (16_000 // len(ack)), 0
        for _ in until(target.seconds):
            for connection, stream in streams:
                sent += connection.data_if_room(stream, many) // len(ack)
                connection.take(0.001)
        return Outcome(f"{sent} acks; {connections[0].told}")


def _head(target: Target) -> tables_pb2.Position:
    """The newest position, as a replica is told it."""
    with target.channel() as channel:
        stream = Stream(target, channel, SUBSCRIBE)
        stream.send(subscription("stranger"))
        opened = subscribe_pb2.SubscribeResponse.FromString(next(stream.answers)).opened
        stream.answers.cancel()
        stream.end()
        return opened.head


@FAMILY.attack("40 replicas that ack every 50 ms, on a slow disk", slow_disk=True)
def many_acks(target: Target) -> Outcome:
    return _replicas(target, 40, 0.05)
