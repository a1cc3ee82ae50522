"""Backups and restores that are killed: they are never taken for complete, and the next one replaces them."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.command import deltasync
from tests.support.fleet import WAIT, Trainer, admin_of, follow
from tests.support.process import ServiceProcess
from tests.support.server import RunningService

from deltasync.base.errors import StorageFailed
from deltasync.base.progress import Progress
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.manifest import Manifest
from deltasync.checkpoints.store import CheckpointStore
from deltasync.client import InvalidInput, NumpyTarget, ServiceUnavailable
from deltasync.log.data_directory import BACKUP_MARKER, UNFINISHED_BACKUP, lock_data_directory
from deltasync.service.backup import BackupPlace, back_up_offline
from deltasync.service.fsck import check_data_directory
from deltasync.service.restore import restore

KILLED_IN_A_BACKUP = """
import importlib, os, runpy, signal, sys
module, name = sys.argv.pop(1).split(":")
owner = importlib.import_module(module)
*path, last = name.split(".")
for each in path:
    owner = getattr(owner, each)
setattr(owner, last, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
runpy.run_module("deltasync", run_name="__main__")
"""
STEPS = [
    "deltasync.checkpoints.writing:CheckpointWriter.write",
    "deltasync.checkpoints.store:pack_manifest",
    "deltasync.checkpoints.store:CheckpointStore.copy",
    "deltasync.service.backup:BackupPlace.complete",
    "deltasync.service.backup:asdict",
]


class Steps:
    """Copies of a folder before each step that fills it: what a process would leave that is killed there."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, into: Path) -> None:
        self.copies: list[Path] = []
        self._folder, self._into = folder, into
        for owner, name in (
            (os, "fsync"),
            *((Path, each) for each in ("mkdir", "rename", "unlink", "open")),
            (shutil, "rmtree"),
            (Progress, "add"),
        ):
            patch.setattr(owner, name, self._step(getattr(owner, name)))

    def _step(self, step: Any) -> Any:
        def stepping(*arguments: Any, **named: Any) -> Any:
            if not self._copying:
                self._copy()
            return step(*arguments, **named)

        return stepping

    _copying = False

    def _copy(self) -> None:
        self._copying = True
        target = self._into / f"{len(self.copies):03}"
        if self._folder.exists():
            shutil.copytree(self._folder, target)
        else:
            os.mkdir(target)
        self.copies.append(target)
        self._copying = False


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Of a service that is stopped."""
    with RunningService(tmp_path / "data") as service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
    return tmp_path / "data"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stages(patch: pytest.MonkeyPatch, folder: Path, into: Path, what: Any) -> Iterator[Path]:
    """What a folder has at each step of what fills it, also where it is filled after another was killed."""
    into.mkdir()
    with patch.context() as patched:
        steps = Steps(patched, folder, into)
        what()
    assert len(steps.copies) > 20
    yield from steps.copies


def test_a_backup_that_was_killed_is_none_and_is_replaced(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, complete = tmp_path / "backup", 0

    def back_up() -> None:
        back_up_offline(data_dir, target)

    for killed in stages(monkeypatch, target, tmp_path / "steps", back_up):
        if (killed / BACKUP_MARKER).exists():
            (killed / UNFINISHED_BACKUP).unlink(missing_ok=True)  # The last step: it is complete with it, too.
            assert contents(killed) == contents(target)
            complete += 1
            continue
        if any(killed.iterdir()):
            with pytest.raises(StorageFailed, match="the backup is incomplete: wait if it is still being made"):
                restore(killed, tmp_path / "new")
        if (killed / UNFINISHED_BACKUP).exists():
            with pytest.raises(StorageFailed, match="is an incomplete backup"):
                lock_data_directory(killed)
        made = back_up_offline(data_dir, killed)
        assert BackupPlace(str(killed)).read() == made
        assert made.files == len(contents(killed)) - 1  # Nothing of the one that was killed.
    assert complete


def test_a_restore_that_was_killed_is_no_data_directory_and_is_replaced(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup, target, complete = tmp_path / "backup", tmp_path / "new", 0
    back_up_offline(data_dir, backup)
    expected = None
    for killed in stages(monkeypatch, target, tmp_path / "steps", lambda: restore(backup, target)):
        expected = expected or contents(target)
        if (killed / "log").exists():
            assert contents(killed) == expected
            complete += 1
            continue
        if {each.name for each in killed.iterdir()} - {"lock"}:
            with pytest.raises(StorageFailed, match="is not completely restored: run deltasync restore again"):
                lock_data_directory(killed)
        restore(backup, killed)
        assert {path.name for path in contents(killed)} == {path.name for path in expected}
        assert [each for each in check_data_directory(killed) if each.problems or each.unknown] == []
    assert complete


@pytest.mark.parametrize("stranger", ["something", "checkpoints/something", "log"])
def test_a_folder_with_anything_else_is_not_touched(data_dir: Path, tmp_path: Path, stranger: str) -> None:
    """Nor is one with a folder that both make, if nothing says that it was made by them."""
    folder = tmp_path / "folder"
    (folder / stranger).mkdir(parents=True)
    if stranger == "something":
        (folder / "backup.json.new").touch()
        (folder / "log.restoring").mkdir()
    before = sorted(folder.rglob("*"))
    back_up_offline(data_dir, tmp_path / "backup")
    with pytest.raises(InvalidInput, match="is not empty"):
        back_up_offline(data_dir, folder)
    with pytest.raises(InvalidInput, match="is not empty"):
        restore(tmp_path / "backup", folder)
    assert sorted(folder.rglob("*")) == before


def test_of_two_backups_into_one_place_one_fails_and_the_other_is_whole(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    begun, copy = list[Path](), CheckpointStore.copy

    def busy(store: CheckpointStore, manifest: Manifest, place: Place, check: Any = lambda: None) -> None:
        if not begun:
            begun.append(shutil.copytree(data_dir, tmp_path / "copy"))
            back_up_offline(begun[0], tmp_path / "backup")
        copy(store, manifest, place, check)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointStore, "copy", busy)
        with pytest.raises(StorageFailed, match="another backup"):
            back_up_offline(data_dir, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "new")
    assert [each for each in check_data_directory(tmp_path / "new") if each.problems] == []


def is_backed_up(service: ServiceProcess, folder: Path) -> bool:
    """Whether it has made a backup: gRPC does not connect at once where it has just tried in vain."""
    try:
        admin_of(service).backup(str(folder))
    except ServiceUnavailable:
        return False
    return True


@pytest.mark.nightly
def test_a_service_that_is_killed_while_it_makes_a_backup_goes_on_afterwards(tmp_path: Path) -> None:
    """Nothing of it is left in its own directory, and the next backup takes the place."""
    target, arguments = NumpyTarget(), ("--consumer", "predictors=clicks")
    service, folder = ServiceProcess(tmp_path / "data", *arguments), tmp_path / "backup"
    with service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        for step in STEPS:
            service.kill()
            service.program = ["-c", KILLED_IN_A_BACKUP, step]
            service.start()
            assert service.process
            while service.process.poll() is None:
                assert not is_backed_up(service, folder)
            assert service.process.wait(WAIT) == -signal.SIGKILL
            assert not (folder / BACKUP_MARKER).exists()
        service.program = ["-m", "deltasync"]
        service.start()
        head = trainer.change(7)
        while not is_backed_up(service, folder):
            pass
        with follow(service, "predictors", "p", target) as replica:
            replica.wait_for(head, WAIT)
        assert {name: rows.tobytes() for name, rows in target.tables.items()} == trainer.expected()
    done = deltasync("restore", str(folder), "--data-dir", str(tmp_path / "new"))
    assert done[0] == 0
    assert [each for each in check_data_directory(tmp_path / "new") if each.problems] == []
