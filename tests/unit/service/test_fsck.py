"""Everything that a service keeps is read, whether it runs or not, and what is damaged is named."""

import asyncio
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import flips
from tests.support.command import deltasync
from tests.support.damage import change_value, entries, forget
from tests.support.local_service import check, opened, publish
from tests.support.log import Heads
from tests.support.wire import ITEM, USER

from deltasync.base.errors import InvalidInput, StorageFailed
from deltasync.base.events import Event, EventKind
from deltasync.log.data_directory import lock_data_directory
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions
from deltasync.log.records import key_of
from deltasync.log.volume import VolumeFailed
from deltasync.model.model_store import ModelStore
from deltasync.service.fsck import Checked, check_data_directory

Harm = Callable[[Path], None]


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
    """Those of checkpoints, oldest first: `manifests` or `data`."""
    return sorted((copy / "checkpoints" / "clicks" / kind).iterdir())


def change(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("lock", "lock.mdb")
    }


def problems(found: list[Checked]) -> list[str]:
    return [problem for each in found for problem in each.problems]


def test_nothing_is_found_where_nothing_is_wrong_and_nothing_is_changed(copy: Path) -> None:
    before = contents(copy)
    clicks, other = check_data_directory(copy)
    assert (clicks.model, clicks.checkpoints, clicks.rows) == ("clicks", 2, 0)
    assert (clicks.problems, clicks.unknown) == ([], [])
    assert clicks.records > flips.VERSIONS
    assert (other.model, other.problems, other.unknown) == ("", [], [])
    assert contents(copy) == before


def _change_newest_data(copy: Path) -> None:
    change(files_of(copy, "data")[-1], 60)


def _cut_off_data(copy: Path) -> None:
    path = files_of(copy, "data")[-1]
    path.write_bytes(path.read_bytes()[:-1])


def _lose_data(copy: Path) -> None:
    files_of(copy, "data")[-1].unlink()


def _change_base(copy: Path) -> None:
    change(files_of(copy, "data")[0], 60)


def _change_manifest(copy: Path) -> None:
    change(files_of(copy, "manifests")[-1], 200)


def _change_record(copy: Path) -> None:
    change_value(copy / "log", "meta", b"consumer/plain", 100)


def _change_model(copy: Path) -> None:
    change_value(copy / "log", "meta", b"model/clicks", 100)


def _change_seal(copy: Path) -> None:
    change_value(copy / "log", "records", key_of("seals/clicks", 3, 0, 0), 100)


def _lose_seal(copy: Path) -> None:
    forget(copy / "log", "records", key_of("seals/clicks", 3, 0, 0))


def _change_cut(version: int) -> Harm:
    return lambda copy: change_value(copy / "log", "records", key_of("cuts/clicks", version, 0, 0), 200)


def _lose_cut(copy: Path) -> None:
    forget(copy / "log", "records", key_of("cuts/clicks", 5, 0, 0))


def _change_head(copy: Path) -> None:
    key = next(key for key in entries(copy / "log", "records") if key.startswith(b"heads/small"))
    change_value(copy / "log", "records", key, 100)


def _lose_checkpoints(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")


SAVED = "without another checkpoint, after the next load, the trainer has to send the rows of version 5"
PASSED_OVER = "of model 'clicks' is damaged: the service uses that of version 2 and more of the log"


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_change_newest_data, PASSED_OVER),
        (_cut_off_data, PASSED_OVER),
        (_lose_data, PASSED_OVER),
        (_change_base, "of version 4 of model 'clicks' is damaged: so are all older ones"),
        (_change_manifest, "checkpoint clicks/manifests/"),
        (_change_record, "record consumer/plain is damaged"),
        (_change_model, "record model/clicks is damaged"),
        (_change_seal, "seal of version 3 of model 'clicks' is damaged"),
        (
            _lose_seal,
            "does not follow that of 2: after the next load, the trainer has to send the rows of version 5",
        ),
        (_change_cut(4), "the checkpoint of version 4 contains these rows"),
        (_change_cut(5), f"record 0 of rank 0 of version 5 of model 'clicks' is damaged: {SAVED}"),
        (_lose_cut, f"the log has 0 rows of version 5 of model 'clicks', expected 3: {SAVED}"),
        (_change_head, "of consumer 'small' is damaged: replicas of consumer 'small' get every row"),
        (
            _lose_checkpoints,
            "begins after version 2, which no checkpoint has: after the next load",
        ),
    ],
)
def test_what_is_missing_or_changed_is_named_with_what_follows(copy: Path, harm: Harm, said: str) -> None:
    harm(copy)
    before = contents(copy)
    found = problems(check_data_directory(copy))
    assert any(said in each for each in found), found
    assert contents(copy) == before


def test_files_that_are_changed_are_named(copy: Path) -> None:
    _change_newest_data(copy)
    assert any(str(files_of(copy, "data")[-1]) in each for each in problems(check_data_directory(copy)))


def test_a_log_that_cannot_be_opened_hides_no_checkpoint(copy: Path) -> None:
    (copy / "log" / "data.mdb").write_bytes(b"no log" * 1000)
    _change_newest_data(copy)
    clicks, other = check_data_directory(copy)
    assert (clicks.checkpoints, clicks.records) == (2, 0)
    assert any(PASSED_OVER in each for each in clicks.problems)
    assert other.problems


async def test_a_running_service_reads_all_of_it_and_its_memory_while_it_goes_on(copy: Path) -> None:
    said = list[Event]()
    async with opened(copy, said.append) as service:
        clicks, other = await check(service)
        assert problems([clicks, other]) == []
        assert clicks.checkpoints == 2
        assert clicks.rows >= 2 * 68, "those of the view, too"
        change(files_of(copy, "data")[-1], 60)
        clicks, other = await check(service)
        assert any(PASSED_OVER in each for each in clicks.problems)
        assert not service.models["clicks"].tables.failed
        service.models["clicks"].tables[0].rows.view(np.uint8)[7, 1] ^= 16
        clicks, other = await check(service)
        assert any("row 7: the service reloads the model" in each for each in clicks.problems)
        assert "row 7" in service.models["clicks"].tables.failed
    events = [each for each in said if each.kind is EventKind.CHECKED]
    assert [each.subject for each in events] == [{"by": "who asks"}] * 3
    assert events[0].text == "0 problems in the stored data"


async def test_a_cut_of_a_new_layout_that_is_sealed_as_the_log_is_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as service:
        await publish(service)
        recover, loop = ModelStore.load, asyncio.get_running_loop()

        async def cut() -> None:
            position = service.models["clicks"].position
            await publish(service, 2, tables=[ITEM, USER], run="run-2", started=2, continues=position)

        def slow(store: ModelStore, record: Mapping[str, Any]) -> None:
            recover(store, record)
            asyncio.run_coroutine_threadsafe(cut(), loop).result(20)

        monkeypatch.setattr(ModelStore, "load", slow)
        assert problems(await check(service)) == []


FOREIGN = [
    "notes.txt",
    "models",
    "log/notes.txt",
    "checkpoints/notes.txt",
    "checkpoints/clicks/notes.txt",
    "checkpoints/clicks/data/notes.txt",
    "checkpoints/clicks/manifests/00.json",
]


def test_files_that_no_service_has_made_are_named_and_left_alone(copy: Path) -> None:
    for name in FOREIGN:
        (copy / name).write_bytes(b"a user's")
    (copy / "lost+found").mkdir()
    before = contents(copy)
    found = check_data_directory(copy)
    assert found[-1].unknown == sorted(str(copy / name) for name in FOREIGN)
    assert problems(found) == []
    assert contents(copy) == before


def test_what_is_no_data_directory_or_in_use_or_of_another_format_is_not_read(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is not a data directory"):
        check_data_directory(tmp_path / "nothing")
    with lock_data_directory(copy), pytest.raises(StorageFailed, match="in use by another service"):
        check_data_directory(copy)
    with closing(LmdbStore(LogOptions(directory=copy / "log"))) as log:
        log.put("data-format", b"2").result(20)
    with pytest.raises(StorageFailed, match="has format 2, this version reads 1: update deltasync"):
        check_data_directory(copy)


def test_what_cannot_be_read_now_is_not_called_damaged(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status says so too: it could not read."""
    heads = Heads(monkeypatch)
    heads.opened = False
    with pytest.raises(VolumeFailed, match=r"Input/output error .*: look for errors of the device"):
        check_data_directory(copy)
    status, _, said = deltasync("fsck", "--data-dir", str(copy))
    assert (status, "restore" in said) == (2, False)


def test_the_command_says_what_it_has_read_and_its_status_whether_something_is_damaged(copy: Path) -> None:
    status, out, _ = deltasync("fsck", "--data-dir", str(copy))
    assert status == 0
    assert "model clicks: 2 checkpoints, " in out
    assert out.endswith("nothing is damaged\n")
    _change_newest_data(copy)
    (copy / "notes.txt").touch()
    status, out, _ = deltasync("fsck", "--data-dir", str(copy))
    assert status == 1
    assert PASSED_OVER in out
    assert f"{copy / 'notes.txt'} was not made by a service; leaving it alone" in out
    assert out.endswith("something is damaged\n")
    status, out, _ = deltasync("fsck", "--data-dir", str(copy), "--json")
    assert '"clean": false' in out
