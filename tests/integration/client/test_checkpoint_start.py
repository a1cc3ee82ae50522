"""Replicas that begin with a checkpoint: the service sends what has changed since, and they end as all others."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support.fleet import ITEM, TABLES, USER, WAIT, Recorder, Trainer, admin_of, follow, wait_until_in_sync
from tests.support.server import RunningService

from deltasync.client import CallbackTarget, Mode, Policy, Position, Release, TableSpec, ValueType

# All rows come with each release, so that who is up to date holds what the trainer has.
CHECKPOINTS = True
POLICIES = {
    "plain": Policy(),
    "ranked": Policy(top_k=10_000, min_interval_seconds=0.01),
    "int8": Policy(top_k=10_000, value_type=ValueType.INT8),
    "ids": Policy(mode=Mode.IDS),
}
SINCE = 3


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints")


def checkpoint(service: RunningService, trainer: Trainer) -> Position:
    """A checkpoint that has whatever releases of all consumers have."""
    head = trainer.publish_all()
    for name in POLICIES:
        with follow(service, name, "early", CallbackTarget(lambda _: None)) as each:
            each.wait_for(head, WAIT)
    admin_of(service).make_checkpoint("clicks")
    return head


def started(service: RunningService, consumer: str, url: str, head: Position) -> Recorder:
    """A new replica that is at the head."""
    target = Recorder()
    with follow(service, consumer, "new", target, checkpoints=url) as each:
        each.wait_for(head, WAIT)
        wait_until_in_sync(service, consumer, head)
    return target


def wire_bytes(target: Recorder) -> int:
    return sum(release.bytes for release in target.releases)


@pytest.mark.parametrize(("consumer", "changes"), [("plain", 0), ("ranked", 1), ("int8", 1)])
def test_only_what_has_changed_is_sent(service: RunningService, url: str, consumer: str, changes: int) -> None:
    with Trainer(service.grpc) as trainer:
        head = checkpoint(service, trainer)
        for _ in range(changes):
            head = trainer.change(SINCE)
        plain = Recorder()
        with follow(service, consumer, "other", plain) as each:
            each.wait_for(head, WAIT)
        target = started(service, consumer, url, head)
    assert target.bytes() == plain.bytes()
    assert [release.resync for release in target.releases] == [True]  # Nothing was served before all was there.
    assert target.releases[0].step == plain.releases[-1].step
    most = changes * SINCE * sum(table.row_bytes + 8 for table in TABLES)
    assert wire_bytes(target) <= most < wire_bytes(plain)
    if consumer != "int8":
        assert target.bytes() == trainer.expected()


def test_rows_that_were_deleted_since_are_gone(service: RunningService, trainer: Trainer, url: str) -> None:
    checkpoint(service, trainer)
    trainer.delete(USER, [1, 2])
    head = trainer.set(USER, 2, 7.0)
    target = started(service, "plain", url, head)
    assert target.bytes() == trainer.expected()
    assert not target.tables["user"][1].any()


def grown(service: RunningService) -> Trainer:
    return Trainer(service.grpc, [TableSpec("user", 90, 8), ITEM], run="later", started=2, seed=3)


def with_another_table(service: RunningService) -> Trainer:
    return Trainer(service.grpc, [*TABLES, TableSpec("more", 9, 4)], run="later", started=2, seed=3)


def remade(service: RunningService) -> Trainer:
    admin_of(service).delete_table("clicks", "user")
    return Trainer(service.grpc, [TableSpec("user", 60, 4), ITEM], run="later", started=2, seed=3)


@pytest.mark.parametrize(
    ("consumer", "later"), [("plain", grown), ("ranked", with_another_table), ("ranked", remade)]
)
def test_tables_may_have_changed_since(
    service: RunningService, url: str, consumer: str, later: Callable[[RunningService], Trainer]
) -> None:
    with Trainer(service.grpc) as trainer:
        checkpoint(service, trainer)
    with later(service) as trainer:
        trainer.publish_all()
        head = trainer.change(SINCE)
        target = started(service, consumer, url, head)
    assert target.bytes() == trainer.expected()


def test_who_finds_no_checkpoint_is_sent_everything(
    service: RunningService, trainer: Trainer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = started(service, "plain", url, trainer.publish_all())
    assert target.bytes() == trainer.expected()
    assert "the replica starts empty" in caplog.text


def test_who_is_sent_ids_alone_begins_with_nothing(service: RunningService, trainer: Trainer, url: str) -> None:
    releases = list[Release]()
    head = checkpoint(service, trainer)
    with follow(service, "ids", "new", CallbackTarget(releases.append), checkpoints=url) as each:
        each.wait_for(head, WAIT)
    assert sum(len(rows) for rows in releases[0].rows) == USER.rows + ITEM.rows


def test_a_checkpoint_that_is_damaged_is_passed_over(
    service: RunningService, trainer: Trainer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(service, trainer)
    head = trainer.change(SINCE)
    admin_of(service).make_checkpoint("clicks")
    data = sorted((Path(url) / "clicks" / "data").iterdir())
    newest = next(each for each in data if each.name[:29] == data[-1].name[:29])  # Rows come first.
    newest.write_bytes(b"?" + newest.read_bytes()[1:])
    with caplog.at_level(logging.INFO):
        target = started(service, "plain", url, head)
    assert target.bytes() == trainer.expected()
    assert "skipped a checkpoint" in caplog.text


def test_a_checkpoint_of_another_past_is_not_served(service: RunningService, url: str) -> None:
    with Trainer(service.grpc) as trainer:
        checkpoint(service, trainer)
    admin = admin_of(service)
    for each in admin.consumers():
        admin.delete_consumer(each["consumer"])
    admin.delete_model("clicks")
    admin.create_consumer("plain", "clicks", Policy())
    with Trainer(service.grpc, run="other", started=5, seed=9) as trainer:
        head = trainer.publish_all()
        target = started(service, "plain", url, head)
    assert target.bytes() == trainer.expected()
    assert np.array_equal(target.tables["item"], trainer.rows["item"])
