"""A service that is away: it costs the trainer lag, and neither memory, threads, descriptors, nor many lines."""

import contextlib
import gc
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest
from tests.support.fleet import TABLES, WAIT, follow, wait_until_in_sync
from tests.support.server import RunningService

from deltasync.client import (
    Endpoint,
    InvalidInput,
    NumpyTarget,
    Part,
    Publisher,
    PublisherOptions,
    RowBatch,
    Shard,
)
from deltasync.client.connection import Tuning

TABLE = TABLES[0]


@contextmanager
def refusing() -> Iterator[tuple[str, Callable[[], None]]]:
    """A port at which nobody listens; and what ends that."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    yield f"127.0.0.1:{address[1]}", lambda: None


@contextmanager
def never_accepting() -> Iterator[tuple[str, Callable[[], None]]]:
    """The system takes connections, and nobody answers on them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}", listener.close


@contextmanager
def never_answering() -> Iterator[tuple[str, Callable[[], None]]]:
    """Somebody takes what is sent, and never answers."""
    taken: list[socket.socket] = []

    def take() -> None:
        with contextlib.suppress(OSError):  # It is shut down.
            while True:
                taken.append(listener.accept()[0])
                if len(taken) > 2:
                    taken.pop(0).close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=take)
        thread.start()

        def stop() -> None:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            listener.close()
            while taken:
                taken.pop().close()

        yield f"127.0.0.1:{listener.getsockname()[1]}", stop


def whole(step: int) -> Part:
    rows = RowBatch(Shard.whole(TABLE), np.arange(TABLE.rows), np.full((TABLE.rows, TABLE.dim), step, "<f4"))
    return Part(step=step, step_end_unix_ns=time.time_ns(), rows=[rows], full=True)


@pytest.mark.parametrize(
    "away",
    [
        refusing,
        pytest.param(never_accepting, marks=pytest.mark.nightly),
        pytest.param(never_answering, marks=pytest.mark.nightly),
    ],
    ids=lambda each: each.__name__,
)
def test_a_service_that_is_away_costs_a_trainer_only_lag(
    away: Callable[[], AbstractContextManager[tuple[str, Callable[[], None]]]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with away() as (address, end):
        endpoint = Endpoint(address, timeout_seconds=0.3)
        options = PublisherOptions(service=endpoint, model="clicks", run="r", run_started_unix_ns=1)
        tuning = Tuning(pauses=lambda: repeat(0.01))
        with Publisher(options, [TABLE], [Shard.whole(TABLE)], tuning=tuning) as publisher:
            assert (publisher.connection.connected, publisher.connection.attempts) == (False, 0)
            part = whole(1)
            waiting = publisher.publish(part)
            _attempts(publisher, 10)
            before = _held()
            _attempts(publisher, 60)
            _becomes(lambda: _held() <= before + 4)  # What ends may take a moment.
            with pytest.raises(InvalidInput, match="wait for the future of the previous part"):
                publisher.publish(whole(2))
            assert publisher.connection.last_error.startswith(address)
            assert not publisher.connection.connected
            assert len(_lines(caplog)) <= 2
            end()
            with RunningService(tmp_path / "data", grpc_port=int(address.rpartition(":")[2])) as service:
                assert waiting.result(WAIT).number == 1
                assert publisher.connection.connected
                assert (publisher.connection.attempts, "is connected again" in caplog.text) == (0, True)
                target = NumpyTarget()
                with follow(service, "predictors", "p", target):
                    wait_until_in_sync(service, "predictors", waiting.result())
                service.stop()
                _becomes(lambda: not publisher.connection.connected)  # Though no part is under way.
                assert publisher.connection.last_error
        assert publisher.connection.last_error == "the publisher is closed"
        gone = weakref.ref(part)
        del part, waiting
        gc.collect()
        assert gone() is None


def test_a_replica_that_has_lost_its_stream_says_so_before_it_tries_again(tmp_path: Path) -> None:
    with RunningService(tmp_path / "data") as service:
        hourly = Tuning(pauses=lambda: repeat(3600.0))
        with follow(service, "predictors", "p", NumpyTarget(), tuning=hourly) as replica:
            _becomes(lambda: replica.connection.connected)
            service.stop()
            _becomes(lambda: not replica.connection.connected)
            assert replica.connection.attempts == 1
            assert "it reconnects" in replica.readiness.reason


def _attempts(publisher: Publisher, count: int) -> None:
    _becomes(lambda: publisher.connection.attempts >= count)


def _held() -> int:
    """Threads and descriptors."""
    return threading.active_count() + len(os.listdir("/proc/self/fd"))


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name.startswith("deltasync.client")]


def _becomes(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)
