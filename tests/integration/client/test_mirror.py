"""`deltasync mirror` fills shared memory from a real service, and other processes read it."""

import resource
import shutil
import signal
import subprocess
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pytest
from tests.support.deployments import COMMAND
from tests.support.fleet import ITEM, USER, Trainer, wait_for_lag
from tests.support.keyed_model import ROWS
from tests.support.keyed_model import USER as KEYED
from tests.support.programs import killed
from tests.support.server import RunningService
from tests.support.shared_memory import attached, mirror, release_of
from tests.support.waiting import wait_for

from deltasync.base.errors import DeltasyncError
from deltasync.client import SharedReader


def rows(reader: SharedReader) -> dict[str, bytes]:
    with reader.reading() as now:
        return {name: some.tobytes() for name, some in now.tables.items()}


def started(
    service: RunningService, folder: Path, *options: str, before: tuple[str, ...] = ()
) -> "subprocess.Popen[str]":
    command = [*before, *COMMAND, "mirror", "m", "--consumer", "predictors", "--directory", str(folder), *options]
    return subprocess.Popen([*command, "--service", service.grpc], text=True, stderr=subprocess.PIPE)


def work(folder: Path, pipe: Connection, before: SharedReader | None) -> None:
    """A worker: answers with its version, its rows and its readiness."""
    reader = before or attached(folder)
    while pipe.recv():
        pipe.send((reader.version().version, rows(reader), reader.readiness.yes))


def test_worker_processes_keep_reading_when_the_mirror_is_killed(tmp_path: Path, folder: Path) -> None:
    with RunningService(tmp_path / "data") as service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        with killed(started(service, folder)):
            wait_for(lambda: (folder / "deltasync-m" / "control").exists())
            reader = attached(folder)
            wait_for(lambda: reader.readiness.yes)
            assert rows(reader) == trainer.expected()
            context, pipes, workers = get_context("fork"), list[Connection](), []
            for before in (reader, None, None):
                here, there = context.Pipe()
                workers.append(context.Process(target=work, args=(folder, there, before)))
                workers[-1].start()
                pipes.append(here)
            version = trainer.change(20).number
            wait_for(lambda: reader.version().version == version)
            for pipe in pipes:
                pipe.send(True)
                assert pipe.recv() == (version, trainer.expected(), True)
        wait_for(lambda: not reader.readiness.yes)  # It was killed without a goodbye.
        assert "last heartbeat was" in reader.readiness.reason
        held = trainer.expected()
        trainer.delete(USER, [1, 2])
        later = trainer.change(5).number
        for pipe in pipes:
            pipe.send(True)
            assert pipe.recv()[:2] == (version, held), "the last version, while there is no mirror"
        with killed(started(service, folder)):
            wait_for(lambda: reader.version().version == later)
            for pipe in pipes:
                pipe.send(True)
                assert pipe.recv()[:2] == (later, trainer.expected())
            lag = wait_for_lag(service, "predictors", lambda lag: lag["state"] == "in sync")
            assert lag["damages"] == 0
            (replica,) = lag["replicas"]
            assert replica["rewound"] is None
        for pipe, worker in zip(pipes, workers, strict=True):
            pipe.send(False)
            worker.join(20)


def test_a_stopped_mirror_says_goodbye_and_a_failed_one_says_why(tmp_path: Path, folder: Path) -> None:
    with RunningService(tmp_path / "data") as service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        with killed(started(service, folder, "--readable-by", "owner")) as process:
            wait_for(lambda: (folder / "deltasync-m" / "control").exists())
            reader = attached(folder)
            wait_for(lambda: reader.readiness.yes)
            second = started(service, folder)
            assert "another process writes" in second.communicate(timeout=30)[1]
            assert second.returncode == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        assert reader.readiness.reason == "its mirror has stopped"
        wait_for_lag(service, "predictors", lambda lag: lag["replicas"] == [])
        values, version = reader.lookup(ITEM.name, np.arange(ITEM.rows))
        assert (version, values.tobytes()) == (1, trainer.expected()[ITEM.name])
        with pytest.raises(DeltasyncError, match="no table 'nothing'"):
            reader.lookup("nothing", np.arange(1))


def test_a_mirror_that_fails_before_its_first_version_leaves_no_folder(tmp_path: Path, folder: Path) -> None:
    with RunningService(tmp_path / "data") as service:
        command = [*COMMAND, "mirror", "m", "--consumer", "none", "--directory", str(folder)]
        done = subprocess.run([*command, "--service", service.grpc], text=True, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 1
    assert "no consumer 'none'" in done.stderr
    assert list(folder.iterdir()) == []


def test_a_mirror_whose_folder_is_removed_ends_with_an_error(tmp_path: Path, folder: Path) -> None:
    with RunningService(tmp_path / "data") as service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        with killed(started(service, folder)) as process:
            wait_for_lag(service, "predictors", lambda lag: lag["state"] == "in sync")
            shutil.rmtree(folder / "deltasync-m")
            error = process.communicate(timeout=60)[1]
            assert "deltasync-m was moved or removed while its mirror runs: start the mirror again" in error
            assert process.returncode == 1
        wait_for_lag(service, "predictors", lambda lag: lag["state"] != "in sync")


def test_a_mirror_raises_its_limit_of_open_files(tmp_path: Path, folder: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        RunningService(tmp_path / "data") as service,
        killed(started(service, folder, before=("prlimit", f"--nofile=256:{hard}"))) as process,
    ):
        wait_for(lambda: (folder / "deltasync-m" / "control").exists())
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def read_on(folder: Path, stop: Event, pipe: Connection) -> None:
    """Read until told to stop; answer with the number of lookups, or what was torn."""
    reader, ids, lookups = attached(folder), np.arange(ROWS), 0
    while not stop.is_set():
        values, version = reader.lookup(KEYED.name, ids)
        with reader.reading() as now:
            whole, at = now.tables[KEYED.name].copy(), now.version
        for some, of in ((values, version), (whole, at)):
            if not (some == of).all():
                pipe.send(f"version {of}: {some.min()} to {some.max()}")
                return
        lookups += 1
    pipe.send(lookups)


@pytest.mark.nightly
def test_32_readers_see_whole_versions_while_releases_come(folder: Path) -> None:
    target, context = mirror(folder), get_context("fork")
    stop = context.Event()
    target.apply(release_of(1))
    pipes, workers = list[Connection](), []
    for _ in range(32):
        here, there = context.Pipe()
        workers.append(context.Process(target=read_on, args=(folder, stop, there)))
        workers[-1].start()
        pipes.append(here)
    for version in range(2, 40):
        target.apply(release_of(version))
        stop.wait(0.1)  # Ten releases a second; nothing depends on it.
    stop.set()
    found = [pipe.recv() for pipe in pipes]
    for worker in workers:
        worker.join(20)
    target.close()
    assert [each for each in found if isinstance(each, str)] == []
    assert min(found) > 0
