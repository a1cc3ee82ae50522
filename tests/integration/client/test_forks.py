"""Processes that fork: gunicorn with --preload, data loaders, notebooks, `multiprocessing`.

The parent's streams go on, whatever arrives meanwhile. In the child nothing claims to follow the service.
"""

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from tests.support.fleet import USER, Trainer
from tests.support.forked_child import answers_in_a_fork, error_of
from tests.support.programs import run_program
from tests.support.server import RunningService
from tests.support.wire import rows_message

from deltasync.client import (
    NumpyTarget,
    Publisher,
    PublisherOptions,
    Shard,
    Subscriber,
    SubscriberOptions,
)
from deltasync.client.targets.local import Gate
from deltasync.core.table_form import TableForm
from deltasync.v1 import subscribe_pb2, tables_pb2
from deltasync.wire.messages import form_to_message

POLICIES: dict[str, Any] = {}
WAIT = 20.0
FORKS = 60

_FORKS_UNDER_LOAD = """
import os, sys
import numpy as np
from deltasync.client import *

table = TableSpec("user", 20_000, 16)
options = PublisherOptions(service=sys.argv[1], model="clicks", run="r", run_started_unix_ns=1)
publisher = Publisher(options, [table], [Shard.whole(table)])
target = NumpyTarget()
replica = Subscriber(SubscriberOptions(service=sys.argv[1], consumer="predictors", replica="a"), target)
forks = step = 0
while forks < int(sys.argv[2]):
    step += 1
    values = np.full((table.rows, table.dim), step, np.float32)
    rows = [RowBatch.of_table(table, np.arange(table.rows), values)]
    sealing = publisher.publish(Part(step=step, step_end_unix_ns=1, rows=rows, full=step == 1))
    while not sealing.done() or replica.version.number < step - 1:  # A release is on its way all the time.
        if not os.fork():
            os._exit(0)
        os.wait()
        forks += 1
        replica.check()
    head = sealing.result()
replica.wait_for(head, 30)
assert np.all(target.tables["user"] == step)
print(replica.connection.connections, publisher.connection.connections)
publisher.close()
replica.close()
"""


def test_streams_outlive_forks_while_rows_arrive(service: RunningService) -> None:
    done = run_program(sys.executable, "-c", _FORKS_UNDER_LOAD, service.grpc, str(FORKS))
    assert done.stdout == "1 1\n", done.stderr


def test_a_child_says_that_nothing_follows_the_service_there(service: RunningService) -> None:
    target = NumpyTarget()
    options = SubscriberOptions(service=service.grpc, consumer="predictors", replica="a")
    with Trainer(service.grpc) as trainer, Subscriber(options, target) as replica:
        replica.wait_for(trainer.publish_all(), WAIT)
        replica.wait_until_ready(WAIT)

        def ask() -> dict[str, Any]:
            answers = {
                "ready": replica.ready,
                "reason": replica.readiness.reason,
                "connected": replica.connection.connected,
                "publisher connected": trainer.publisher.connection.connected,
                "check": error_of(replica.check),
                "wait_for": error_of(lambda: replica.wait_for(10**6)),
                "wait_until_ready": error_of(replica.wait_until_ready),
                "reading": error_of(lambda: target.reading().__enter__()),
                "publish": error_of(trainer.publish_all),
                "another": error_of(lambda: Subscriber(options, NumpyTarget())),
                "another publisher": error_of(
                    lambda: Publisher(
                        PublisherOptions(service=service.grpc, model="m", run="r", run_started_unix_ns=1),
                        [USER],
                        [Shard.whole(USER)],
                    )
                ),
            }
            trainer.publisher.close()
            replica.close()
            return answers

        answers = answers_in_a_fork(ask)
        flags = answers.pop("ready"), answers.pop("connected"), answers.pop("publisher connected")
        assert flags == (False, False, False)
        reason = answers.pop("reason")
        assert f"replica 'a' belongs to process {os.getpid()}" in reason
        for name in ("check", "wait_for", "wait_until_ready"):
            assert answers.pop(name) == f"ServiceUnavailable: {reason}"
        for name in ("reading", "publish", "another", "another publisher"):
            assert "forked" in answers.pop(name), name
        assert not answers
        replica.wait_for(trainer.change(3), WAIT)
        assert replica.ready
        assert (replica.connection.connections, trainer.publisher.connection.connections) == (1, 1)


def _work(_: int) -> int:
    return os.getpid()


def test_a_pool_of_forked_workers_ends_and_the_parent_goes_on(service: RunningService) -> None:
    """Workers end as Python's own do, with what they have copied of clients."""
    options = SubscriberOptions(service=service.grpc, consumer="predictors", replica="a")
    with Trainer(service.grpc) as trainer, Subscriber(options, NumpyTarget()) as replica:
        replica.wait_for(trainer.publish_all(), WAIT)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert os.getpid() not in pool.map(_work, range(4))
            pool.close()
            pool.join()
        replica.wait_for(trainer.change(3), WAIT)


def test_a_child_forked_while_a_release_is_written_does_not_wait_for_it() -> None:
    gate = Gate()
    with gate.writing():
        assert (
            "forked" in answers_in_a_fork(lambda: {"error": error_of(lambda: gate.reading().__enter__())})["error"]
        )
    with gate.reading():
        pass


def test_a_child_forked_inside_of_a_reading_leaves_it_without_the_lock() -> None:
    gate, locked, over = Gate(), threading.Event(), threading.Event()

    def hold_the_lock() -> None:
        with gate._lock:
            locked.set()
            over.wait()

    reading = gate.reading()
    reading.__enter__()
    thread = threading.Thread(target=hold_the_lock)
    thread.start()
    locked.wait()
    assert answers_in_a_fork(lambda: {"left": reading.__exit__(None, None, None)}) == {"left": False}
    over.set()
    thread.join()
    reading.__exit__(None, None, None)


Responses = Iterator[bytes]


def opened() -> bytes:
    message = subscribe_pb2.SubscribeOpened(
        model="clicks", model_history="h", resync=True, mode=tables_pb2.MODE_EMBEDDINGS
    )
    message.tables.append(form_to_message(TableForm.unchanged(USER)))
    return subscribe_pb2.SubscribeResponse(opened=message).SerializeToString()


def release(rows: int, slot: int = 0) -> Responses:
    """The chunk of one row, and the end of a release that has so many."""
    chunk = rows_message(slot, [1], np.ones((1, USER.dim), np.float32))
    yield subscribe_pb2.SubscribeResponse(chunk=subscribe_pb2.ReleaseChunk(rows=chunk)).SerializeToString()
    end = subscribe_pb2.ReleaseEnd(rows=rows, version=1)
    end.position.history, end.position.version = "h", 1
    yield subscribe_pb2.SubscribeResponse(release_end=end).SerializeToString()


def rows_are_missing() -> Responses:
    yield opened()
    yield from release(rows=2)


def no_such_table() -> Responses:
    yield opened()
    yield from release(rows=1, slot=7)


def no_message() -> Responses:
    yield b"\xff" * 9


def a_table_that_makes_no_sense() -> Responses:
    yield opened().replace(b"user", b"\x00ser")


def larger_than_any_message() -> Responses:
    yield opened() + bytes(17 << 20)


def an_error_of_its_own() -> Responses:
    yield opened()
    raise RuntimeError("a defect of the service")


@pytest.mark.parametrize(
    "damaged",
    [
        rows_are_missing,
        no_such_table,
        no_message,
        a_table_that_makes_no_sense,
        larger_than_any_message,
        an_error_of_its_own,
    ],
)
def test_a_stream_that_is_damaged_is_opened_again(damaged: Callable[[], Responses]) -> None:
    def whole() -> Responses:
        yield opened()
        yield from release(rows=1)

    with answering(damaged, whole) as address:
        target = NumpyTarget()
        with Subscriber(SubscriberOptions(service=address, consumer="predictors", replica="a"), target) as replica:
            replica.wait_for(1, WAIT)
            assert target.tables["user"][1].tolist() == [1.0] * USER.dim
            replica.check()


@contextmanager
def answering(*streams: Callable[[], Responses]) -> Iterator[str]:
    """A service that answers Subscribe streams so, one after the other; the last one stays open."""
    left, over = list(streams), threading.Event()

    def subscribe(requests: Any, context: grpc.ServicerContext) -> Responses:
        answer = left.pop(0)
        yield from answer()
        if not left:
            over.wait()

    name = subscribe_pb2.DESCRIPTOR.services_by_name["SubscribeService"].full_name
    handlers: dict[str, Any] = {"Subscribe": grpc.stream_stream_rpc_method_handler(subscribe)}
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        over.set()
        server.stop(None).wait()
