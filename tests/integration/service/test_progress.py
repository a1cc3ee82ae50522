"""Whatever takes long with many rows says how far it is, from the start to the end."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.fleet import ITEM, USER, Recorder, Trainer, admin_of, follow, wait_until_in_sync
from tests.support.server import RunningService

from deltasync.client.stored_copy import compare, snapshot_copy
from deltasync.core.progress import Progress
from deltasync.service.snapshots import SnapshotOptions
from deltasync.service.stored_state import check_data_directory
from deltasync.snapshots.place import SnapshotPlace
from deltasync.snapshots.reading import check_snapshot, models_of, snapshots_of

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
    service = RunningService(tmp_path / "data")
    service.options = replace(service.options, snapshots=SnapshotOptions(url=str(tmp_path / "at"), seconds=3600))
    with service:
        yield service


def check(told: Told, words: str) -> None:
    """It has come to its end, and never went back."""
    (those,) = [found for what, found in told.items() if words in what]
    assert those == sorted(those)
    assert those[-1][0] == those[-1][1] > 0


def test_snapshots_and_what_is_compared_with_them(service: RunningService, told: Told, tmp_path: Path) -> None:
    with Trainer(service.grpc) as trainer:
        trainer.publish_all()
        admin_of(service).make_snapshot("clicks")
        check(told, "making a snapshot")
        place = SnapshotPlace(str(tmp_path / "at"))
        (model,) = models_of(place)
        (newest,) = snapshots_of(place, model).manifests
        assert check_snapshot(place, newest) == []
        check(told, "comparing with checksums")
        compare(service.grpc, "predictors", snapshot_copy(str(tmp_path / "at"), "predictors"), 30)
        check(told, "taking the service's rows")
        check(told, "reading table 'item'")
        told.clear()  # Rows are looked at before they are stored, too.
        admin_of(service).inspect()
        check(told, "looking at all rows")


def test_a_replica_that_reads_its_rows_again(
    service: RunningService, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasync.client.subscriber._READ_SECONDS", 0.0)
    monkeypatch.setattr("deltasync.client.checksums.BLOCK_ROWS", 4)
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "a", Recorder()):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        admin_of(service).verify_replica("predictors", "a", timeout_seconds=20)
    those = told["replica 'a': reading its rows again"]
    assert those == sorted(those)
    assert len({read for read, _ in those}) > 2
    assert {rows for _, rows in those} == {USER.rows + ITEM.rows}


def test_a_data_directory_that_nobody_uses(tmp_path: Path, told: Told) -> None:
    with RunningService(tmp_path / "data") as service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
    check_data_directory(tmp_path / "data")
    check(told, "table 'item': looking at its rows")
