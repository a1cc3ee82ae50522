"""Input/output errors: the service says what is true meanwhile, and takes up again by itself."""

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.failing_disk import FailingDisk
from tests.support.fleet import WAIT, Trainer, follow, wait_for_lag, wait_until_in_sync
from tests.support.metrics import samples_of
from tests.support.process import ServiceProcess
from tests.support.waiting import wait_for

from deltasync.client import NumpyTarget, Position

CONSUMER = ("--consumer", "predictors=clicks")
HEADS = 2 * 4096  # Bytes of the two heads of LMDB's file.
FAILED = "deltasync_volume_failed", (("volume", "log"),)
MEND = "look for errors of the device in the system log, and repair it; no acknowledged write is lost"


@pytest.fixture
def disk(tmp_path: Path) -> FailingDisk:
    return FailingDisk(tmp_path)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def service_on(disk: FailingDisk, data_dir: Path, *arguments: str) -> ServiceProcess:
    return ServiceProcess(data_dir, *CONSUMER, *arguments, fresh=True, environment=disk.environment)


def check_said(service: ServiceProcess) -> None:
    """While a disk fails: whoever asks is answered, and nobody is told to restore anything."""
    for path in ("/status", "/metrics", "/consumers", "/models", "/tables", "/versions?model=clicks"):
        status, body = service.get(path)
        assert (status, "restore" in body) == (200, False), (path, body)


def test_a_log_with_a_refused_head_reopens_once_the_disk_accepts_writes(
    disk: FailingDisk, tmp_path: Path, pool: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    """LMDB as a whole takes nothing any more after that, and lets nobody read."""
    target = NumpyTarget()
    with (
        service_on(disk, tmp_path / "data") as service,
        Trainer(service.grpc) as trainer,
        follow(service, "predictors", "p", target) as replica,
    ):
        replica.wait_for(trainer.publish_all(), WAIT)
        disk.fail("write", "data.mdb", below=HEADS)
        published = pool.submit(trainer.change, 7)
        assert MEND in service.wait_for_status("/readyz", 503)
        for _ in range(2):
            check_said(service)
            assert samples_of(service)[FAILED] == 1
            lag = wait_for_lag(service, "predictors", lambda lag: lag["state"] == "failed")
            assert MEND in lag["reason"]
            assert service.get("/readyz")[0] == 503
        wait_for(lambda: "Input/output error" in trainer.publisher.connection.last_error)
        disk.go_on()
        head = published.result(WAIT)
        replica.wait_for(head, WAIT)
        assert service.wait_for_status("/readyz", 200) == "ok\n"
        wait_until_in_sync(service, "predictors", head)
        assert {name: rows.tobytes() for name, rows in target.tables.items()} == trainer.expected()
        assert service.terminate() == 0
    log = capfd.readouterr().err
    assert "volume failed: volume=log" in log
    assert "restore" not in log
    assert "Traceback" not in log, log[log.find("Traceback") - 500 :][:3000]


def readiness(service: ServiceProcess) -> int:
    """What /readyz answers: that it is ready, or why it is not."""
    status, body = service.get("/readyz")
    assert status == 200 or (status == 503 and MEND in body), (status, body)
    return status


@pytest.mark.nightly
@pytest.mark.parametrize("calls", ["write,sync", "write", "sync"])
def test_acknowledged_writes_survive_calls_that_fail_at_random(
    disk: FailingDisk, tmp_path: Path, pool: ThreadPoolExecutor, calls: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the log and of checkpoints: one in eight."""
    target, published, stop = NumpyTarget(), list[Position](), threading.Event()
    with (
        service_on(disk, tmp_path / "data", "--checkpoint-bytes", "1") as service,
        Trainer(service.grpc) as trainer,
        follow(service, "predictors", "p", target) as replica,
    ):

        def publish() -> None:
            while not stop.is_set():
                published.append(trainer.change(7))

        replica.wait_for(trainer.publish_all(), WAIT)
        disk.fail(calls, str(tmp_path / "data"), every=8)
        training, seen = pool.submit(publish), set[int]()

        def has_seen_enough() -> bool:
            assert not training.done() or training.result()
            check_said(service)
            seen.add(readiness(service))
            return len(published) >= 15 and len(seen) == 2

        wait_for(has_seen_enough, lambda: (len(published), seen), 120)
        stop.set()
        disk.go_on()
        training.result(WAIT)
        replica.wait_for(published[-1], WAIT)
        service.wait_for_status("/readyz", 200)
        wait_until_in_sync(service, "predictors", published[-1])
        assert {name: rows.tobytes() for name, rows in target.tables.items()} == trainer.expected()
        service.kill()
        service.start()
        other = NumpyTarget()
        with follow(service, "predictors", "q", other) as another:
            another.wait_for(published[-1], WAIT)
        assert {name: rows.tobytes() for name, rows in other.tables.items()} == trainer.expected()
    assert "restore" not in capfd.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (errno.EDQUOT, "raise the quota of the service's user, or make room"),
        (errno.EACCES, "give the service's user access to it"),
        (errno.EROFS, "find out why it is mounted read-only, and mount it for writing"),
        (errno.ENXIO, "look for its errors in the system log"),
    ],
)
def test_each_refused_write_names_a_remedy_after_which_the_service_goes_on(
    disk: FailingDisk, tmp_path: Path, pool: ThreadPoolExecutor, error: int, remedy: str
) -> None:
    with (
        service_on(disk, tmp_path / "data", "--checkpoint-bytes", "1") as service,
        Trainer(service.grpc) as trainer,
        follow(service, "predictors", "p", NumpyTarget()) as replica,
    ):
        replica.wait_for(trainer.publish_all(), WAIT)
        disk.fail("write", "data.mdb", error=error)
        published = pool.submit(trainer.change, 7)
        assert remedy in service.wait_for_status("/readyz", 503)
        check_said(service)
        disk.go_on()
        replica.wait_for(published.result(WAIT), WAIT)
        service.wait_for_status("/readyz", 200)
        wait_until_in_sync(service, "predictors", published.result())


@pytest.mark.nightly
def test_a_log_that_is_unreadable_at_start_is_unchanged_once_readable(disk: FailingDisk, tmp_path: Path) -> None:
    target, service = NumpyTarget(), service_on(disk, tmp_path / "data")
    with service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        service.kill()
        disk.fail("read", "data.mdb")
        done = service.run_to_end()
        assert done.returncode == 1
        said = done.stderr.rstrip().splitlines()[-1]
        assert said.startswith(f"Error: the log in {tmp_path / 'data' / 'log'} cannot be opened: ")
        assert said.endswith(MEND)
        disk.go_on()
        service.start()
        with follow(service, "predictors", "p", target) as replica:
            replica.wait_for(1, WAIT)
        assert {name: rows.tobytes() for name, rows in target.tables.items()} == trainer.expected()


@pytest.mark.nightly
def test_a_log_too_large_for_the_memory_of_the_process_is_made_smaller(tmp_path: Path) -> None:
    most = ("prlimit", f"--as={16 << 30}")
    done = ServiceProcess(tmp_path / "data", *CONSUMER, started_by=most).run_to_end()
    assert done.returncode == 1
    assert "lower --log-max-bytes, or raise the memory limits (ulimit -v" in done.stderr.splitlines()[-1]
    smaller = ("--log-max-bytes", str(1 << 30))
    for arguments, started_by in ((smaller, most), ((), ())):
        with ServiceProcess(tmp_path / "data", *CONSUMER, *arguments, started_by=started_by) as service:
            service.wait_for_status("/readyz", 200)
            assert service.terminate() == 0
