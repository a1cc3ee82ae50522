"""Cuts and runs, as the service takes them from raw streams."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import grpc
import numpy as np
import pytest
from tests.integration.api.conftest import publish_everything, published
from tests.support.command import deltasync
from tests.support.fleet import Trainer
from tests.support.server import RunningService
from tests.support.state import rows_of
from tests.support.waiting import wait_for
from tests.support.wire import (
    ITEM,
    TABLES,
    USER,
    WHOLE,
    RankStream,
    Stream,
    block,
    chunk,
    close,
    full_part,
    part,
    random_rows,
    whole_part,
)

from deltasync.core.position import Position
from deltasync.core.tables import Shard, TableSpec
from deltasync.v1 import publish_pb2, publish_pb2_grpc

REPLICATED = TableSpec("dense.bias", 3, 2)


def expect(service: RunningService, rows: list[np.ndarray]) -> None:
    found = rows_of(service)
    for table, expected in zip(TABLES, rows, strict=True):
        np.testing.assert_array_equal(found[table.name], expected, strict=True)


def refused(stream: RankStream, expected: grpc.StatusCode, said: str) -> None:
    code, details = stream.refusal()
    assert code is expected
    assert said in details


@contextmanager
def pair(service: RunningService, shards: list[list[Shard]], **fields: Any) -> Iterator[list[RankStream]]:
    """The streams of two ranks that hold such shards."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(RankStream(service.grpc, shards=held, world_size=2, rank=rank, **fields))
            for rank, held in enumerate(shards)
        ]


def head_of(service: RunningService) -> int:
    head: int = service.get_json("/consumers/predictors")["head"]
    return head


def test_shards_of_all_kinds_make_one_cut(running: RunningService) -> None:
    """User is split by rows, item by columns, and both ranks hold all of the bias."""
    tables = [USER, ITEM, REPLICATED]
    shards = [
        [Shard(USER, 0, 25, 0, 4), Shard(ITEM, 0, 30, 0, 2), Shard.whole(REPLICATED)],
        [Shard(USER, 25, 15, 0, 4), Shard(ITEM, 0, 30, 2, 4), Shard.whole(REPLICATED)],
    ]
    rows = random_rows(1, tables)
    with pair(running, shards, tables=tables) as (first, second):
        for step, version in ((10, 1), (20, 2)):
            for stream, held in ((first, shards[0]), (second, shards[1])):
                changes = [
                    (slot, np.arange(s.row_offset, s.row_offset + s.rows), block(rows[tables.index(s.table)], s))
                    for slot, s in enumerate(held)
                ]
                stream.send(*part(step, changes, full=True))
            if version == 1:
                assert not first.opened().continues
                second.opened()
            assert first.sealed() == second.sealed()
            assert head_of(running) == version
            found = rows_of(running)
            for table, expected in zip(tables, rows, strict=True):
                np.testing.assert_array_equal(found[table.name], expected, strict=True)
            rows = random_rows(2, tables)


def test_a_run_of_other_ranks_goes_on_with_the_same_rows(running: RunningService) -> None:
    """Two ranks split the users by rows; three ranks of the next run split them by columns."""
    rows, by_rows = random_rows(1), [[Shard(USER, 0, 25, 0, 4), WHOLE[1]], [Shard(USER, 25, 15, 0, 4)]]
    by_columns = [
        [Shard(USER, 0, 40, first, columns), Shard(ITEM, 10 * rank, 10, 0, 6)]
        for rank, (first, columns) in enumerate([(0, 2), (2, 1), (3, 1)])
    ]
    with pair(running, by_rows) as streams:
        for stream, held in zip(streams, by_rows, strict=True):
            stream.opened()
            stream.send(*full_part(1, rows, held))
        [head, _] = [stream.sealed() for stream in streams]
    rows[0][[3, 30]] = 7
    with ExitStack() as stack:
        later: dict[str, Any] = {"run": "run-2", "started": 2, "continues": head, "world_size": 3}
        streams = [
            stack.enter_context(RankStream(running.grpc, shards=held, rank=rank, **later))
            for rank, held in enumerate(by_columns)
        ]
        for stream, held in zip(streams, by_columns, strict=True):
            assert stream.opened().continues
            stream.send(*part(2, [(0, [3, 30], block(rows[0], held[0])[[3, 30]])]))
        assert {stream.sealed().number for stream in streams} == {2}
    expect(running, rows)


def test_a_whole_part_is_its_chunks_and_their_close(running: RunningService) -> None:
    rows, shards = random_rows(1), [[WHOLE[0]], [WHOLE[1]]]
    with pair(running, shards) as (first, second):
        first.opened(), second.opened()
        first.send(whole_part(1, [(0, range(USER.rows), rows[0])], full=True))
        second.send(*full_part(1, rows, shards[1]))
        assert first.sealed() == second.sealed()
        rows[0][[3, 7]] = 5
        first.send(whole_part(2, [(0, [3], rows[0][[3]]), (0, [7], rows[0][[7]])]))
        second.send(whole_part(2, []))
        assert first.sealed() == second.sealed()
    expect(running, rows)


def test_a_cut_is_visible_only_when_both_ranks_have_closed(running: RunningService) -> None:
    shards = [[Shard(USER, 0, 20, 0, 4), WHOLE[1]], [Shard(USER, 20, 20, 0, 4)]]
    rows = random_rows(1)
    with pair(running, shards) as (first, second):
        first.opened()
        second.opened()
        first.send(*full_part(1, rows, shards[0]))
        # The other rank's whole part but its close: once its stream is refused, the service has seen all of it.
        second.send(*full_part(1, rows, shards[1])[:-1])
        second.send(chunk(1, 0, [0], rows[0][:1]))
        assert second.refusal()[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert head_of(running) == 0
        with RankStream(running.grpc, shards=shards[1], world_size=2, rank=1) as again:
            again.send(*full_part(1, rows, shards[1]))
            again.opened()
            assert again.sealed().number == first.sealed().number == 1
    expect(running, rows)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_nothing_of_an_abandoned_cut_is_ever_visible(running: RunningService, world_size: int) -> None:
    """A run of three ranks ends in the middle of a cut; another of any size then publishes the same version."""
    old, new = random_rows(1), random_rows(2)
    cols = [[0, 2], [2, 1], [3, 1]]
    shards = [[Shard(USER, 0, 40, *cols[rank]), Shard(ITEM, 10 * rank, 10, 0, 6)] for rank in range(3)]
    for rank in (1, 2):
        with RankStream(running.grpc, shards=shards[rank], world_size=3, rank=rank) as stream:
            stream.opened()
            stream.send(*full_part(5, old, shards[rank])[:-1], chunk(5, 9, [0], old[0][:1]))
            stream.refusal()
    runs = {1: [WHOLE], 2: [[WHOLE[0]], [WHOLE[1]]], 3: shards}[world_size]
    streams = [
        RankStream(running.grpc, run="run-2", started=2, shards=held, world_size=world_size, rank=rank)
        for rank, held in enumerate(runs)
    ]
    for stream, held in zip(streams, runs, strict=True):
        stream.send(*full_part(5, new, held))
    for stream in streams:
        with stream:
            stream.opened()
            assert stream.sealed().number == 1
    expect(running, new)


def test_a_part_begun_anew_replaces_what_came_before(running: RunningService) -> None:
    """What a broken stream had sent of a part must not come through with the part's second try."""
    rows = random_rows(1)
    with RankStream(running.grpc) as stream:
        publish_everything(stream, rows)
        stream.send(
            chunk(2, 0, [1, 2], np.full((2, 4), 7, "<f4")), chunk(2, 0, [3], np.full((1, 4), np.nan, "<f4"))
        )
        stream.refusal()
    with RankStream(running.grpc) as stream:
        stream.opened()
        stream.send(*part(2, [(0, [1], np.full((1, 4), 8, "<f4"))]))
        assert stream.sealed().number == 2
    rows[0][1] = 8
    expect(running, rows)


def test_a_part_sent_again_gets_the_same_version(running: RunningService) -> None:
    """The answer to a close was lost, and the cut had been sealed."""
    rows = random_rows(1)
    first = published(running, rows)
    with RankStream(running.grpc) as again:
        assert again.opened().continues
        again.send(*full_part(1, rows, WHOLE))
        assert again.sealed() == first
        again.send(*part(2, []))
        assert again.sealed().number == 2
    assert head_of(running) == 2


def test_a_newer_run_takes_over_and_the_older_one_stays_out(running: RunningService) -> None:
    rows = random_rows(1)
    with RankStream(running.grpc, started=10) as older:
        publish_everything(older, random_rows(0))
        older.send(chunk(2, 0, [0], np.full((1, 4), 9, "<f4")))
        with RankStream(running.grpc, run="run-2", started=11) as newer:
            opened = newer.opened()
            assert not opened.continues
            assert "holds no version" in opened.reason
            older.send(close(2, 1))
            assert older.refusal()[0] is grpc.StatusCode.ABORTED
            with RankStream(running.grpc, started=10) as zombie:
                refused(zombie, grpc.StatusCode.FAILED_PRECONDITION, "run run-1 began before run run-2")
            newer.send(*full_part(1, rows, WHOLE))
            assert newer.sealed().number == 2
    expect(running, rows)


@pytest.mark.parametrize(
    ("claim", "yes", "said"),
    [
        (lambda head: head, True, "holds version 2, the newest one"),
        (lambda head: Position(head.history, 1), False, "holds version 1, the newest one is 2"),
        (lambda head: Position(head.history, 3), False, "the run holds version 3, the newest one is only 2"),
        (lambda _: Position("0" * 32, 2), False, "holds history 000"),
        (lambda _: None, False, "holds no version"),
    ],
)
def test_only_who_holds_the_head_continues(running: RunningService, claim: Any, yes: bool, said: str) -> None:
    rows = random_rows(1)
    with RankStream(running.grpc) as first:
        publish_everything(first, rows)
        first.send(*part(2, []))
        head = first.sealed()
    with RankStream(running.grpc, run="run-2", started=2, continues=claim(head)) as second:
        opened = second.opened()
        assert (opened.continues, opened.tables) == (yes, 2)
        assert said in opened.reason
        second.send(*part(3, [(0, [4], np.full((1, 4), 6, "<f4"))]))
        if yes:
            assert second.sealed().number == 3
            rows[0][4] = 6
        else:
            refused(second, grpc.StatusCode.DATA_LOSS, "publish every row first")
    expect(running, rows)


def test_a_run_may_bring_further_tables(running: RunningService) -> None:
    rows = random_rows(1)
    position = published(running, rows, tables=[USER], shards=[WHOLE[0]])
    with RankStream(running.grpc, run="run-2", started=2, continues=position) as second:
        assert second.opened().continues, "as far as there are tables"
        second.send(*part(2, [(1, np.arange(30), rows[1])]))
        assert second.sealed().number == 2
        second.send(*part(3, []))
        assert second.sealed().number == 3
    expect(running, rows)


def test_a_run_that_leaves_out_rows_of_a_new_table_publishes_every_row(running: RunningService) -> None:
    rows = random_rows(1)
    position = published(running, rows, tables=[USER], shards=[WHOLE[0]])
    with RankStream(running.grpc, run="run-2", started=2, continues=position) as second:
        second.opened()
        second.send(*part(2, [(1, np.arange(29), rows[1][:29])]))
        said = f"29 of its 30 rows of table {ITEM.name!r} that were never published"
        refused(second, grpc.StatusCode.DATA_LOSS, said)
    with RankStream(running.grpc, run="run-2", started=2, continues=position) as second:
        second.opened()
        second.send(*full_part(2, rows, WHOLE))
        assert second.sealed().number == 2
    expect(running, rows)


def test_a_run_may_do_without_a_table(running: RunningService) -> None:
    rows = random_rows(1)
    published(running, rows)
    rows[0] += 1
    with RankStream(running.grpc, run="run-2", started=2, tables=[USER], shards=[WHOLE[0]]) as second:
        assert not second.opened().continues
        second.send(*full_part(2, rows, [WHOLE[0]]))
        assert second.sealed().number == 2
        second.send(*part(3, []))
        assert second.sealed().number == 3
    expect(running, rows)


def test_a_run_of_the_future_locks_nobody_out(running: RunningService) -> None:
    with RankStream(running.grpc, run="run-2", started=time.time_ns() + 10**12) as stream:
        refused(stream, grpc.StatusCode.FAILED_PRECONDITION, "ahead of the service's clock")
    assert published(running, random_rows(0)).number == 1


def test_a_rank_of_a_restored_service_publishes_everything_once(running: RunningService) -> None:
    """What it claims to hold is from the future until then, and no longer after."""
    rows = random_rows(1)
    head = published(running, rows)
    with RankStream(running.grpc, continues=Position(head.history, 9)) as stream:
        assert not stream.opened().continues
        stream.send(*full_part(2, rows, WHOLE))
        assert stream.sealed().number == 2
        stream.send(*part(3, []))
        assert stream.sealed().number == 3


def finishes(service: RunningService) -> None:
    with Trainer(service.grpc) as trainer:
        trainer.publish_all()


def aborts(service: RunningService) -> None:
    trainer = Trainer(service.grpc)
    trainer.publish_all()
    trainer.publisher.abort()


def fails(service: RunningService) -> None:
    trainer = Trainer(service.grpc)
    with suppress(RuntimeError), trainer.publisher:
        trainer.publish_all()
        raise RuntimeError


def is_killed(service: RunningService) -> None:
    code = (
        "import os, signal; from tests.support.fleet import Trainer; "
        f"Trainer({service.grpc!r}).publish_all(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("end", "finished"), [(finishes, True), (aborts, False), (fails, False), (is_killed, False)]
)
def test_a_trainer_that_has_finished_is_told_from_one_that_is_lost(
    running: RunningService, end: Callable[[RunningService], None], finished: bool
) -> None:
    end(running)
    (rank,) = wait_for(lambda: [each for each in running.get_json("/trainers") if not each["connected"]])
    left = "it has finished" if finished else "its stream ended without a goodbye"
    assert (rank["finished"], rank["left"]) == (finished, left)
    status = running.get_json("/status")
    assert [(each["connected"], each["finished"]) for each in status["models"]] == [(0, int(finished))]
    assert {each["text"] for each in status["events"] if each["event"] == "rank_left"} == {left}
    samples = {
        state: int(state == ("finished" if finished else "away")) for state in ("connected", "away", "finished")
    }
    for state, count in samples.items():
        name = f'deltasync_publishing_ranks{{model="clicks",state="{state}"}}'
        assert f"\n{name} {count}.0\n" in running.get("/metrics")[1]
    code, shown, _ = deltasync("status", "--service", running.http)
    assert (code, "rank 0 of clicks has been away for" in shown) == (0, not finished)
    titles, line = next(each for each in shown.split("\n\n") if each.startswith("model ")).splitlines()[:2]
    at = titles.index("finished") + len("finished") - 1
    assert line[at] == str(int(finished))


def test_a_rank_that_comes_back_has_not_finished(running: RunningService) -> None:
    finishes(running)
    with Trainer(running.grpc) as trainer:
        trainer.publish_all()
        assert [(each["connected"], each["finished"]) for each in running.get_json("/trainers")] == [(True, False)]


def test_a_goodbye_comes_last(running: RunningService) -> None:
    goodbye = publish_pb2.PublishRequest(goodbye=publish_pb2.PublishGoodbye())
    with RankStream(running.grpc) as rank:
        rank.opened()
        rank.send(goodbye)
        assert rank.rest() == []  # The service has ended the stream.
    with Stream(running.grpc, lambda channel: publish_pb2_grpc.PublishServiceStub(channel).Publish) as stream:
        stream.send(goodbye)
        code, said = stream.refusal()
    assert (code, "expected one open message" in said) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    with RankStream(running.grpc) as rank:
        rank.opened()
        rank.send(chunk(1, 0, [0], np.zeros((1, 4), "<f4")))
        rank.send(goodbye)
        code, said = rank.refusal()
    assert (code, "goodbye within the part of step 1" in said) == (grpc.StatusCode.INVALID_ARGUMENT, True)
