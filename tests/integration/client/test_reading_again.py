"""A verification reads all rows of a replica again, and reports how each table compares."""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.fleet import (
    ITEM,
    USER,
    Recorder,
    Trainer,
    admin_of,
    checked_ack,
    follow,
    in_small_steps,
    lost,
    wait_for_lag,
    wait_until_in_sync,
    without_sweep,
)
from tests.support.server import RunningService
from tests.support.wire import ReplicaStream

from deltasync.base.errors import Contradiction, NotFound, ServiceUnavailable
from deltasync.client import Position, Release
from deltasync.client.targets.checksums import TargetChecksums
from deltasync.client.targets.target import ReadableTarget, Written
from deltasync.consumers.consumer import ReplicaVerification
from deltasync.core.policy import Policy
from deltasync.core.value_types import ValueType
from deltasync.wire.messages import position_from_message

POLICIES = {"top": Policy(top_k=0.5, value_type=ValueType.INT8)}
CONSUMERS = ["top", "predictors"]
NOT_KNOWN = "its checksum differs; the rows that differ are unknown"


class Watched(TargetChecksums):
    """Checksums of four rows at a time that record "step", "sweep" and "release"; the third step waits."""

    def __init__(self, target: ReadableTarget) -> None:
        super().__init__(target, block_rows=4, read_seconds=0.0)
        self.reads = list[str]()
        self.third, self.go_on = threading.Event(), threading.Event()

    def read_again(self, question: int) -> int:
        self.reads.append("step")
        if self.reads.count("step") == 3:
            self.third.set()
            assert self.go_on.wait(20)
        return super().read_again(question)

    def after(self, release: Release, written: Written | None = None) -> dict[str, int]:
        self.reads.append("release")
        return super().after(release, written)

    def look(self) -> dict[str, int]:
        self.reads.append("sweep")
        return super().look()


@contextmanager
def watched(service: RunningService, target: Recorder) -> Iterator[Watched]:
    made = list[Watched]()

    def make(target: ReadableTarget) -> Watched:
        made.append(Watched(target))
        return made[-1]

    with follow(service, "predictors", "a", target, make):
        yield made[0]


def verified(service: RunningService, consumer: str = "predictors") -> dict[str, dict[str, Any]]:
    found = admin_of(service).verify_replica(consumer, "a", timeout_seconds=20)
    return {each["table"]: each for each in found["tables"]}


def statuses(tables: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: table["status"] for name, table in tables.items()}


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_a_verification_names_a_damaged_table_which_is_repaired(
    service: RunningService, caplog: pytest.LogCaptureFixture, consumer: str
) -> None:
    caplog.set_level(logging.INFO, "deltasync.events")
    target = Recorder()
    with Trainer(service.grpc) as trainer, follow(service, consumer, "a", target, without_sweep):
        head = trainer.publish_all()
        wait_until_in_sync(service, consumer, head)
        before = verified(service, consumer)
        assert statuses(before) == {"user": "equal", "item": "equal"}
        assert {name: table["rows"] for name, table in before.items()} == {"user": USER.rows, "item": ITEM.rows}
        assert all(table["held"] == table["checksum"] for table in before.values())

        target.tables["user"][7, 3] += 1
        found = verified(service, consumer)
        assert statuses(found) == {"user": "differs", "item": "equal"}
        assert found["user"]["reason"] == NOT_KNOWN
        assert found["user"]["checksum"] == before["user"]["checksum"] != found["user"]["held"]

        wait_until_in_sync(service, consumer, head)
        assert statuses(verified(service, consumer)) == {"user": "equal", "item": "equal"}
        value_type = ValueType.INT8 if consumer == "top" else ValueType.FP32
        assert target.bytes() == trainer.expected(value_type)
    events = [each.getMessage() for each in caplog.records if each.name == "deltasync.events"]
    said = [each for each in events if "replica verified" in each]
    assert ["equal those sent" in each for each in said] == [True, False, True]
    assert f"table user: {NOT_KNOWN}" in said[1]


@pytest.mark.parametrize("row", [0, USER.rows - 1])
def test_a_row_that_is_repaired_during_a_verification_has_differed(service: RunningService, row: int) -> None:
    target = Recorder()
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "a", target, in_small_steps):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        target.tables["user"][row, 3] += 1
        found = verified(service)
        assert statuses(found) == {"user": "differs", "item": "equal"}


def test_releases_continue_during_a_verification(service: RunningService) -> None:
    target = Recorder()
    with Trainer(service.grpc) as trainer, watched(service, target) as checksums:
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        with ThreadPoolExecutor() as asking:
            found: Future[dict[str, dict[str, Any]]] = asking.submit(verified, service)
            assert checksums.third.wait(20)
            head = trainer.change(5)
            checksums.go_on.set()
            assert statuses(found.result(20)) == {"user": "equal", "item": "equal"}
        wait_until_in_sync(service, "predictors", head)
        last_step = len(checksums.reads) - checksums.reads[::-1].index("step")
        assert "release" in checksums.reads[checksums.reads.index("step") : last_step]
        assert target.bytes() == trainer.expected()


def test_a_verification_reads_every_row_once_without_pauses(service: RunningService) -> None:
    with Trainer(service.grpc) as trainer, watched(service, Recorder()) as checksums:
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        checksums.go_on.set()
        verified(service)
        first, steps = checksums.reads.index("step"), -(-USER.rows // 4) + -(-ITEM.rows // 4)
        assert checksums.reads[first:].count("step") == steps
        assert checksums.reads[first : first + 2 * steps - 1] == ["step", *["sweep", "step"] * (steps - 1)]


def test_a_replica_without_rows_or_away_cannot_be_verified(service: RunningService) -> None:
    with pytest.raises(NotFound, match="consumer 'nobody'"):
        verified(service, "nobody")
    with pytest.raises(NotFound, match="'predictors' has no replica 'a'"):
        verified(service)
    with Trainer(service.grpc) as trainer, lost(follow(service, "predictors", "a", Recorder())):
        wait_for_lag(service, "predictors", lambda lag: bool(lag["replicas"]))
        with pytest.raises(Contradiction, match="has no rows yet"):
            verified(service)
        wait_until_in_sync(service, "predictors", trainer.publish_all())
    wait_for_lag(service, "predictors", lambda lag: not lag["replicas"][0]["connected"])
    with pytest.raises(Contradiction, match="is away: start it first"):
        verified(service)


@pytest.fixture
def stream(service: RunningService) -> Iterator[ReplicaStream]:
    """A replica that has applied the first release, and says nothing by itself."""
    with Trainer(service.grpc) as trainer, ReplicaStream(service.grpc, replica="a") as opened:
        trainer.publish_all()
        hold_first(service, opened)
        yield opened


def hold_first(service: RunningService, stream: ReplicaStream) -> None:
    rows, end = stream.release()
    size = sum(len(each.ids) + len(each.values) for each in rows)
    position = position_from_message(end.position)
    stream.send(checked_ack(size, position, {each.slot: each.sum for each in end.sums}))
    wait_for_lag(service, "predictors", lambda lag: lag["offset"] == position.number)


def test_a_replica_that_disconnects_ends_its_verification(service: RunningService, stream: ReplicaStream) -> None:
    with ThreadPoolExecutor() as asking:
        found = asking.submit(verified, service)
        while not stream.until("progress").read_again:
            pass
        stream.end()
        with pytest.raises(ServiceUnavailable, match="disconnected while it read its rows"):
            found.result(20)


def test_a_restarted_service_verifies_from_the_first_row(tmp_path: Path) -> None:
    """A service that has started anew, or another that the model has moved to, asks nothing a second time."""
    target = Recorder()
    with RunningService(tmp_path / "data") as first, Trainer(first.grpc) as trainer:
        replica = follow(first, "predictors", "a", target, without_sweep)
        head = trainer.publish_all()
        wait_until_in_sync(first, "predictors", head)
        assert statuses(verified(first)) == {"user": "equal", "item": "equal"}
    with replica, RunningService(tmp_path / "data", grpc_port=int(first.grpc.rpartition(":")[2])) as second:
        wait_until_in_sync(second, "predictors", head)
        target.tables["user"][7, 3] += 1
        found = verified(second)
        assert statuses(found) == {"user": "differs", "item": "equal"}


def test_verification_numbers_are_unique() -> None:
    numbers = [each.ask() for each in [ReplicaVerification() for _ in range(100)] for _ in range(3)]
    assert len(set(numbers)) == 300
    assert all(0 < number < 2**63 for number in numbers)
    assert all(one < other for one, other in pairwise(numbers[:3]))


def test_concurrent_verifications_all_get_an_answer(service: RunningService) -> None:
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "a", Recorder()):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        with ThreadPoolExecutor() as asking:
            found = [asking.submit(verified, service) for _ in range(5)]
            assert all(set(statuses(each.result(20)).values()) == {"equal"} for each in found)


def test_an_unrequested_answer_is_refused(stream: ReplicaStream) -> None:
    answer = checked_ack(0, Position(), {})
    answer.ack.ClearField("applied")
    answer.ack.read_again = 1
    stream.send(answer)
    code, text = stream.refusal()
    assert (code, text) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "an ack has read_again 1, which the service did not send",
    )
