"""The client library against a real service, and against one that misbehaves."""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import numpy as np
import pytest
from tests.support.fleet import lost
from tests.support.ports import free_port
from tests.support.server import RunningService
from tests.support.state import lag_of
from tests.support.wire import TABLES, USER, WHOLE, block, random_rows

from deltasync.base.errors import Damaged, InvalidInput, NotFound, ResyncRequired, ServiceUnavailable
from deltasync.client import (
    CallbackTarget,
    NumpyTarget,
    Part,
    Position,
    Publisher,
    PublisherOptions,
    Release,
    RowBatch,
    Shard,
    Subscriber,
    SubscriberOptions,
)
from deltasync.v1 import publish_pb2, publish_pb2_grpc

WAIT = 20
NOTHING = np.array([], np.int64)


def publisher(address: str, shards: list[Shard] = WHOLE, **fields: Any) -> Publisher:
    run: dict[str, Any] = {"service": address, "model": "clicks", "run": "r", "run_started_unix_ns": 1}
    return Publisher(PublisherOptions(**run | fields), TABLES, shards)


def part(step: int, rows: list[np.ndarray], *ids: Any) -> Part:
    changed = [RowBatch(WHOLE[slot], np.asarray(each), rows[slot][each]) for slot, each in enumerate(ids)]
    return Part(step=step, step_end_unix_ns=step, rows=changed)


def full(step: int, rows: list[np.ndarray], shards: list[Shard] = WHOLE) -> Part:
    """All rows of some shards, one of each table."""
    every = [RowBatch(s, np.arange(s.rows), block(rows[slot], s)) for slot, s in enumerate(shards)]
    return Part(step=step, step_end_unix_ns=step, rows=every, full=True)


def subscriber(address: str, target: Any, **fields: Any) -> Subscriber:
    return Subscriber(
        SubscriberOptions(**{"service": address, "consumer": "predictors", "replica": "p0"} | fields), target
    )


def same(target: NumpyTarget, rows: list[np.ndarray]) -> bool:
    with target.reading() as reading:
        return all(
            reading.tables[table.name].tobytes() == each.tobytes()
            for table, each in zip(TABLES, rows, strict=True)
        )


def test_a_run_that_does_not_continue_is_told_to_publish_everything(running: RunningService) -> None:
    rows, target = random_rows(0), NumpyTarget()
    with publisher(running.grpc) as trainer, subscriber(running.grpc, target) as replica:
        with pytest.raises(ResyncRequired, match="publish every row: nothing is published yet"):
            trainer.publish(part(1, rows, [3])).result(WAIT)
        head = trainer.publish(full(2, rows)).result(WAIT)
        rows[0][3] = 1
        assert trainer.publish(part(3, rows, [3])).result(WAIT) == Position(head.history, 2)
        replica.wait_for(2, WAIT)
        assert same(target, rows)
    # The same with a run that continues from a checkpoint, and with one whose checkpoint is too old.
    with publisher(running.grpc, run="s", run_started_unix_ns=2, continues=Position(head.history, 2)) as trainer:
        assert trainer.publish(part(4, rows, [3])).result(WAIT).number == 3
    with publisher(running.grpc, run="t", run_started_unix_ns=3, continues=head) as trainer:
        with pytest.raises(ResyncRequired, match="that the service names: the run holds version 1"):
            trainer.publish(part(5, rows, [3])).result(WAIT)
        assert trainer.publish(full(5, rows)).result(WAIT).number == 4


COLUMN = Shard(TABLES[0], 0, 1, 0, TABLES[0].dim)


@pytest.mark.parametrize(
    ("shard", "ids", "values", "said"),
    [
        (COLUMN, NOTHING, np.zeros((0, 4), "<f4"), "expected one of this publisher's 2 shards"),
        (WHOLE[0], np.arange(2), np.zeros((2, 3), "<f4"), r"values of shape \(2, 3\) and type float32"),
        (WHOLE[0], np.arange(2), np.zeros((1, 4), "<f4"), r"expected \(2, 4\)"),
        (WHOLE[0], np.arange(2), np.zeros((2, 4), "<f2"), "type float16, expected .* and float32"),
        (WHOLE[0], np.array([3.2]), np.ones((1, 4), "<f4"), "ids of type float64, expected int64"),
        (WHOLE[0], np.array([True]), np.ones((1, 4), "<f4"), "ids of type bool, expected int64"),
        (WHOLE[0], [1], np.ones((1, 4), "<f4"), "ids of type list, expected int64"),
        (WHOLE[0], np.array([1]), [[1.0] * 4], "values of type list, expected a NumPy array"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_they_are_sent(
    shard: Shard, ids: Any, values: Any, said: str
) -> None:
    with publisher("localhost:1") as trainer, pytest.raises(InvalidInput, match=said):
        trainer.publish(Part(step=1, step_end_unix_ns=1, rows=[RowBatch(shard, ids, values)]))


def test_a_shard_that_is_announced_twice_is_refused() -> None:
    with pytest.raises(InvalidInput, match="appears twice: pass each shard once"):
        publisher("localhost:1", [*WHOLE, WHOLE[0]])


def test_a_part_the_service_refuses_fails_for_good_and_the_next_is_taken(running: RunningService) -> None:
    rows = random_rows(0)
    with publisher(running.grpc) as trainer:
        trainer.publish(full(5, rows)).result(WAIT)
        bad = [row.copy() for row in rows]
        bad[0][7, 2] = np.nan
        with pytest.raises(InvalidInput, match="row 7 holds nan in column 2"):
            trainer.publish(part(6, bad, [7])).result(WAIT)
        for step in (4, 5):
            with pytest.raises(InvalidInput, match=f"part of step {step}: step 5 is sealed already"):
                trainer.publish(part(step, rows, [7]))
        with pytest.raises(InvalidInput, match="row id 40 is outside"):
            trainer.publish(
                Part(step=6, step_end_unix_ns=1, rows=[RowBatch(WHOLE[0], np.array([40]), rows[0][:1])])
            ).result(WAIT)
        assert trainer.publish(part(7, rows, [7])).result(WAIT).number == 2


def test_a_part_is_sent_while_the_publishers_thread_is_busy(running: RunningService) -> None:
    """A thread that has waited for a cut may publish the next part at once."""
    rows, target, awake = random_rows(0), NumpyTarget(), threading.Event()
    with (
        publisher(running.grpc, world_size=2) as first,
        publisher(running.grpc, rank=1, world_size=2) as second,
        subscriber(running.grpc, target) as replica,
    ):
        sealed = first.publish(full(1, rows))
        sealed.add_done_callback(lambda _: awake.wait(WAIT))  # In the publisher's thread, once the cut is sealed.
        second.publish(full(1, rows)).result(WAIT)
        head = sealed.result(WAIT)
        rows[0][3] = 1
        done = first.publish(part(2, rows, [3]))
        second.publish(part(2, rows, [3])).result(WAIT)
        replica.wait_for(2, WAIT)
        assert same(target, rows)
        assert not done.done()
        awake.set()
        assert done.result(WAIT) == Position(head.history, 2)


def test_one_part_is_under_way_at_a_time(running: RunningService) -> None:
    rows = random_rows(0)
    with publisher(running.grpc, world_size=2) as lone:
        waiting = lone.publish(full(1, rows))
        with pytest.raises(InvalidInput, match="part of step 2: wait for the future of the previous part first"):
            lone.publish(full(2, rows))
    with pytest.raises(ServiceUnavailable, match="part of step 1: closed before it was sealed"):
        waiting.result(WAIT)
    with pytest.raises(ServiceUnavailable, match="part of step 2: the publisher is closed"):
        lone.publish(full(2, rows))


def test_a_part_that_is_damaged_where_it_comes_from_fails_for_good(running: RunningService) -> None:
    rows = random_rows(0)
    with publisher(running.grpc) as trainer:
        trainer.publish(full(1, rows)).result(WAIT)
        digested = RowBatch(WHOLE[0], np.array([3, 5]), rows[0][[3, 5]]).digested()
        digested.values.view(np.uint8)[1, 0] ^= 1
        changed = Part(step=2, step_end_unix_ns=2, rows=[digested])
        wanted = (
            "part of step 2: .*user.*: 1 of 2 rows do not match their digests, first row id 5: .*in this process"
        )
        with pytest.raises(Damaged, match=wanted):
            trainer.publish(changed).result(WAIT)
        assert trainer.publish(part(3, rows, [3])).result(WAIT).number == 2


def test_closing_at_once_never_hangs(running: RunningService) -> None:
    """Whatever the publisher's thread is just doing: its part would wait for a rank that never comes."""
    for _ in range(30):
        lone = publisher(running.grpc, world_size=2)
        waiting = lone.publish(full(1, random_rows(0)))
        lone.close()
        assert isinstance(waiting.exception(WAIT), ServiceUnavailable)


def test_clients_wait_for_a_service_and_go_on_with_the_next_one(tmp_path: Path) -> None:
    port, rows, target = free_port(), random_rows(0), NumpyTarget()
    resyncs: list[bool] = []

    def apply(release: Release) -> None:
        resyncs.append(release.resync)
        target.apply(release)

    address = f"127.0.0.1:{port}"
    with publisher(address) as trainer, subscriber(address, CallbackTarget(apply)) as replica:
        sealed = trainer.publish(full(1, rows))
        with RunningService(tmp_path / "first", grpc_port=port):
            history = sealed.result(WAIT).history
            replica.wait_for(1, WAIT)
        rows[0][5] = 5
        sealed = trainer.publish(part(2, rows, [5]))
        with RunningService(tmp_path / "first", grpc_port=port):
            assert sealed.result(WAIT) == Position(history, 2)
            replica.wait_for(2, WAIT)
            assert resyncs == [True, False]
            assert same(target, rows)
        # A service that has lost its folder: the trainer is told, and the replica starts from zero.
        rows[0][6] = 6
        sealed = trainer.publish(part(3, rows, [6]))
        with RunningService(tmp_path / "second", grpc_port=port):
            with pytest.raises(ResyncRequired):
                sealed.result(WAIT)
            rows = random_rows(1)
            again = trainer.publish(full(3, rows)).result(WAIT)
            assert again.number == 1
            assert again.history != history
            # It held version 2 of another history.
            while replica.held != again:
                replica.check()
            assert resyncs == [True, False, True]
            assert same(target, rows)


def test_an_unknown_consumer_stops_the_subscriber(running: RunningService) -> None:
    with subscriber(running.grpc, NumpyTarget(), consumer="nobody") as replica:
        with pytest.raises(NotFound, match="no consumer 'nobody'; consumers: predictors, probes"):
            replica.wait_for(1, WAIT)
        with pytest.raises(NotFound):
            replica.check()


def test_a_version_that_does_not_come_is_a_timeout(running: RunningService) -> None:
    with (
        subscriber(running.grpc, NumpyTarget()) as replica,
        pytest.raises(TimeoutError, match="replica 'p0' is at version 0, not 1"),
    ):
        replica.wait_for(1, 0.01)


def test_a_release_that_cannot_be_applied_is_not_acknowledged(running: RunningService) -> None:
    def broken(_: Release) -> None:
        raise MemoryError("no room")

    with publisher(running.grpc) as trainer, subscriber(running.grpc, CallbackTarget(broken)) as replica:
        trainer.publish(full(1, random_rows(0))).result(WAIT)
        with pytest.raises(MemoryError, match="no room"):
            replica.wait_for(1, WAIT)
        assert replica.held == Position()
    assert lag_of(running)["offset"] == 0


def test_rows_that_outlived_the_process_are_not_sent_again(running: RunningService) -> None:
    rows, taken = random_rows(0), list[Release]()
    with publisher(running.grpc) as trainer:
        held = trainer.publish(full(1, rows)).result(WAIT)
        trainer.publish(part(2, rows, [4, 5], [])).result(WAIT)
        with lost(subscriber(running.grpc, CallbackTarget(taken.append), held=held)) as replica:
            replica.wait_for(2, WAIT)
        replica.close()
        assert lag_of(running)["offset"] == 2
    (release,) = taken
    assert not release.resync
    assert [(rows.table, rows.ids.tolist()) for rows in release.rows] == [(USER, [4, 5])]
    assert (release.step, release.step_end_unix_ns, release.tables) == (2, 2, TABLES)
    with pytest.raises(ValueError, match="read-only"):
        release.rows[0].values[0] = 1


Requests: TypeAlias = Iterator[publish_pb2.PublishRequest]
Responses: TypeAlias = Iterator[publish_pb2.PublishResponse]
Answers: TypeAlias = Callable[[Requests], Responses]


@contextmanager
def misbehaving(answers: list[Answers]) -> Iterator[str]:
    """A service that treats its first, second … Publish stream in the given ways."""
    left = queue.SimpleQueue[Answers]()
    for answer in answers:
        left.put(answer)

    class Servicer(publish_pb2_grpc.PublishServiceServicer):
        def Publish(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
            return left.get_nowait()(request_iterator)

    server = grpc.server(ThreadPoolExecutor(4))
    publish_pb2_grpc.add_PublishServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()
    assert left.empty()


def opened() -> publish_pb2.PublishResponse:
    return publish_pb2.PublishResponse(opened=publish_pb2.PublishOpened(continues=True))


def sealed_at(version: int) -> publish_pb2.PublishResponse:
    sealed = publish_pb2.PublishResponse()
    sealed.sealed.position.version = version
    return sealed


def close_of(request: publish_pb2.PublishRequest) -> publish_pb2.PartClose | None:
    """The close that a request is, or ends with."""
    if request.HasField("part"):
        return request.part.close
    return request.close if request.HasField("close") else None


def test_a_part_is_sent_again_until_it_is_sealed() -> None:
    sent: list[int] = []

    def ends_at_once(requests: Requests) -> Responses:
        yield from ()

    def ends_after_the_open(requests: Requests) -> Responses:
        yield opened()

    def loses_the_answer(requests: Requests) -> Responses:
        yield opened()
        for request in requests:
            if close := close_of(request):
                sent.append(close.rows)
                return

    def behaves(requests: Requests) -> Responses:
        yield opened()
        for request in requests:
            if close := close_of(request):
                sent.append(close.rows)
                yield sealed_at(close.step)

    answers: list[Answers] = [ends_at_once, ends_after_the_open, loses_the_answer, behaves]
    with misbehaving(answers) as address, publisher(address) as trainer:
        assert trainer.publish(part(7, random_rows(0), [1, 2, 3])).result(WAIT).number == 7
        assert trainer.publish(part(8, random_rows(0), [1])).result(WAIT).number == 8
    assert sent == [3, 3, 1]


def test_close_wakes_a_thread_that_waits_for_a_version(running: RunningService) -> None:
    replica = subscriber(running.grpc, NumpyTarget())
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(replica.wait_for, 1)
        replica.close()
        assert isinstance(waiting.exception(WAIT), TimeoutError)
