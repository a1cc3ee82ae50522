"""A verification reads all rows of a replica again, and reports how each table compares."""

import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.command import deltasync
from tests.support.fleet import (
    ITEM,
    USER,
    WAIT,
    Recorder,
    Trainer,
    admin_of,
    checked_ack,
    follow,
    lost,
    wait_for_lag,
    wait_until_in_sync,
)
from tests.support.server import RunningService
from tests.support.wire import ReplicaStream
from torch import nn

from deltasync.base.errors import Contradiction, NotFound, ServiceUnavailable
from deltasync.cli.status import BEHIND
from deltasync.client import CallbackTarget, Position, TableSpec
from deltasync.client.connection import Tuning
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.consumers.consumer import ReplicaVerification
from deltasync.core.policy import Policy
from deltasync.core.rows import Ids, Values
from deltasync.core.value_types import ValueType
from deltasync.wire.messages import position_from_message

POLICIES = {"top": Policy(top_k=0.5, value_type=ValueType.INT8)}
CONSUMERS = ["top", "predictors"]
NOT_KNOWN = "its checksum differs; the rows that differ are unknown"


# A replica reads rows only when asked, and answers after every four rows.
UNSWEPT, SLICES = Tuning(sweeps=False), Tuning(sweeps=False, read_seconds=0, read_rows=4)


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
    with Trainer(service.grpc) as trainer, follow(service, consumer, "a", target, tuning=UNSWEPT):
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
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "a", target, tuning=SLICES):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        target.tables["user"][row, 3] += 1
        found = verified(service)
        assert statuses(found) == {"user": "differs", "item": "equal"}


class Pausing(Recorder):
    """Pauses at the third block that is read after `armed` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False
        self.blocks, self.begun, self.go = 0, threading.Event(), threading.Event()

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        self.blocks += self.armed
        if self.blocks == 3:
            self.begun.set()
            assert self.go.wait(WAIT)
        return super().read(table, ids)


def test_a_replica_applies_releases_while_it_reads_all_rows_again(service: RunningService) -> None:
    target = Pausing()
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "a", target, tuning=SLICES):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        target.armed = True
        with ThreadPoolExecutor() as asking:
            found = asking.submit(admin_of(service).verify_replica, "predictors", "a", timeout_seconds=WAIT)
            assert target.begun.wait(WAIT)
            head = trainer.change(5)
            target.go.set()
            assert {each["status"] for each in found.result(WAIT)["tables"]} == {"equal"}
            assert found.result()["version"] == head.number
        assert target.bytes() == trainer.expected()
        # No block is read twice. Two blocks are read to learn which tables the target keeps.
        assert target.blocks <= -(-USER.rows // 4) + -(-ITEM.rows // 4) + 2


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


def test_a_row_that_was_damaged_before_the_service_came_back_is_found(tmp_path: Path) -> None:
    """A service that has started anew, or another that the model has moved to, asks nothing a second time."""
    target = Recorder()
    with RunningService(tmp_path / "data") as first, Trainer(first.grpc) as trainer:
        replica = follow(first, "predictors", "a", target, tuning=UNSWEPT)
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


def verify(service: RunningService, *arguments: str) -> tuple[int, str, str]:
    return deltasync("verify", "predictors", "--service", service.http, *arguments, token="secret")  # noqa: S106


def test_the_command_names_the_replica_and_table_that_differ(service: RunningService, trainer: Trainer) -> None:
    code, _, said = verify(service)
    assert (code, "consumer 'predictors' has no replicas" in said) == (1, True)
    good, bad = Recorder(), Recorder()
    with (
        follow(service, "predictors", "good", good),
        follow(service, "predictors", "bad", bad, tuning=UNSWEPT),
    ):
        position = trainer.publish_all()
        wait_until_in_sync(service, "predictors", position, replicas=2)
        code, shown, said = verify(service)
        assert (code, shown.count(" equal ")) == (0, 4)
        assert said.splitlines() == [f"replica {name} is reading its rows again" for name in ("bad", "good")]
        bad.tables["user"][7, 0] += 1
        code, shown, _ = verify(service)
        assert (code, shown.count(" equal "), shown.count(" differs ")) == (BEHIND, 3, 1)
        assert "bad " in next(line for line in shown.splitlines() if "differs" in line)
        wait_until_in_sync(service, "predictors", position, replicas=2)
        assert verify(service, "--replica", "bad")[0] == 0
    with follow(service, "predictors", "looks", Recorder(), guest=True) as guest:
        guest.wait_for(position, WAIT)
        assert "has no replicas" in verify(service)[2]  # Of guests nobody is asked.


def test_a_replica_that_shows_nothing_hides_no_other(service: RunningService, trainer: Trainer) -> None:
    module = nn.Module()
    module.user = nn.EmbeddingBag(USER.rows, USER.dim)
    position = trainer.publish_all()
    with lost(follow(service, "predictors", "away", Recorder())) as away:
        away.wait_for(position, WAIT)
    with (
        follow(service, "predictors", "good", Recorder()) as good,
        follow(service, "predictors", "plain", CallbackTarget(lambda _: None)) as plain,
        follow(service, "predictors", "part", TorchTarget(module, leave_out=["item"])) as part,
    ):
        for each in (good, plain, part):
            each.wait_for(position, WAIT)
        wait_for_lag(service, "predictors", lambda lag: [each["offset"] for each in lag["replicas"]] == 4 * [1])
        code, shown, _ = verify(service, "--json")
        found = json.loads(shown)
        assert (code, {(each["replica"], each["table"]): each["status"] for each in found}) == (
            BEHIND,
            {
                ("away", ""): "not shown",
                ("good", "user"): "equal",
                ("good", "item"): "equal",
                ("part", "user"): "equal",
                ("part", "item"): "not held",
                ("plain", "user"): "not shown",
                ("plain", "item"): "not shown",
            },
        )
        assert all(bool(each["held"]) == (each["status"] == "equal") for each in found)
        why = {each["replica"]: each["reason"] for each in found}
        assert "away for" in why["away"]
        code, shown, _ = verify(service)
        assert (code, shown.count("away for"), shown.count(" equal ")) == (BEHIND, 1, 3)
        assert "None" not in shown
        assert verify(service, "--replica", "good")[0] == 0
        for name in ("part", "plain", "old", "away", "nobody"):
            code, shown, _ = verify(service, "--replica", "good", "--replica", name)
            assert (code, shown.count(" equal ")) == (BEHIND, 3 if name == "part" else 2), name


def test_without_a_right_there_is_one_error(service: RunningService, trainer: Trainer) -> None:
    trainer.publish_all()
    code, shown, said = deltasync("verify", "predictors", "--replica", "a", "--service", service.http)
    assert (code, shown, "DELTASYNC_TOKEN" in said) == (1, "", True)
