"""What an error tells operators to do helps, done to the letter, and costs nobody a row that was acknowledged."""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.command import deltasync
from tests.support.damage import change_value
from tests.support.fleet import WAIT, Recorder, Trainer, admin_of, follow
from tests.support.process import ServiceProcess
from tests.support.server import TOKEN
from tests.support.volumes import fill, small_volume

from deltasync.log.data_directory import RESTORE

CONSUMER = ("--consumer", "predictors=clicks")
DAMAGED = f"(is damaged|is missing|is invalid).*: {RESTORE}$"


@dataclass(frozen=True)
class Left:
    """A data directory that a service was killed on, two backups of it, and its rows, which the newer one has."""

    data: Path
    backups: tuple[Path, Path]
    rows: dict[str, bytes]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Left:
    folder = tmp_path_factory.mktemp("written")
    found = folder / "data", (folder / "older", folder / "newer")
    with ServiceProcess(folder / "data", *CONSUMER) as service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        admin_of(service).backup(str(folder / "older"))
        trainer.change(7)
        admin_of(service).backup(str(folder / "newer"))
        service.kill()
    return Left(*found, trainer.expected())


@pytest.fixture
def left(written: Left, tmp_path: Path) -> Left:
    """A copy of it, which may be damaged."""
    shutil.copytree(written.data.parent, tmp_path / "left")
    data, (older, newer) = tmp_path / "left" / "data", (tmp_path / "left" / "older", tmp_path / "left" / "newer")
    return Left(data, (older, newer), written.rows)


def refused(data: Path) -> str:
    """What a service says that does not start."""
    status, _, said = deltasync("serve", "--data-dir", str(data))
    assert status == 1
    return said.splitlines()[-1]


def restored(backup: Path, data: Path) -> str:
    """What is said by a restore that fails; empty if it does not."""
    status, _, said = deltasync("restore", str(backup), "--data-dir", str(data))
    assert status == bool(said), said
    return said


def check_serves(data: Path, rows: dict[str, bytes]) -> None:
    """Replicas of a data directory hold these rows; then a trainer goes on, and they follow."""
    target = Recorder()
    with ServiceProcess(data, *CONSUMER) as service, follow(service, "predictors", "new", target) as replica:
        replica.wait_for(service.get_json("/consumers/predictors")["head"], WAIT)
        assert target.bytes() == rows
        with Trainer(service.grpc, run="next", started=2, seed=1) as trainer:
            replica.wait_for(trainer.publish_all(), WAIT)
            assert target.bytes() == trainer.expected()


def lose_heads(data: Path) -> None:
    with (data / "log" / "data.mdb").open("r+b") as file:
        file.write(bytes(2 * 4096))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "heads of the log": lose_heads,
    "a record": lambda data: change_value(data / "log", "meta", b"consumer/predictors", 9),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_whatever_is_damaged_a_backup_is_restored(
    left: Left, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Into another folder: what there is may still be looked at."""
    damage(left.data)
    assert re.search(DAMAGED, refused(left.data))
    assert "is not empty: choose a new or an empty folder" in restored(left.backups[1], left.data)
    assert not restored(left.backups[1], tmp_path / "new")
    if damage is lose_heads:
        check_serves(tmp_path / "new", left.rows)


def test_a_directory_without_its_log_is_restored_from_its_checkpoints(left: Left, tmp_path: Path) -> None:
    shutil.rmtree(left.data / "log")
    assert "make a data directory from it with deltasync restore" in refused(left.data)
    assert not restored(left.data / "checkpoints", tmp_path / "new")
    check_serves(tmp_path / "new", left.rows)


def test_the_trainer_fills_an_empty_data_directory(left: Left) -> None:
    """Replicas that hold rows of the one before follow."""
    target = Recorder()
    service = ServiceProcess(left.data, *CONSUMER)
    with service, follow(service, "predictors", "old", target) as replica:
        replica.wait_for(2, WAIT)
        service.kill()
        lose_heads(left.data)
        assert RESTORE in refused(left.data)
        shutil.rmtree(left.data)
        service.start()
        with Trainer(service.grpc, run="next", started=2, seed=1) as trainer:
            replica.wait_for(trainer.publish_all(), WAIT)
            assert target.bytes() == trainer.expected()


def test_a_service_starts_on_what_is_made_of_a_backup(left: Left, tmp_path: Path) -> None:
    said = refused(left.backups[1])
    assert said.endswith("is a backup: make a data directory from it with deltasync restore")
    assert not restored(left.backups[1], tmp_path / "new")
    check_serves(tmp_path / "new", left.rows)


def test_instead_of_a_damaged_backup_another_one_is_used(left: Left, tmp_path: Path) -> None:
    older, newer = left.backups
    for damaged in (newer / "backup.json", next((newer / "checkpoints").rglob("*.json"))):
        damaged.write_text("{")
        assert "use another backup, or make a new one if the service still runs" in restored(
            newer, tmp_path / "new"
        )
    assert not restored(older, tmp_path / "new")
    with ServiceProcess(left.data, *CONSUMER) as service:
        admin_of(service).backup(str(tmp_path / "taken"))
    assert not restored(tmp_path / "taken", tmp_path / "of the service")
    check_serves(tmp_path / "of the service", left.rows)


def test_a_backup_that_cannot_be_read_now_is_not_called_damaged(left: Left, tmp_path: Path) -> None:
    marker = left.backups[1] / "backup.json"
    marker.rename(left.backups[1] / "moved")
    marker.mkdir()
    said = restored(left.backups[1], tmp_path / "new")
    assert f"{marker} cannot be read: Is a directory" in said
    assert said.rstrip().endswith("move away the folder of that name")
    marker.rmdir()
    (left.backups[1] / "moved").rename(marker)
    assert not restored(left.backups[1], tmp_path / "new")


def test_before_a_damaged_checkpoint_there_is_another(tmp_path: Path) -> None:
    url, rows = tmp_path / "checkpoints", list[dict[str, bytes]]()
    with (
        ServiceProcess(tmp_path / "data", *CONSUMER, "--checkpoints", str(url)) as service,
        Trainer(service.grpc) as trainer,
    ):
        for publish in (trainer.publish_all, lambda: trainer.change(7)):
            publish()
            admin_of(service).make_checkpoint("clicks")
            rows.append(trainer.expected())
    newest = max((url / "clicks" / "data").iterdir())
    newest.write_bytes(bytes(len(newest.read_bytes())))
    said = restored(url, tmp_path / "new")
    found = re.search(
        r"is damaged at byte \d+: remove (\S+) there and restore again from the checkpoint before it", said
    )
    assert found
    (url / found[1]).unlink()
    assert not restored(url, tmp_path / "new")
    check_serves(tmp_path / "new", rows[0])
    next((url / "clicks" / "manifests").iterdir()).write_text("{")
    assert restored(url, tmp_path / "newer").rstrip().endswith(RESTORE)


def test_with_room_a_backup_is_made_and_restored(left: Left) -> None:
    with small_volume(8 << 20) as volume, ServiceProcess(left.data, *CONSUMER) as service:
        for command in (
            ("backup", str(volume / "backup"), "--service", service.http),
            ("restore", str(left.backups[1]), "--data-dir", str(volume / "new")),
        ):
            filler = fill(volume)
            status, _, error = deltasync(*command, admin_token=TOKEN)
            assert (status, "No space left on device" in error, "make room on" in error) == (1, True, True), error
            filler.unlink()
            assert deltasync(*command, admin_token=TOKEN)[0] == 0
        shutil.rmtree(volume / "new")
        assert not restored(volume / "backup", volume / "new")
        check_serves(volume / "new", left.rows)
