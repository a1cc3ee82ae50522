"""Releases, credit and acks, as a raw replica sees them."""

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tests.integration.api.conftest import publish_everything
from tests.support.fleet import admin_of
from tests.support.server import RunningService
from tests.support.state import lag_of, rows_of
from tests.support.wire import (
    ITEM,
    USER,
    RankStream,
    ReplicaStream,
    Stream,
    ack,
    part,
    pieces,
    random_rows,
    size_of,
)

from deltasync.api.acks import AHEAD
from deltasync.client import NumpyTarget, Subscriber, SubscriberOptions
from deltasync.core.position import Position
from deltasync.core.tables import Shard, TableSpec
from deltasync.v1 import subscribe_pb2
from deltasync.wire import row_messages as wire_rows
from deltasync.wire.messages import position_from_message

EVERYTHING = USER.rows * USER.row_bytes + ITEM.rows * ITEM.row_bytes


@pytest.fixture
def rank(running: RunningService) -> Iterator[RankStream]:
    """A rank that has published version 1."""
    with RankStream(running.grpc) as rank:
        assert publish_everything(rank, random_rows(0)).number == 1
        yield rank


def _every(seconds: float) -> pytest.MarkDecorator:
    """Have idle streams look for changes this often."""
    return pytest.mark.parametrize("running", [{"progress_seconds": seconds}], indirect=True, ids=[f"{seconds:g}"])


UNASKED, WATCHFUL = _every(1000.0), _every(0.01)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_rows, "CHUNK_BYTES", 130)  # Four rows, with their digests.


def publish(rank: RankStream, step: int, *ids: int) -> Position:
    rank.send(*part(step, [(0, list(ids), np.full((len(ids), 4), step, "<f4"))]))
    return rank.sealed()


def ids_of(rows: Any) -> list[int]:
    return [int(row) for each in rows for row in np.frombuffer(each.ids, "<i8")]


def offset_of(service: RunningService, replica: str) -> int:
    (line,) = (each for each in lag_of(service)["replicas"] if each["replica"] == replica)
    offset: int = line["offset"]
    return offset


def offset_reached(service: RunningService, replica: str, offset: int) -> None:
    """An ack is on its way for a moment; the test's timeout bounds the wait."""
    while offset_of(service, replica) != offset:
        pass


def test_a_new_replica_is_given_everything(running: RunningService, rank: RankStream) -> None:
    with ReplicaStream(running.grpc, replica="p1") as before:
        before.release()  # Sealed is not applied yet.
    with ReplicaStream(running.grpc) as replica:
        opened = replica.until("opened")
        assert opened.model == "clicks"
        assert (opened.resync, opened.reason) == (True, "the replica holds nothing")
        assert [table.name for table in opened.tables] == [USER.name, ITEM.name]
        rows, end = replica.release()
        assert len(ids_of(rows)) == end.rows == USER.rows + ITEM.rows
        assert size_of(rows) == EVERYTHING
        assert (end.position.version, end.step, end.step_end_unix_ns) == (1, 1, 1000)
        assert opened.head == end.position


def test_a_replica_goes_on_from_what_it_holds(running: RunningService, rank: RankStream) -> None:
    first = publish(rank, 2, 3, 4)
    second = publish(rank, 3, 4, 9)
    with ReplicaStream(running.grpc, held=first) as replica:
        opened = replica.until("opened")
        assert (opened.resync, opened.reason) == (False, "the replica holds version 2")
        rows, end = replica.release()
        assert (ids_of(rows), end.position.version) == ([4, 9], 3)
    with ReplicaStream(running.grpc, held=second) as replica:
        replica.until("opened")
        rows, end = replica.release()  # It lacks nothing, and is asked to show that.
        assert (ids_of(rows), end.position.version) == ([], 3)
        publish(rank, 4, 1)
        rows, end = replica.release()
        assert (ids_of(rows), end.position.version) == ([1], 4)


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (lambda _: Position("0" * 32, 1), "the replica holds history 000"),
        (lambda head: Position(head.history, 7), "holds version 7, but the newest is 2"),
        (lambda _: Position("", 2), "holds history ,"),
    ],
    ids=["another history", "from the future", "no history"],
)
def test_a_position_that_cannot_be_continued_is_never_guessed_at(
    running: RunningService, rank: RankStream, claim: Any, said: str
) -> None:
    head = publish(rank, 2, 3)
    with ReplicaStream(running.grpc, held=claim(head)) as replica:
        opened = replica.until("opened")
        assert opened.resync
        assert said in opened.reason
        rows, end = replica.release()
        assert end.rows == USER.rows + ITEM.rows
        # What it claims to hold is not an offset, and does no harm where lag is computed.
        assert offset_of(running, "p0") == 0
        assert running.get("/metrics")[0] == 200
        replica.send(ack(size_of(rows), head))
        offset_reached(running, "p0", 2)


def test_a_position_from_the_future_is_not_believed_later_either(
    running: RunningService, rank: RankStream
) -> None:
    head = publish(rank, 2, 3)
    with ReplicaStream(running.grpc, held=Position(head.history, 3)) as replica:
        assert replica.until("opened").resync
        publish(rank, 3, 4)
        rows, _ = replica.release()
        assert len(ids_of(rows)) == USER.rows + ITEM.rows


def test_a_replica_that_comes_before_the_model_waits(running: RunningService) -> None:
    with ReplicaStream(running.grpc) as replica:
        progress = replica.until("progress")
        assert (progress.head.history, progress.head.version) == ("", 0)
        with RankStream(running.grpc) as rank:
            publish_everything(rank, random_rows(0))
            assert replica.until("opened").head.history
            assert replica.release()[1].position.version == 1


def test_a_new_table_sends_replicas_to_reconnect(running: RunningService, rank: RankStream) -> None:
    target = NumpyTarget()
    options = SubscriberOptions(service=running.grpc, consumer="predictors", replica="own")
    with ReplicaStream(running.grpc) as replica, Subscriber(options, target) as own:
        replica.release()
        own.wait_for(1, 20)
        extra = TableSpec("extra", 2, 1)
        newer = RankStream(running.grpc, run="run-2", started=2, tables=[extra], shards=[Shard.whole(extra)])
        with newer:
            newer.opened()
            newer.send(*part(2, [(0, [0, 1], np.ones((2, 1), "<f4"))], full=True))
            code, details = replica.refusal()
            assert code is grpc.StatusCode.ABORTED
            assert "has other tables or another format now" in details
            newer.sealed()
            own.wait_for(2, 20)
    assert target.tables["extra"].shape == (2, 1)


def test_what_changes_meanwhile_comes_once_with_its_last_value(running: RunningService, rank: RankStream) -> None:
    """A replica that stays behind costs no more than one that keeps up: nothing is queued for it."""
    with ReplicaStream(running.grpc, budget=1) as replica:
        rows: list[Any] = []
        sent = 0
        for step in range(2, 30):
            publish(rank, step, 7)
        while True:
            message = replica.until("chunk", "release_end")
            if isinstance(message, subscribe_pb2.ReleaseEnd):
                if message.position.version == 29:
                    break
                rows.clear()
                continue
            rows.append(message.rows.rows)
            sent += size_of([message.rows])
            replica.send(ack(sent))
        assert ids_of(rows) == [7]
        assert np.frombuffer(rows[0].values, "<f4").tolist() == [29] * 4


@pytest.mark.parametrize(
    ("budget", "kinds"),
    [
        (0, ["release", "release"]),
        (EVERYTHING, ["release", "release"]),
        (EVERYTHING - 1, ["chunk", "chunk", "release_end", "release"]),
    ],
    ids=str,
)
def test_a_release_is_one_message_where_it_fits(
    running: RunningService, rank: RankStream, budget: int, kinds: list[str]
) -> None:
    found, received = list[str](), 0
    with ReplicaStream(running.grpc, budget=budget) as replica:
        replica.until("opened")
        for ends in (1, 2):
            while sum(each.startswith("release") for each in found) < ends:
                message = Stream.receive(replica)
                found.append(message.WhichOneof("message"))
                received += size_of(each.chunk.rows for each in pieces(message) if each.HasField("chunk"))
                replica.send(ack(received))
            publish(rank, 1 + ends, 3)
    assert found == kinds
    assert received == EVERYTHING + USER.row_bytes


@pytest.mark.parametrize(("budget", "at_most"), [(1, 96), (95, 96), (150, 96), (200, 192), (700, 700)])
@pytest.mark.usefixtures("small_chunks")
def test_no_more_is_sent_than_the_budget_allows(
    running: RunningService, rank: RankStream, budget: int, at_most: int
) -> None:
    """Or a single chunk, which may be larger. Another replica's releases show that the service had its chance."""
    with ReplicaStream(running.grpc, budget=budget) as replica, ReplicaStream(running.grpc, replica="q") as other:
        first = replica.until("chunk")
        for step in range(2, 6):
            publish(rank, step, step)
            other.release()
        replica.end()
        outstanding = size_of([first.rows]) + sum(
            size_of([message.chunk.rows]) for message in replica.rest() if message.HasField("chunk")
        )
        assert 0 < outstanding <= at_most


@pytest.mark.usefixtures("small_chunks")
def test_a_replica_that_never_acks_slows_only_itself(running: RunningService, rank: RankStream) -> None:
    with (
        ReplicaStream(running.grpc, replica="slow", budget=250) as slow,
        ReplicaStream(running.grpc, replica="fast") as fast,
    ):
        fast.release()
        outstanding = size_of(slow.until("chunk").rows for _ in range(2))
        for step in range(2, 12):
            head = publish(rank, step, step)
            rows, end = fast.release()
            assert (ids_of(rows), end.position.version) == ([step], head.number)
            fast.send(ack(0, head))
        offset_reached(running, "fast", 11)
        # It was never given more than its budget while the other had ten releases.
        assert outstanding <= 250
        lag = lag_of(running)
        assert lag["offset"] == 0
        assert lag["lag"]["versions"] == 11
        slow.send(ack(outstanding))
        while isinstance(message := slow.until("chunk", "release_end"), subscribe_pb2.ReleaseChunk):
            outstanding += size_of([message.rows])
            slow.send(ack(outstanding))
        rows, end = slow.release() if message.position.version < 11 else ([], message)
        assert end.position.version == 11


@pytest.mark.parametrize("budget", [1, 610, 4096, 1 << 20])
def test_a_subscriber_of_any_budget_gets_all(running: RunningService, rank: RankStream, budget: int) -> None:
    """It acks in time: credit that it keeps for itself must never be what the service waits for."""
    target, rows = NumpyTarget(), random_rows(0)
    options = SubscriberOptions(service=running.grpc, consumer="predictors", max_outstanding_bytes=budget)
    with Subscriber(options, target) as replica:
        replica.wait_for(1, 20)
        # A small chunk and then one that fits the budget by itself only.
        rows[0][3], rows[1][:] = 1, 2
        rank.send(*part(2, [(0, [3], rows[0][[3]]), (1, range(30), rows[1])]))
        replica.wait_for(2, 20)
    for table, expected in zip((USER, ITEM), rows, strict=True):
        np.testing.assert_array_equal(target.tables[table.name], expected)


@UNASKED
def test_what_comes_while_it_is_busy_comes_as_one_release(running: RunningService, rank: RankStream) -> None:
    """It has four to apply: what changes meanwhile waits, and goes to it once, however often it has changed."""
    with ReplicaStream(running.grpc) as replica:
        first, *_ = be_busy(rank, replica)
        for step in range(5, 10):
            publish(rank, step, 1, step)
        replica.send(whole_ack(first))
        end = end_without_news(replica, AHEAD)
        assert (end.rows, end.position.version) == (6, 9)


@WATCHFUL
def test_a_busy_replica_is_told_that_there_is_more(running: RunningService, rank: RankStream) -> None:
    with ReplicaStream(running.grpc) as replica:
        first, *_ = be_busy(rank, replica)
        publish(rank, 5, 5)
        while not (progress := replica.until("progress")).behind_ns:
            pass
        assert progress.head.version == 4
        replica.send(whole_ack(first))
        rows, end = replica.release()
        assert (ids_of(rows), end.position.version) == ([5], 5)


def be_busy(rank: RankStream, replica: ReplicaStream) -> list[Position]:
    """Have a replica take as many releases as it may without an ack; their positions."""
    ends = [replica.release()[1]]
    for step in range(2, AHEAD + 1):
        publish(rank, step, step)
        ends.append(replica.release()[1])
    return [position_from_message(end.position) for end in ends]


def end_without_news(replica: ReplicaStream, held: int) -> subscribe_pb2.ReleaseEnd:
    """The end of the next release, before which nobody says that there is no news for who holds that version: the
    replica would look into what it holds.
    """
    while (message := replica.receive()).WhichOneof("message") != "release_end":
        assert message.progress.head.version != held
    end: subscribe_pb2.ReleaseEnd = message.release_end
    return end


def whole_ack(applied: Position) -> subscribe_pb2.SubscribeRequest:
    """Of a replica that has taken everything, and then one row with each version."""
    return ack(EVERYTHING + (applied.number - 1) * USER.row_bytes, applied)


def wrong_ack(applied: Position) -> subscribe_pb2.SubscribeRequest:
    """Of one that holds other rows of its first table."""
    message = whole_ack(applied)
    message.ack.sums.add(slot=0, sum=1)
    return message


@UNASKED
def test_a_pause_tells_a_damaged_replica_nothing_that_it_would_look_into(
    running: RunningService, rank: RankStream
) -> None:
    """It would find the same again, and tell so, as fast as both sides can."""
    with ReplicaStream(running.grpc) as replica:
        _, end = replica.release()
        admin_of(running).pause_consumer("predictors")
        publish(rank, 2, 2)
        replica.send(*[wrong_ack(position_from_message(end.position))] * 3)
        while (line := lag_of(running)["replicas"][0])["state"] != "damaged":
            pass
        assert line["waits_for"] == "the end of the pause"
        admin_of(running).resume_consumer("predictors")
        end = end_without_news(replica, end.position.version)
        repaired = ack(EVERYTHING + USER.rows * USER.row_bytes, position_from_message(end.position))
        repaired.ack.sums.extend(end.sums)
        replica.send(repaired)
        while lag_of(running)["replicas"][0]["state"] == "damaged":
            pass
        assert [each["event"] for each in running.get_json("/events")].count("replica_damaged") == 1


def test_who_was_sent_the_newest_waits_for_no_end_of_a_pause(running: RunningService, rank: RankStream) -> None:
    with ReplicaStream(running.grpc) as replica:
        _, end = replica.release()
        admin_of(running).pause_consumer("predictors")
        replica.send(wrong_ack(position_from_message(end.position)))
        rows, _ = replica.release()
        (line,) = lag_of(running)["replicas"]
        assert (len(ids_of(rows)), line["state"], line["waits_for"]) == (USER.rows, "damaged", "")


@UNASKED
def test_a_newer_stream_of_a_replica_replaces_the_older_at_once(running: RunningService, rank: RankStream) -> None:
    with ReplicaStream(running.grpc) as older:
        older.release()
        with ReplicaStream(running.grpc) as newer:
            newer.release()
            code, details = older.refusal()
            assert code is grpc.StatusCode.ABORTED
            assert "a newer stream of replica 'p0'" in details
            (line,) = running.get_json("/consumers")[:1]
            assert (line["fleet"], line["connected"]) == (1, 1)


def test_a_replica_that_vanishes_is_away(running: RunningService, rank: RankStream) -> None:
    with ReplicaStream(running.grpc, replica="gone") as replica:
        _, end = replica.release()
        assert running.get_json("/consumers/predictors")["state"] == "behind"
        replica.send(ack(0, Position(end.position.history, 1)))
        offset_reached(running, "gone", 1)
    while running.get_json("/consumers/predictors")["state"] != "away":
        pass
    assert rows_of(running).keys() == {USER.name, ITEM.name}
