"""Backups and restores that are killed: they are never taken for complete, and the next one replaces them."""

import asyncio
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.command import deltasync
from tests.support.examples import examples
from tests.support.fleet import WAIT, Trainer, admin_of, follow, wait_for_lag
from tests.support.forks import services
from tests.support.local_service import back_up, check, opened
from tests.support.process import ServiceProcess
from tests.support.programs import ROOT, cleaned
from tests.support.server import RunningService

from deltasync.base.errors import StorageFailed
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.manifest import Manifest
from deltasync.checkpoints.store import CheckpointStore
from deltasync.client import InvalidInput, NumpyTarget, ServiceUnavailable
from deltasync.log.data_directory import BACKUP_MARKER, lock_data_directory
from deltasync.service.backup import BackupPlace
from deltasync.service.restore import restore

KILLED_AT_A_FILE = """
import os, runpy, signal, sys
name = sys.argv.pop(1)
def look(event, arguments):
    if event == "open" and arguments[2] & os.O_CREAT and name in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(look)
runpy.run_module("deltasync", run_name="__main__")
"""
KILLED_AT = ROOT / "tests" / "support" / "killed_at.py"
# The files that a service begins to write.
OF_A_CHECKPOINT = ["data/checkpoints/clicks/data/", "data/checkpoints/clicks/manifests/"]
OF_A_BACKUP = [
    *(f"backup/{each}" for each in ("checkpoints/clicks/data/", "checkpoints/clicks/manifests/", BACKUP_MARKER))
]


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Of a service that is stopped."""
    with RunningService(tmp_path / "data") as service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
    return tmp_path / "data"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_sound(data_dir: Path) -> None:
    """Check that a service starts on a data directory, and that fsck finds no damage."""

    async def main() -> None:
        async with opened(data_dir) as service:
            assert [problem for each in await check(service) for problem in each.problems] == []

    asyncio.run(main())


def killed(what: str, source: Path, into: Path) -> Iterator[Path]:
    """Folders that a process was filling when it was killed, each at a later step; by day every third step."""
    steps = range(1, 1000, 1 if examples() > 20 else 3)
    for step in steps:
        folder = into / f"{step:03}"
        process = services().start(
            str(KILLED_AT), str(step), what, str(source), str(folder), environment=cleaned(), folder=str(ROOT)
        )
        if process.wait(WAIT) == 0:
            assert step > 20
            return
        assert process.returncode == -signal.SIGKILL
        if folder.exists():
            yield folder
    raise AssertionError("it never ends")


def test_a_killed_backup_is_none_and_is_replaced(data_dir: Path, tmp_path: Path) -> None:
    for folder in killed("backup", data_dir, tmp_path):
        if (folder / BACKUP_MARKER).exists():
            with pytest.raises(StorageFailed, match="is a backup"):
                lock_data_directory(folder)
        if not is_complete(folder):
            made = back_up(data_dir, folder)
            assert is_complete(folder)
            stored = sum(len(content) for path, content in contents(folder).items() if path.parent.name == "data")
            assert stored == made.bytes, "nothing is left of the killed one"


def is_complete(folder: Path) -> bool:
    try:
        return BackupPlace(str(folder)).read() is not None
    except StorageFailed as error:
        if "the backup is incomplete: wait if it is" not in str(error):
            raise
        return False


def test_a_killed_restore_is_no_data_directory_and_is_replaced(data_dir: Path, tmp_path: Path) -> None:
    backup, whole = tmp_path / "backup", tmp_path / "whole"
    back_up(data_dir, backup)
    restore(backup, whole)
    for folder in killed("restore", backup, tmp_path):
        if not (folder / "log").exists():
            if {each.name for each in folder.iterdir()} - {"lock"}:
                with pytest.raises(StorageFailed, match="is not completely restored: run deltasync restore again"):
                    lock_data_directory(folder)
            restore(backup, folder)
        assert {path.name for path in contents(folder)} == {path.name for path in contents(whole)}
        check_sound(folder)


@pytest.mark.parametrize("stranger", ["something", "checkpoints/something", "log"])
def test_a_folder_with_anything_else_is_not_touched(data_dir: Path, tmp_path: Path, stranger: str) -> None:
    """Nor is one with a folder that both make, if nothing says that it was made by them."""
    folder = tmp_path / "folder"
    (folder / stranger).mkdir(parents=True)
    if stranger == "something":
        BackupPlace(str(tmp_path / "begun")).begin()
        shutil.copy(tmp_path / "begun" / BACKUP_MARKER, folder)
        (folder / "log.restoring").mkdir()
    before = sorted(folder.rglob("*"))
    back_up(data_dir, tmp_path / "backup")
    with pytest.raises(InvalidInput, match="is not empty"):
        back_up(data_dir, folder)
    with pytest.raises(InvalidInput, match="is not empty"):
        restore(tmp_path / "backup", folder)
    assert sorted(folder.rglob("*")) == before


def test_of_two_backups_to_one_place_one_fails_and_the_other_is_complete(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    others, copy = [shutil.copytree(data_dir, tmp_path / "copy")], CheckpointStore.copy

    def busy(store: CheckpointStore, manifest: Manifest, place: Place, check: Any = lambda: None) -> None:
        if others:
            back_up(others.pop(), tmp_path / "backup")
        copy(store, manifest, place, check)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointStore, "copy", busy)
        with pytest.raises(StorageFailed, match="another backup"):
            back_up(data_dir, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "new")
    check_sound(tmp_path / "new")


def is_done(action: Callable[[], object]) -> bool:
    """Whether a service has done it: gRPC does not connect at once where it has just tried in vain."""
    try:
        action()
    except ServiceUnavailable:
        return False
    return True


def kill_at(service: ServiceProcess, step: str, action: Callable[[], object]) -> None:
    """Start a service that is killed when it begins to write a file, and let it act."""
    service.kill()
    service.program = ["-c", KILLED_AT_A_FILE, step]
    service.start()
    assert service.process
    while service.process.poll() is None:
        assert not is_done(action)
    assert service.process.wait(WAIT) == -signal.SIGKILL
    service.program = ["-m", "deltasync"]


@pytest.mark.nightly
def test_a_service_killed_during_a_backup_goes_on_afterwards(tmp_path: Path) -> None:
    """Nothing of it is left in its own directory, and the next backup takes the place."""
    target, arguments = NumpyTarget(), ("--consumer", "predictors=clicks")
    service, folder = ServiceProcess(tmp_path / "data", *arguments), tmp_path / "backup"

    def back_up() -> None:
        admin_of(service).backup(str(folder))

    with service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        for step in (*OF_A_CHECKPOINT, *OF_A_BACKUP):
            kill_at(service, step, back_up)
            assert not is_complete(folder)
        service.start()
        head = trainer.change(7)
        while not is_done(back_up):
            pass
        with follow(service, "predictors", "p", target) as replica:
            replica.wait_for(head, WAIT)
        assert {name: rows.tobytes() for name, rows in target.tables.items()} == trainer.expected()
    done = deltasync("restore", str(folder), "--data-dir", str(tmp_path / "new"))
    assert done[0] == 0
    check_sound(tmp_path / "new")


@pytest.mark.nightly
def test_a_service_killed_while_it_keeps_a_version_keeps_it_afterwards(tmp_path: Path) -> None:
    target, service = NumpyTarget(), ServiceProcess(tmp_path / "data", "--consumer", "predictors=clicks")

    def keep() -> None:
        admin_of(service).keep_version("clicks", "good")

    with service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        for step in (*OF_A_CHECKPOINT, "data/checkpoints/clicks/kept/"):
            kill_at(service, step, keep)
            service.start()
            assert admin_of(service).kept_versions("clicks") == []
        good = trainer.expected()
        while not is_done(keep):
            pass
        trainer.change(7)
        admin_of(service).follow_version("predictors", "good")
        with follow(service, "predictors", "p", target) as replica:
            replica.wait_for(1, WAIT)
            wait_for_lag(service, "predictors", lambda lag: (lag["head"], lag["state"]) == (1, "in sync"))
        assert {name: rows.tobytes() for name, rows in target.tables.items()} == good
    check_sound(tmp_path / "data")
