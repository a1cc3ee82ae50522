"""Replicas show what they hold, and one that holds other rows is found, shown and repaired.

Checksums are kept at the cost of the rows that change, and with every release one more block of rows is read
again. A row that was changed behind the subscriber's back therefore is found when a new process takes up the
target, or once the blocks have come round to it, and is right again as soon as it is released.
"""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.fleet import (
    ITEM,
    USER,
    WAIT,
    Recorder,
    Trainer,
    as_sent,
    checked_ack,
    follow,
    wait_for_lag,
    wait_until_in_sync,
)
from tests.support.server import RunningService
from tests.support.wire import ReplicaStream, ack
from torch import nn

from deltasync.client import Position, Release
from deltasync.client.connection import Tuning
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.core.digests import checksum_of
from deltasync.core.policy import Policy
from deltasync.core.value_types import ValueType

POLICIES = {"top": Policy(top_k=0.5, value_type=ValueType.INT8)}
CONSUMERS = ["top", "predictors"]


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(USER.rows, USER.dim)
        self.item = nn.EmbeddingBag(ITEM.rows, ITEM.dim, dtype=torch.float16)


class TorchRecorder(TorchTarget):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.releases: list[Release] = []

    def apply(self, release: Release) -> None:
        super().apply(release)
        self.releases.append(release)

    def bytes(self) -> dict[str, bytes]:
        return {name: rows.numpy().tobytes() for name, rows in self.tables().items()}


def target_of(kind: str) -> Recorder | TorchRecorder:
    return Recorder() if kind == "numpy" else TorchRecorder(Bags())


def damage(target: Recorder | TorchRecorder, row: int) -> None:
    rows: Any = target.tables["user"] if isinstance(target, Recorder) else target.tables()["user"]
    rows[row, 3] += 1


def expected(trainer: Trainer, consumer: str) -> dict[str, bytes]:
    return trainer.expected(ValueType.INT8 if consumer == "top" else ValueType.FP32)


def damages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the service's log says of them."""
    said = [record for record in caplog.records if "differ from those sent in" in record.getMessage()]
    assert all(record.levelno == logging.ERROR for record in said)
    return [record.getMessage() for record in said if record.name == "deltasync.events"]


def damaged(consumer: str) -> str:
    return f"replica damaged: consumer={consumer} replica=a its rows differ from those sent in user"


@pytest.mark.parametrize(("kind", "consumer"), [("numpy", "predictors"), ("torch", "top")])
def test_the_next_release_of_a_damaged_row_repairs_it(
    service: RunningService, caplog: pytest.LogCaptureFixture, kind: str, consumer: str
) -> None:
    """Its table need not be sent for it."""
    target, unswept = target_of(kind), Tuning(sweeps=False)
    with Trainer(service.grpc) as trainer, follow(service, consumer, "a", target, tuning=unswept) as replica:
        wait_until_in_sync(service, consumer, trainer.publish_all())
        damage(target, 7)
        wait_until_in_sync(service, consumer, trainer.set(USER, 8, 1.5))
        assert target.bytes() != expected(trainer, consumer)
        begun = len(target.releases)
        lag = wait_until_in_sync(service, consumer, trainer.set(USER, 7, 2.5))
        replica.wait_for(Position(lag["history"], lag["offset"]), WAIT)
        assert target.bytes() == expected(trainer, consumer)
        assert [release.whole for release in target.releases[begun:]] == [frozenset()]
        assert lag["replicas"][0]["checked"]
        assert not damages(caplog)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_new_process_finds_any_row_that_was_changed(
    service: RunningService, trainer: Trainer, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    target = target_of(kind)
    with follow(service, "top", "a", target) as replica:
        wait_until_in_sync(service, "top", trainer.publish_all())
    damage(target, 7)
    with follow(service, "top", "a", target, held=replica.held):
        lag = wait_until_in_sync(service, "top", trainer.set(USER, 8, 1.5))
    assert target.bytes() == trainer.expected(ValueType.INT8)
    assert lag["damages"] == 1
    assert set(damages(caplog)) == {damaged("top")}


@pytest.mark.parametrize(("kind", "consumer"), [("numpy", "predictors"), ("torch", "top")])
def test_a_target_with_rows_of_an_earlier_process_is_not_damaged(
    service: RunningService, trainer: Trainer, caplog: pytest.LogCaptureFixture, kind: str, consumer: str
) -> None:
    target = target_of(kind)
    with follow(service, consumer, "a", target) as replica:
        wait_until_in_sync(service, consumer, trainer.publish_all())
    again = target
    if isinstance(target, TorchRecorder):
        with target.reading() as reading:
            again = TorchRecorder(reading.module)
    with follow(service, consumer, "a", again, held=replica.held):
        lag = wait_until_in_sync(service, consumer, trainer.change(3))
    assert again.bytes() == expected(trainer, consumer)
    assert damages(caplog) == []
    assert not any(release.whole for release in again.releases)
    assert lag["replicas"][0]["checked"]


class Forgetful(Recorder):
    """Loses a row of each of its first releases."""

    def __init__(self, lossy: int, table: str = "user") -> None:
        super().__init__()
        self._lossy, self._table = lossy, table

    def apply(self, release: Release) -> None:
        super().apply(release)
        if len(self.releases) <= self._lossy:
            self.tables[self._table][5] = 0


@pytest.mark.parametrize("service", [{"progress_seconds": 0.01}], indirect=True, ids=["repaired often"])
@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("lossy", [2])
def test_a_first_release_that_arrives_damaged_is_repaired_too(
    service: RunningService,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    consumer: str,
    lossy: int,
) -> None:
    """Again and again, while the target goes on losing rows; and no longer."""
    monkeypatch.setattr("deltasync.api.acks._PAUSE_SECONDS", 0.01)
    target = Forgetful(lossy)
    with Trainer(service.grpc) as trainer, follow(service, consumer, "a", target):
        lag = wait_until_in_sync(service, consumer, trainer.publish_all())
        assert target.bytes() == expected(trainer, consumer)
        assert [release.whole for release in target.releases[1:]] == lossy * [{"user"}]
        assert len(damages(caplog)) == lossy
        assert lag["replicas"][0]["checked"]


def test_a_damaged_replica_touches_no_other(
    service: RunningService, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, sound = Recorder(), Recorder()
    with follow(service, "top", "damaged", damaged), follow(service, "top", "sound", sound):
        wait_until_in_sync(service, "top", trainer.publish_all(), replicas=2)
        damage(damaged, 7)
        for step in range(4):  # Until the blocks have come round.
            wait_until_in_sync(service, "top", trainer.set(USER, 8, 1.5 + step))
    assert not any(release.whole for release in sound.releases)
    assert sound.bytes() == damaged.bytes() == trainer.expected(ValueType.INT8)
    assert len(damages(caplog)) == 1


class Raw:
    """A replica that says whatever a test has it say; its releases are kept by number."""

    def __init__(self, stream: ReplicaStream) -> None:
        self._stream = stream
        self.received_bytes = 0

    def take(self) -> tuple[Position, dict[int, int], list[int]]:
        """The next release: its position, the right checksums, and the slots that it holds whole."""
        rows, end = self._stream.release()
        self.received_bytes += sum(len(each.ids) + len(each.values) for each in rows)
        position = Position(end.position.history, end.position.version)
        return position, {each.slot: each.sum for each in end.sums}, list(end.whole)

    def say(self, position: Position, checksums: dict[int, int]) -> None:
        self._stream.send(checked_ack(self.received_bytes, position, checksums))

    def says_nothing_of_rows(self, position: Position) -> None:
        self._stream.send(ack(self.received_bytes, position))


@pytest.fixture
def raw(service: RunningService) -> Iterator[Raw]:
    with ReplicaStream(service.grpc, consumer="top", replica="raw") as stream:
        yield Raw(stream)


def test_a_damaged_replica_is_shown_and_does_not_advance(service: RunningService, raw: Raw) -> None:
    with Trainer(service.grpc) as trainer:
        trainer.publish_all()
        first, right, _ = raw.take()
        raw.say(first, right)
        lag = wait_for_lag(service, "top", lambda lag: lag["offset"] == first.number)
        assert lag["state"] == "in sync"
        trainer.change(5, [USER])
        second, right, whole = raw.take()
        assert whole == []
        raw.say(second, {0: right[0] ^ 1, 1: right[1]})
        lag = wait_for_lag(service, "top", lambda lag: lag["state"] == "damaged")
        assert lag["replicas"][0]["damaged"] == ["user"]
        assert lag["replicas"][0]["offset"] == lag["offset"] == first.number
        assert lag["reason"] == "rows differ from those sent, and the service sends them again: raw (user)"
        repair, right, whole = raw.take()
        assert (repair, whole) == (second, [0])
        # It is damaged until it has said that it is not.
        lag = service.get_json("/consumers/top")
        assert (lag["state"], lag["offset"]) == ("damaged", first.number)
        raw.say(repair, right)
        lag = wait_for_lag(service, "top", lambda lag: lag["offset"] == second.number)
        assert lag["state"] != "damaged"
        assert lag["replicas"][0]["damaged"] == []
        assert lag["replicas"][0]["checked"]


def test_checksums_that_are_missing_later_count(service: RunningService, trainer: Trainer, raw: Raw) -> None:
    def lag_at(position: Position) -> dict[str, Any]:
        return wait_for_lag(
            service, "top", lambda lag: lag["offset"] == position.number and not lag["lag"]["versions"]
        )

    trainer.publish_all()
    position, sums, _ = raw.take()
    raw.say(position, sums)
    assert lag_at(position)["state"] == "in sync"
    trainer.set(USER, 3, 1.0)
    position, sums, _ = raw.take()
    raw.says_nothing_of_rows(position)
    assert lag_at(position)["state"] == "delivered"
    trainer.set(USER, 3, 2.0)
    position, sums, _ = raw.take()
    raw.say(position, {0: sums[0]})
    lag = lag_at(position)
    assert (lag["state"], lag["replicas"][0]["unbound"]) == ("partial", ["item"])


def test_checksums_are_of_what_values_stand_for(service: RunningService, trainer: Trainer) -> None:
    """So that a client in another language can find them too."""
    trainer.publish_all()
    with ReplicaStream(service.grpc, consumer="top", replica="raw") as stream:
        _, sums, _ = Raw(stream).take()
    held = [as_sent(table, trainer.rows[table.name], ValueType.INT8) for table in trainer.tables]
    assert sums == {slot: checksum_of(np.arange(len(rows)), rows) for slot, rows in enumerate(held)}
