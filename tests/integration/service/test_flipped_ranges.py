"""A bit flips in any range of any file of a data directory: no row is wrong or removed, and no word."""

import random
from pathlib import Path

import pytest
from tests.support.damage import entries
from tests.support.damaged import REMEDY, Resending, Written, check_replicas, files, flip, trouble
from tests.support.fleet import TABLES
from tests.support.process import ServiceProcess
from tests.support.server import RunningService
from tests.support.waiting import wait_for

RANGE_BYTES, LOG_RANGE_BYTES = 96, 256
BY_DAY, PARTS = 4, 24


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    written = Written(tmp_path_factory.mktemp("flips") / "whole", TABLES)
    written.write()
    return written


def places(written: Written) -> list[tuple[str, int]]:
    """A byte of each range of each file of checkpoints."""
    rng = random.Random(7)
    paths = sorted(path for path in (written.folder / "checkpoints").rglob("*") if path.is_file())
    return [
        (str(path.relative_to(written.folder)), min(first + rng.randrange(RANGE_BYTES), path.stat().st_size - 1))
        for path in paths
        for first in range(0, path.stat().st_size, RANGE_BYTES)
    ]


def check(written: Written, data_dir: Path, name: str, at: int) -> str:
    """Flip a bit, start a service, let the trainer go on; return what the service said about it."""
    written.copy(data_dir)
    log = entries(data_dir / "log", "records")
    flip(data_dir / name, at)
    stored = files(data_dir / "checkpoints")
    with RunningService(data_dir, checkpoint_seconds=10_000.0) as service:
        if said := trouble(service):
            assert "model 'clicks' is still recovering: it lacks" in said
            assert Path(name).name in said
            assert REMEDY in said
            assert '"in sync"' not in service.get("/consumers")[1]
        else:
            assert check_replicas(service, written, written.rows.__getitem__) == written.position.number
        with Resending(service, written) as trainer:
            trainer.go_on()
            assert bool(trainer.asked) == bool(said)
            assert not trainer.full
            assert trouble(service) == ""
            check_replicas(service, written, lambda _: trainer.rows)
    assert files(data_dir / "checkpoints") == stored
    kept = entries(data_dir / "log", "records").keys()
    assert [key for key in log if key not in kept and not key.startswith((b"heads/", b"releases/"))] == []
    return said


def check_log(written: Written, data_dir: Path, at: int) -> str:
    """The same for the log, which a service may have to refuse; in a process, because LMDB could end it."""
    written.copy(data_dir)
    name, stored = data_dir / "log" / "data.mdb", files(data_dir / "checkpoints")
    flip(name, at)
    damaged = name.read_bytes()
    service = ServiceProcess(data_dir, log=data_dir.with_name("said"))
    service.start(announced=False)
    process, endpoints = service.process, data_dir / "endpoints.json"
    assert process
    wait_for(lambda: endpoints.exists() or process.poll() is not None)
    if process.poll() is not None:
        assert process.poll() == 1, "it ended by itself, with words"
        assert service.lines("Error: the log.*(restore a backup|update deltasync)")
        assert name.read_bytes() == damaged
        assert files(data_dir / "checkpoints") == stored
        return "refused"
    service.wait_until_announced()
    assert trouble(service) == ""
    head = check_replicas(service, written, written.rows.__getitem__)
    if head < written.position.number:
        assert service.lines(f"the log is damaged after version {head}, and continues from there")
    with Resending(service, written) as trainer:
        trainer.go_on()
        check_replicas(service, written, lambda _: trainer.rows)
    assert service.terminate() == 0
    assert files(data_dir / "checkpoints") == stored
    return f"version {head}"


def places_in_log(written: Written) -> list[int]:
    """A byte of each range of the log."""
    rng, size = random.Random(7), (written.folder / "log" / "data.mdb").stat().st_size
    return [first + rng.randrange(LOG_RANGE_BYTES) for first in range(0, size, LOG_RANGE_BYTES)]


def test_flipped_ranges_of_checkpoints_by_day(written: Written, tmp_path: Path) -> None:
    every = places(written)
    base = max((name for name, _ in every), key=lambda name: (written.folder / name).stat().st_size)
    of_base = [each for each in every if each[0] == base]
    rng = random.Random(3)
    for name, at in [*rng.sample(of_base, 2), *rng.sample(every, BY_DAY - 2)]:
        check(written, tmp_path / "data", name, at)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_every_flipped_range_of_checkpoints(written: Written, tmp_path: Path, part: int) -> None:
    for name, at in places(written)[part::PARTS]:
        check(written, tmp_path / "data", name, at)


def test_a_flipped_range_of_the_log_by_day(written: Written, tmp_path: Path) -> None:
    check_log(written, tmp_path / "data", random.Random(4).choice(places_in_log(written)))


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_every_flipped_range_of_the_log(written: Written, tmp_path: Path, part: int) -> None:
    for at in places_in_log(written)[part::PARTS]:
        check_log(written, tmp_path / "data", at)
