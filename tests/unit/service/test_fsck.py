"""`fsck` reads everything that a running service stores, and names what is damaged."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import flips
from tests.support.damage import flipped
from tests.support.faults import failing
from tests.support.local_service import check, faults_of, opened
from tests.support.log import log_of

from deltasync.base.events import Event, EventKind
from deltasync.log.log_store import LogUnavailable
from deltasync.log.records import key_of
from deltasync.service.fsck import Checked
from deltasync.service.service import Service

Harm = Callable[[Path, Service], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With checkpoints of versions 2 and 4 of 5."""
    folder = tmp_path_factory.mktemp("fsck") / "whole"
    flips.write(folder, checkpoints=[2, 4])
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy"


def files_of(copy: Path, kind: str) -> list[Path]:
    """The files of checkpoints, oldest first: `manifests` or `data`."""
    return sorted((copy / "checkpoints" / "clicks" / kind).iterdir())


def change(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(content)


def problems(found: list[Checked]) -> list[str]:
    return [problem for each in found for problem in each.problems]


def _change_newest_data(copy: Path, _: Service) -> None:
    change(files_of(copy, "data")[-1], 60)


def _cut_off_data(copy: Path, _: Service) -> None:
    path = files_of(copy, "data")[-1]
    path.write_bytes(path.read_bytes()[:-1])


def _lose_data(copy: Path, _: Service) -> None:
    files_of(copy, "data")[-1].unlink()


def _change_manifest(copy: Path, _: Service) -> None:
    change(files_of(copy, "manifests")[-1], 200)


def _change_value(database: bytes, key: bytes) -> Harm:
    def harm(_: Path, service: Service) -> None:
        log: Any = log_of(service)
        with log._opened().begin(write=True, db=log._databases[database]) as txn:
            txn.put(key, flipped(bytes(txn.get(key) or b""), 100))

    return harm


def _seal(version: int) -> Harm:
    return _change_value(b"records", key_of("seals/clicks", version, 0, 0))


def _cut(version: int) -> Harm:
    return _change_value(b"records", key_of("cuts/clicks", version, 0, 0))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_change_newest_data, "is damaged at byte 0"),
        (_cut_off_data, "is damaged at byte 0"),
        (_lose_data, "is missing"),
        (_change_manifest, "checkpoint clicks/manifests/"),
        (_change_value(b"meta", b"consumer/plain"), "record consumer/plain is damaged: restore a backup"),
        (_change_value(b"meta", b"model/clicks"), "record model/clicks is damaged: restore a backup"),
        (_seal(3), "seal of version 3 of model 'clicks' is damaged: write a checkpoint"),
        (_cut(5), "record 0 of rank 0 of version 5 of model 'clicks' is damaged: write a checkpoint"),
    ],
)
async def test_damage_is_named(copy: Path, harm: Harm, said: str) -> None:
    async with opened(copy) as service:
        harm(copy, service)
        (problem,) = problems(await check(service))
        assert said in problem


async def test_files_are_named_by_their_path(copy: Path) -> None:
    async with opened(copy) as service:
        _change_newest_data(copy, service)
        (problem,) = problems(await check(service))
        assert str(files_of(copy, "data")[-1]) in problem


async def test_files_log_and_memory_are_read_while_the_service_goes_on(copy: Path) -> None:
    said = list[Event]()
    async with opened(copy, said.append) as service:
        clicks, log = await check(service)
        assert problems([clicks, log]) == []
        assert (clicks.model, clicks.checkpoints, log.model) == ("clicks", 2, "")
        assert log.records > flips.VERSIONS
        assert clicks.rows >= 2 * 68, "those of the view, too"
        service.models["clicks"].tables[0].rows.view(np.uint8)[7, 1] ^= 16
        clicks, log = await check(service)
        assert any("row 7: the service reloads the model" in each for each in clicks.problems)
        assert "row 7" in service.models["clicks"].tables.failed
    events = [each for each in said if each.kind is EventKind.CHECKED]
    assert [each.subject for each in events] == [{"by": "who asks"}] * 2
    assert events[0].text == "0 problems in the stored data"


async def test_data_that_cannot_be_read_now_is_not_called_damaged(copy: Path) -> None:
    async with opened(copy) as service:
        away = failing(LogUnavailable("its disk refused a write"))
        with faults_of(service).log.replaced(items=away), pytest.raises(LogUnavailable, match="refused a write"):
            await check(service)
