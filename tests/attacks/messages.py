"""Messages that attacks begin with."""

import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from tests.attacks.attack import Answers, Outcome
from tests.attacks.target import CONSUMER, Target

from deltasync.v1 import publish_pb2, subscribe_pb2, tables_pb2

PUBLISH, SUBSCRIBE = "PublishService/Publish", "SubscribeService/Subscribe"


def table_of(name: str, rows: int, dim: int) -> tables_pb2.Table:
    value_type, kind = tables_pb2.VALUE_TYPE_FP32, tables_pb2.TABLE_KIND_EMBEDDING
    return tables_pb2.Table(name=name, rows=rows, dim=dim, value_type=value_type, kind=kind)


def opening(
    model: str, rows: int = 1000, dim: int = 16, *, table: str = "t", run: str = "strange", **fields: Any
) -> publish_pb2.PublishRequest:
    """The open of a rank that holds a table whole."""
    spec = table_of(table, rows, dim)
    wanted: dict[str, Any] = {
        "model": model,
        "run": run,
        "run_started_unix_ns": time.time_ns(),
        "world_size": 1,
        "tables": [spec],
        "shards": [publish_pb2.Shard(rows=rows, cols=dim)],
    } | fields
    return publish_pb2.PublishRequest(open=publish_pb2.PublishOpen(**wanted))


def full_part(step: int, rows: int, dim: int, value: float) -> publish_pb2.PublishRequest:
    """All rows of one table, each number the same."""
    values = np.full((rows, dim), value, np.float32).tobytes()
    sent = tables_pb2.TableRows(rows=tables_pb2.Rows(ids=np.arange(rows).tobytes(), values=values))
    close = publish_pb2.PartClose(step=step, rows=rows, step_end_unix_ns=time.time_ns(), full=True)
    return publish_pb2.PublishRequest(part=publish_pb2.WholePart(rows=[sent], close=close))


def subscription(replica: str, consumer: str = CONSUMER, **fields: Any) -> subscribe_pb2.SubscribeRequest:
    return subscribe_pb2.SubscribeRequest(
        open=subscribe_pb2.SubscribeOpen(consumer=consumer, replica=replica, **fields)
    )


class Stream:
    """A stream whose messages are sent one by one."""

    def __init__(self, target: Target, channel: grpc.Channel, method: str) -> None:
        self._requests: queue.Queue[Any] = queue.Queue(1000)
        self.answers = target.streams(channel, method, self._sent())

    def send(self, *messages: Any) -> None:
        for message in messages:
            self._requests.put(message, timeout=30)

    def end(self) -> None:
        self._requests.put(None)

    def _sent(self) -> Iterator[Any]:
        while (message := self._requests.get()) is not None:
            yield message


def ask(target: Target, channel: grpc.Channel, answers: Answers, method: str, *messages: Any) -> None:
    """A stream of these messages, to its end."""
    stream = Stream(target, channel, method)
    stream.send(*messages)
    stream.end()
    answers.take(stream.answers)


def asked(target: Target, method: str, *messages: Any) -> Answers:
    """What is answered to one stream, on a connection of its own."""
    answers = Answers()
    with target.channel() as channel:
        ask(target, channel, answers, method, *messages)
    return answers


def at_once(
    target: Target, method: str, count: int, message_of: Callable[[int], Any], connections: int = 4
) -> Outcome:
    """So many streams of one message, several at a time, each on a connection of its own."""
    answers = Answers()
    with target.channels(connections) as channels, ThreadPoolExecutor(connections) as pool:
        each = [(channels[number % connections], number) for number in range(count)]
        list(pool.map(lambda one: ask(target, one[0], answers, method, message_of(one[1])), each))
    return answers.outcome
