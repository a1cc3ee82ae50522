"""A volume without room: the service goes on with what it has, says so, and takes up again by itself."""

import mmap
import re
import resource
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.support.fleet import WAIT, Trainer, admin_of, follow, wait_until_in_sync
from tests.support.local_service import join, run, send
from tests.support.log import log_of
from tests.support.metrics import samples_of
from tests.support.process import ServiceProcess
from tests.support.volumes import fill, remount, small_volume
from tests.support.waiting import wait_for
from tests.support.wire import part

from deltasync.base.errors import ServiceUnavailable
from deltasync.client import NumpyTarget, Policy, Shard, TableSpec
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions
from deltasync.log.records import pack_ids
from deltasync.service.service import Service

WIDE = TableSpec("wide", 20_000, 16)
LARGE = TableSpec("large", 120_000, 32)
CONSUMER = ("--consumer", "predictors=clicks")
NO_ROOM = r"no room for tables of model 'clicks': it takes \d+ bytes, and \d+ bytes on the volume of .* are free.*"


@pytest.fixture
def volume() -> Iterator[Path]:
    with small_volume(48 << 20) as folder:
        yield folder


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_a_full_volume_is_named_and_waiting_cuts_pass_once_there_is_room(
    volume: Path, pool: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    target, other = NumpyTarget(), NumpyTarget()
    with (
        ServiceProcess(volume / "data", *CONSUMER) as service,
        Trainer(service.grpc, [WIDE]) as trainer,
        follow(service, "predictors", "p", target) as replica,
    ):
        replica.wait_for(trainer.publish_all(), WAIT)
        held = trainer.expected()
        filler = fill(volume)
        published = pool.submit(trainer.change, WIDE.rows)
        said = service.wait_for_status("/readyz", 503)
        assert re.search(r"data.mdb on volume 'log': .*No space left on device.* 0 are free\): make room", said)
        lag = service.get_json("/consumers/predictors")
        assert lag["state"] == "failed"
        assert lag["reason"].startswith(
            "the service still serves its stored rows, but a volume refuses new ones: "
        )
        samples = samples_of(service)
        assert samples["deltasync_volume_failed", (("volume", "log"),)] == 1
        assert samples["deltasync_volume_free_bytes", (("volume", "log"),)] == 0
        with follow(service, "predictors", "q", other) as another:
            another.wait_for(1, WAIT)
        assert {name: rows.tobytes() for name, rows in other.tables.items()} == held
        assert not published.done()
        filler.unlink()
        replica.wait_for(published.result(WAIT), WAIT)
        np.testing.assert_array_equal(target.tables["wide"], trainer.rows["wide"])
        assert service.wait_for_status("/readyz", 200) == "ok\n"
        while samples_of(service)["deltasync_volume_failed", (("volume", "log"),)]:
            pass  # Metrics may be of a moment before.
        assert service.terminate() == 0
    log = capfd.readouterr().err
    assert len(re.findall("volume failed: volume=log", log)) == 1
    assert len(re.findall("volume recovered: volume=log", log)) == 1
    # However often it tries; once more where its last try was refused just before there was room.
    assert len(re.findall("rank left: model=clicks rank=0 run=r .*No space", log)) in (1, 2)
    assert "Traceback" not in log, log[log.find("Traceback") - 500 :][:3000]


def test_a_new_table_is_refused_without_room_and_published_with_room(
    volume: Path, tmp_path: Path, pool: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    filler, memory = volume / "filler", ("--table-memory", str(volume))
    filler.write_bytes(bytes(36 << 20))
    with ServiceProcess(tmp_path, *CONSUMER, *memory) as service, Trainer(service.grpc, [LARGE]) as trainer:
        published = pool.submit(trainer.publish_all)
        said = wait_for(lambda: re.search(NO_ROOM, trainer.publisher.connection.last_error))
        assert said
        assert str(volume) in said[0]
        assert service.get("/readyz") == (200, "ok\n"), "the volume has refused nothing"
        filler.unlink()
        assert published.result(WAIT).number == 1
    log = capfd.readouterr().err
    assert "volume failed" not in log
    assert "publisher refused: model=clicks" in log
    assert "Traceback" not in log, log[log.find("Traceback") - 500 :][:3000]


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_cuts_go_on_while_no_checkpoint_can_be_written(
    volume: Path, tmp_path: Path, trouble: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """All say so. What was published meanwhile is there after a kill; with room, a checkpoint is written."""
    (tmp_path / "data").mkdir()
    (volume / "checkpoints").mkdir()
    (tmp_path / "data" / "checkpoints").symlink_to(volume / "checkpoints")
    target = NumpyTarget()
    with (
        ServiceProcess(tmp_path / "data", *CONSUMER, "--checkpoint-bytes", "1") as service,
        Trainer(service.grpc, [WIDE]) as trainer,
    ):
        trainer.publish_all()
        wait_for(lambda: service.get_json("/models")[0]["checkpoint"]["version"] == 1)
        if trouble == "full":
            filler = fill(volume)
        else:
            remount(volume, "ro")
        for _ in range(5):
            head = trainer.change(WIDE.rows)
        (line,) = wait_for(
            lambda: [each["checkpoint"] for each in service.get_json("/models") if each["checkpoint"]["reason"]]
        )
        assert line["version"] == 1
        advice = "make room on it" if trouble == "full" else "mount it for writing"
        assert line["reason"].endswith(advice)
        status, ready = service.get("/readyz")
        assert (status, f"checkpoints of model 'clicks': {line['reason']}" in ready) == (200, True)
        assert f"checkpoints fail: {line['reason']}" in service.get_json("/consumers/predictors")["reason"]
        assert samples_of(service)["deltasync_checkpoint_failures_total", ()] >= 1
        service.kill()
        service.start()
        with follow(service, "predictors", "p", target) as replica:
            replica.wait_for(head, WAIT)
        np.testing.assert_array_equal(target.tables["wide"], trainer.rows["wide"])
        if trouble == "full":
            filler.unlink()
        else:
            remount(volume, "rw")
        made = admin_of(service).make_checkpoint("clicks")
        assert made["version"] == head.number
        assert service.get("/readyz") == (200, "ok\n")
    log = capfd.readouterr().err
    assert "its checkpoint could not be written; this will be retried" in log
    assert "Traceback" not in log, log[log.find("Traceback") - 500 :][:3000]


def test_a_service_on_a_full_volume_starts_and_serves(volume: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target, service = NumpyTarget(), ServiceProcess(volume / "data", *CONSUMER)
    with service, Trainer(service.grpc, [WIDE]) as trainer:
        trainer.publish_all()
        service.kill()
        filler = fill(volume)
        service.start(announced=False)  # There is no room for that.
        service.wait_for_answer()
        service.wait_for_status("/readyz", 200)
        with follow(service, "predictors", "p", target) as replica:
            replica.wait_for(1, WAIT)
        np.testing.assert_array_equal(target.tables["wide"], trainer.rows["wide"])
        filler.unlink()
        service.wait_until_announced()
    assert "Traceback" not in capfd.readouterr().err


def test_a_service_serves_and_ends_if_its_address_file_cannot_be_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    endpoints = tmp_path / "endpoints.json"
    with ServiceProcess(tmp_path, *CONSUMER) as service:
        endpoints.unlink()
        (endpoints / "in the way").mkdir(parents=True)
        assert service.terminate() == 0
        assert f"{endpoints} cannot be removed" in capfd.readouterr().err
        service.start(announced=False)
        service.wait_for_answer()
        service.wait_for_status("/readyz", 200)
        assert service.terminate() == 0
    log = capfd.readouterr().err
    assert f"{endpoints} cannot be written" in log
    assert "Traceback" not in log, log[log.find("Traceback") - 500 :][:3000]


def leave_behind(data_dir: Path) -> None:
    """What processes leave that are killed: parts of a cut and of a release, which a start forgets."""

    async def scenario(service: Service) -> None:
        whole, ids, values = Shard.whole(WIDE), np.arange(9), np.ones((9, WIDE.dim), "<f4")
        held = service.models["clicks"].position
        session = await join(service, run="r", tables=[WIDE], shards=[whole], continues=held)
        await send(session, part(9, [(0, ids, values)])[:-1])
        view = service.views.get(service.registry.get("ranked"))
        assert view
        log_of(service).append("releases/ranked", view.position.number + 1, 0, 0, pack_ids(ids)).result()

    run(data_dir, scenario)
    with closing(LmdbStore(LogOptions(directory=data_dir / "log"))) as log:
        assert {record.number for record in log.read("cuts/clicks")} == {1, 2}
        assert log.newest("releases/ranked") > log.newest("heads/ranked")


@pytest.mark.nightly
def test_a_service_starts_on_a_killed_ones_files_even_if_it_cannot_write(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It serves, says so, has what its configuration lacks once it can, and goes on."""
    targets = {name: NumpyTarget() for name in ("predictors", "ranked")}
    service = ServiceProcess(tmp_path, *CONSUMER, "--consumer", "ranked=clicks")
    with service, Trainer(service.grpc, [WIDE]) as trainer:
        admin_of(service).update_consumer("ranked", Policy(top_k=100_000))
        with follow(service, "ranked", "p", NumpyTarget()) as replica:
            replica.wait_for(trainer.publish_all(), WAIT)
        service.kill()
        leave_behind(tmp_path)
        service.arguments += ("--consumer", "later=clicks")
        service.start(largest_file=3 * mmap.PAGESIZE)  # Of the log's pages all but the heads.
        said = service.wait_for_status("/readyz", 503)
        assert re.search(r"data.mdb on volume 'log': .*File too large.* \(ulimit -f\)", said)
        for name, target in targets.items():
            with follow(service, name, "p", target) as replica:
                replica.wait_for(1, WAIT)
                assert service.get_json(f"/consumers/{name}")["state"] == "failed"
            np.testing.assert_array_equal(target.tables["wide"], trainer.rows["wide"])
        assert service.get("/consumers/later")[0] == 404
        service.largest_file_is(resource.RLIM_INFINITY)
        service.wait_for_status("/readyz", 200)
        service.wait_for_status("/consumers/later", 200)
        head = trainer.change(7)
        for name in targets:
            with follow(service, name, "q", NumpyTarget()) as replica:
                replica.wait_for(head, WAIT)
                wait_until_in_sync(service, name, head)
        assert service.terminate() == 0
    log = capfd.readouterr().err
    assert "Traceback" not in log, log[log.find("Traceback") - 500 :][:3000]
    assert len(re.findall("volume failed: volume=log", log)) == 1


def test_where_not_even_the_logs_lock_can_be_made_that_is_said(volume: Path) -> None:
    """Say, of a restored directory: LMDB maps that file, and would end the process."""
    with ServiceProcess(volume / "data", *CONSUMER) as service:
        assert service.terminate() == 0
    (volume / "data" / "log" / "lock.mdb").unlink()
    filler = fill(volume)
    done = ServiceProcess(volume / "data", *CONSUMER).run_to_end()
    assert done.returncode == 1
    assert re.search(r"Error: the log in .*: No space left on device .*: make room on it", done.stderr)
    filler.unlink()
    with ServiceProcess(volume / "data", *CONSUMER) as service:
        assert service.terminate() == 0


@pytest.mark.parametrize("begun", [True, False])
def test_a_read_only_volume_is_one_line_of_error_until_mounted_for_writing(volume: Path, begun: bool) -> None:
    service = ServiceProcess(volume / "data", *CONSUMER)
    if begun:
        with service:
            assert service.terminate() == 0
    remount(volume, "ro")
    done = service.run_to_end()
    assert done.returncode == 1
    said = done.stderr.rstrip().splitlines()[-1]
    assert re.match(rf"Error: {volume}/data cannot be (written to|made): Read-only file system", said)
    assert "find out why it is mounted read-only, and mount it for writing" in said
    assert "Traceback" not in done.stderr
    remount(volume, "rw")
    with service:
        service.wait_for_status("/readyz", 200)


# As the user of a service is, who may not write wherever it likes.
WITHOUT_PRIVILEGES = ("setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override")


@pytest.mark.nightly
def test_a_folder_without_write_permission_is_named_until_it_is_granted(
    tmp_path: Path,
) -> None:
    if not shutil.which("setpriv"):
        pytest.skip("needs setpriv")
    service = ServiceProcess(tmp_path / "data", *CONSUMER, started_by=WITHOUT_PRIVILEGES)
    with service:
        assert service.terminate() == 0
    for folder in (tmp_path / "data" / "log", tmp_path / "data"):
        folder.chmod(0o500)
        for each in (folder / "lock", folder / "lock.mdb"):
            each.unlink(missing_ok=True)
        done = service.run_to_end()
        assert done.returncode == 1
        assert re.search(
            r"Error: .*Permission denied.*: give the service's user access to it$", done.stderr.rstrip()
        )
        folder.chmod(0o700)
    with service:
        service.wait_for_status("/readyz", 200)


def test_a_limit_of_a_files_size_is_named_and_noticed_to_be_lifted(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    none = resource.RLIM_INFINITY
    with ServiceProcess(tmp_path, *CONSUMER) as service:
        assert service.process
        with Trainer(service.grpc, [WIDE]) as trainer:
            trainer.publish_all()
            size = (tmp_path / "log" / "data.mdb").stat().st_size
            resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (size, none))
            published = pool.submit(trainer.change, WIDE.rows)
            said = service.wait_for_status("/readyz", 503)
            assert re.search(r"data.mdb on volume 'log': .*File too large.* \(ulimit -f\)", said)
        assert isinstance(published.exception(WAIT), ServiceUnavailable)
        resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (none, none))
        service.wait_for_status("/readyz", 200)
