"""Whatever takes long with many rows says how far it is, from the start to the end."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fleet import ITEM, USER, Recorder, Trainer, admin_of, follow, in_small_steps, wait_until_in_sync
from tests.support.server import RunningService

from deltasync.base.progress import Progress

Told = dict[str, list[tuple[int, int]]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """How far each was, and of how much, by what it was."""
    told: Told = defaultdict(list)

    def note(progress: Progress, rows: int) -> None:
        progress._rows = rows
        told[progress._what].append((rows, progress._total))

    monkeypatch.setattr(Progress, "at", note)
    return told


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    with RunningService(tmp_path / "data", checkpoints=str(tmp_path / "at")) as service:
        yield service


def check(told: Told, words: str) -> None:
    """It has come to its end, and never went back."""
    (those,) = [found for what, found in told.items() if words in what]
    assert those == sorted(those)
    assert those[-1][0] == those[-1][1] > 0


def test_a_copy_of_a_checkpoint(service: RunningService, told: Told) -> None:
    with Trainer(service.grpc) as trainer:
        trainer.publish_all()
        admin_of(service).make_checkpoint("clicks")
        check(told, "copying a checkpoint")


def test_a_replica_that_reads_its_rows_again(service: RunningService, told: Told) -> None:
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "a", Recorder(), in_small_steps):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        admin_of(service).verify_replica("predictors", "a", timeout_seconds=20)
    those = told["replica 'a': reading its rows again"]
    assert those == sorted(those)
    assert len({read for read, _ in those}) > 2
    assert {rows for _, rows in those} == {USER.rows + ITEM.rows}


def test_a_service_that_reads_everything(service: RunningService, told: Told) -> None:
    with Trainer(service.grpc) as trainer:
        trainer.publish_all()
        admin_of(service).make_checkpoint("clicks")
        admin_of(service).fsck()
    check(told, "comparing rows in memory")
    check(told, f"reading the checkpoints in {service.options.data_dir}")
