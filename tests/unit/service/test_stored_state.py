"""What is wrong with a data directory that no service uses is found without changing it, and mended on request."""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from tests.support import flips
from tests.support.command import deltasync
from tests.support.damage import change_value, entries
from tests.support.log import Heads
from tests.support.wire import USER

from deltasync.client.keyed.redis_layout import Meta
from deltasync.core.digests import row_digests
from deltasync.core.errors import Contradiction, InvalidInput, StorageFailed
from deltasync.core.tags import tag_key, tags_of
from deltasync.feeds.model import Model
from deltasync.service.mending import mend_data_directory
from deltasync.service.stored_state import Checked, check_data_directory
from deltasync.snapshots.manifest import unpack_manifest
from deltasync.storage.data_directory import lock_data_directory
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_format import check_log
from deltasync.storage.log_store import LogOptions
from deltasync.storage.records import pack_json, unpack_json
from deltasync.storage.volume import VolumeFailed, refused


@pytest.fixture(scope="module", params=[True, False], ids=["all flushed", "rows in the log"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state") / "whole"
    flips.write(folder, flushed=request.param)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy"


def shared(copy: Path, below: str) -> Path:
    (path,) = (copy / "models" / "clicks" / below).rglob("shared")
    return path


def change(path: Path, byte: int, bit: int = 4) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("lock", "lock.mdb")
    }


def left(checked: Checked) -> list[tuple[str, str, str]]:
    return [(each.consumer, each.table, each.reason.split(":")[0]) for each in checked.tables if each.left]


def test_nothing_is_found_where_nothing_is_wrong_and_nothing_is_changed(copy: Path) -> None:
    before = contents(copy)
    found = check_data_directory(copy)
    assert (found.problems, found.unused, found.foreign, left(found)) == ([], [], [], [])
    assert [(each.consumer, each.rows) for each in found.tables] == [
        ("", 40),
        ("", 30),
        ("small", 40),
        ("small", 30),
    ]
    assert contents(copy) == before


# Of the first table: its rows begin at byte 0, 16 bytes each, and its stamps after them.
@pytest.mark.parametrize(
    ("byte", "said"),
    [
        (16 * 30, "other bits than were stored in row 30"),
        (40 * 16 + 8 * 30 + 2, "other stamps or digests than were stored of row 30"),
    ],
)
def test_a_changed_bit_of_a_row_or_a_stamp_is_named_and_what_helps(copy: Path, byte: int, said: str) -> None:
    change(shared(copy, "tables"), byte)
    found = check_data_directory(copy)
    assert left(found) == [("", USER.name, said)]
    assert "run fsck --mend" in next(each.reason for each in found.tables if each.left)


def test_what_replicas_hold_is_looked_at_too(copy: Path) -> None:
    change(shared(copy, "views"), 3)
    assert [consumer for consumer, *_ in left(check_data_directory(copy))] == ["small"]


def _lose_folder(copy: Path) -> None:
    shutil.rmtree(shared(copy, "tables").parent)


def _cut_off(copy: Path) -> None:
    path = shared(copy, "tables")
    path.write_bytes(path.read_bytes()[:-100])


def _change_log(copy: Path) -> None:
    change_value(copy / "log", "meta", b"consumer/plain", 100)


def _change_seal(copy: Path) -> None:
    key = next(key for key in entries(copy / "log", "records") if b"seals/clicks" in key)
    change_value(copy / "log", "records", key, 100)


def _lose_view(copy: Path) -> None:
    shutil.rmtree(shared(copy, "views").parent)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_lose_folder, "is missing: restore a backup"),
        (_cut_off, "bytes, expected"),
        (_change_log, "record consumer/plain is damaged"),
        (_change_seal, "is damaged: restore a backup"),
        (_lose_view, "is missing: a service makes what its replicas hold anew"),
    ],
)
def test_what_is_missing_or_cut_off_or_changed_is_named(
    copy: Path, harm: Callable[[Path], None], said: str
) -> None:
    harm(copy)
    problems = check_data_directory(copy).problems
    assert any(said in each for each in problems), problems
    assert len(problems) == len(set(problems))  # Also of a file that several tables share.


HASH, TABLE_FILE = "0123456789abcdef" * 2, "user-99e389d25c10af32.rows"
# What a service may have left behind, by the outermost that is named.
LEFT_BEHIND = {
    f"clicks/tables/{HASH}": f"clicks/tables/{HASH}/shared",
    f"clicks/tables/{TABLE_FILE}": f"clicks/tables/{TABLE_FILE}",
    "clicks/tmpab_12xyz": "clicks/tmpab_12xyz",
    f"clicks/views/small/{HASH}": f"clicks/views/small/{HASH}/norms/{TABLE_FILE}",
    "clicks/views/gone": f"clicks/views/gone/{HASH}/user-99e389d25c10af32.0123456789abcdef.digests",
    "other": f"other/tables/{HASH}/shared",
    "empty": "empty",
}
FOREIGN = [
    "../notes.txt",
    "../log/notes.txt",
    "notes.txt",
    "old backup",
    "clicks/notes.txt",
    "clicks/tables/notes",
    f"clicks/tables/{HASH}/notes.txt",
    "clicks/views/gone/notes.txt",
    "third/checkpoint.pt",
]


def test_what_a_service_has_left_behind_is_named_and_removed_and_nothing_else_is(copy: Path) -> None:
    models, kept = copy / "models", {path for path in copy.rglob("*") if path.is_file()}
    for name in LEFT_BEHIND.values():
        path = models / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name == "empty" else path.write_bytes(b"something")
    assert check_data_directory(copy).unused == sorted(models / name for name in LEFT_BEHIND)
    assert check_data_directory(copy).foreign == []
    for name in FOREIGN:
        path = models / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"a user's")
    (models / "lost+found").mkdir()
    (models / "lost+found" / "x").touch()
    (models / "linked").symlink_to(models / "old backup")
    foreign = {(models / name).resolve() for name in FOREIGN} | {models / "linked"}
    for found in (check_data_directory(copy), mend_data_directory(copy)):
        assert {path.resolve() if not path.is_symlink() else path for path in found.foreign} == foreign
    assert foreign | kept | {models / "lost+found" / "x"} == {
        path for path in copy.rglob("*") if path.is_file() or path.is_symlink()
    }
    again = check_data_directory(copy)
    assert (again.unused, again.problems, left(again)) == ([], [], [])


def test_what_was_removed_is_named(copy: Path) -> None:
    folder = copy / "models" / "other"
    (folder / "tables" / HASH).mkdir(parents=True)
    assert mend_data_directory(copy).removed == [folder]


def test_nothing_of_a_model_is_called_unused_whose_record_cannot_be_read(copy: Path) -> None:
    change_value(copy / "log", "meta", b"model/clicks", 100)
    assert check_data_directory(copy).unused == []


def test_a_volume_of_its_own_for_models_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "data" / "models" / "lost+found").mkdir(parents=True)
    with closing(LmdbStore(LogOptions(directory=tmp_path / "data" / "log"))) as log:
        check_log(log, tmp_path / "data" / "models")


def test_what_is_no_data_directory_or_in_use_or_incomplete_is_not_mended(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is no data directory"):
        check_data_directory(tmp_path / "nothing")
    for look in (check_data_directory, mend_data_directory):
        with lock_data_directory(copy), pytest.raises(StorageFailed, match="in use by another service"):
            look(copy)
    _lose_folder(copy)
    with pytest.raises(StorageFailed, match="is missing"):
        mend_data_directory(copy)


def test_stamps_are_mended_and_rows_where_the_log_has_them(copy: Path) -> None:
    """What it has no more stays named."""
    path = shared(copy, "tables")
    change(path, 40 * 16 + 8 * 30 + 2)
    change(path, 16 * 29)
    found = {(each.consumer, each.table): each for each in mend_data_directory(copy).tables}
    user = found["", USER.name]
    assert (user.damaged, user.restamped, user.left) == (1, 1, 1)
    assert user.reason.startswith("row 29: the trainer publishes them again")
    again = check_data_directory(copy)
    assert left(again) == [("", USER.name, "other bits than were stored in row 29")]


def test_a_tag_is_of_one_row_of_one_table(copy: Path) -> None:
    """Rows that have changed places with all that is kept of them are found."""
    path = shared(copy, "tables")
    content = path.read_bytes()
    array = np.frombuffer(content, np.uint8).copy()
    sizes, start = [16, 8, 2, 8, 4], 0
    for size in sizes:
        rows = array[start : start + 40 * size].reshape(40, size)
        rows[[30, 31]] = rows[[31, 30]]
        start += -(-40 * size // 64) * 64
    path.write_bytes(array.tobytes())
    assert left(check_data_directory(copy)) == [
        ("", USER.name, "other stamps or digests than were stored of rows 30 to 31")
    ]


def _change_whole(copy: Path, row: int) -> None:
    """Give a row of the first table of the model another value, and the digest and the tag that it has then."""
    path, stamps_at, tags_at, digests_at = shared(copy, "tables"), 640, 960, 1088
    content = bytearray(path.read_bytes())
    values, stamps = np.full((1, 4), 0.25, "<f4"), np.frombuffer(content, np.int64, 40, stamps_at)
    digests = row_digests(values)
    tags = tags_of(tag_key("rows", USER), np.array([row]), stamps[row : row + 1].copy(), digests[:, None])
    content[row * 16 : row * 16 + 16] = values.tobytes()
    content[tags_at + row * 2 : tags_at + row * 2 + 2] = tags.tobytes()
    content[digests_at + row * 8 : digests_at + row * 8 + 8] = digests.tobytes()
    path.write_bytes(content)


def test_rows_that_replicas_hold_otherwise_than_the_model_are_named_and_to_be_sent_once_mended(copy: Path) -> None:
    _change_whole(copy, 30)
    words = "rows that differ from the model's, and nothing says that they are to be sent"
    assert left(check_data_directory(copy)) == [("small", USER.name, words)]
    found = {(each.consumer, each.table): each for each in mend_data_directory(copy).tables}
    assert (found["small", USER.name].restamped, found["small", USER.name].left) == (1, 0)
    assert found["", USER.name].restamped == 0
    assert left(check_data_directory(copy)) == [], "it is marked"


def test_a_view_of_a_version_that_the_model_does_not_have_is_named(copy: Path) -> None:
    with closing(LmdbStore(LogOptions(directory=copy / "log"))) as log:
        record = unpack_json(log.items("view/small")[""])
        log.put("view/small", pack_json(record | {"seen": 9})).result()
    (problem,) = check_data_directory(copy).problems
    assert "what its replicas hold is of version 9, and the newest of model 'clicks' is 4" in problem


def test_mending_waits_for_no_volume_that_refuses_something(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise refused("no table", copy, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    monkeypatch.setattr(Model, "recover", refuse)
    with pytest.raises(VolumeFailed, match="No space left"):
        mend_data_directory(copy)


def test_what_a_later_version_has_written_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """A start on such a data directory is refused likewise, see `test_damage`."""
    words = "is of format 2, this version reads 1: update deltasync$"
    with pytest.raises(StorageFailed, match=f"^snapshot s {words}"):
        unpack_manifest("s", b'{"format": 2, "elsewhere": {}}')
    with closing(LmdbStore(LogOptions(directory=tmp_path / "log"))) as log:
        log.put("format", b"2").result(20)
    with pytest.raises(InvalidInput, match=f"^{tmp_path} {words}"):
        check_data_directory(tmp_path)
    with pytest.raises(Contradiction, match="of format '2', this version of deltasync writes and reads 1: update"):
        Meta.of_fields({b"format": b"2"}, "server")


def test_what_cannot_be_read_now_is_not_called_damaged(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status says so too: it could not look."""
    heads = Heads(monkeypatch)
    heads.opened = False
    with pytest.raises(VolumeFailed, match=r"Input/output error .*: look for the device's errors"):
        check_data_directory(copy)
    status, _, said = deltasync("fsck", "--data-dir", str(copy))
    assert (status, "restore" in said) == (2, False)
    heads.opened = True
    with monkeypatch.context() as patch:
        patch.setattr(
            "deltasync.service.stored_rows.np.memmap", mock.Mock(side_effect=OSError(5, "Input/output error"))
        )
        with pytest.raises(VolumeFailed, match=f"{copy} cannot be read: Input/output error"):
            check_data_directory(copy)
    assert not check_data_directory(copy).problems
