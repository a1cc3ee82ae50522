"""Readers of shared memory while its mirror, its files and their own process change."""

import copy
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from tests.support.forked_child import answers_in_a_fork, error_of
from tests.support.keyed_model import ITEM, ROWS, USER
from tests.support.shared_memory import attached, header, mirror, move, pins, release_of, remove_files, served_side
from tests.support.waiting import wait_for

from deltasync.base.decision import Decision
from deltasync.base.errors import Contradiction, InvalidInput, ServiceUnavailable, StorageFailed
from deltasync.client import SharedReader, TableSpec, TornTarget
from deltasync.client.shared import layout

IDS = np.arange(ROWS)
NOBODY = 65534


@pytest.mark.parametrize("remove", [shutil.rmtree, remove_files, move])
def test_no_reader_reads_another_mirror_that_replaces_its_own(
    folder: Path, remove: Callable[[Path], None]
) -> None:
    target = mirror(folder, longest_pin_seconds=600.0)
    target.apply(release_of(1, USER, ITEM))
    target.note_readiness(Decision(True, "it has caught up"))
    reader, pinning = attached(folder), attached(folder)
    assert reader.lookup(USER.name, IDS)[0].max() == 1.0
    assert reader.readiness.yes
    target.close()
    remove(layout.folder_of("m", folder))
    assert reader.is_removed
    target = mirror(folder, longest_pin_seconds=600.0)
    target.apply(release_of(99, USER, ITEM, resync=True))
    with pytest.raises(ServiceUnavailable, match="was moved or removed: attach again"):
        reader.lookup(ITEM.name, IDS)
    with pytest.raises(ServiceUnavailable, match="was moved or removed: attach again"), pinning.reading():
        pass
    assert reader.lookup(USER.name, IDS)[0].max() == 1.0, "what it has mapped stays"
    assert "was moved or removed" in reader.readiness.reason
    again = attached(folder)
    assert not again.is_removed
    assert again.lookup(ITEM.name, IDS)[0].min() == 99.0
    target.close()


def test_a_folder_of_another_user_needs_the_owner_argument(folder: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root, to give a folder away")
    target, path = mirror(folder, longest_pin_seconds=600.0), layout.folder_of("m", folder)
    target.apply(release_of(1))
    target.close()
    os.chown(path, NOBODY, -1)
    for owner in (None, os.geteuid(), NOBODY - 1):
        with pytest.raises(InvalidInput, match=rf"belongs to user {NOBODY}, .* pass owner={NOBODY}"):
            SharedReader("m", directory=folder, owner=owner)
    assert SharedReader("m", directory=folder, owner=NOBODY).version().version == 1


def test_links_are_not_followed(folder: Path) -> None:
    target, path = mirror(folder, longest_pin_seconds=600.0), layout.folder_of("m", folder)
    target.apply(release_of(1))
    folder.joinpath("deltasync-link").symlink_to(path)
    with pytest.raises(InvalidInput, match="is a link: name the folder to which it leads"):
        SharedReader("link", directory=folder)
    for name in (layout.READERS, *(each.name for each in path.glob("[0-9a-f]"))):
        (path / name).rename(folder / name)
        (path / name).symlink_to(folder / name)
    reader = attached(folder)
    with pytest.raises(StorageFailed, match=r"cannot be used: Too many levels of symbolic links"):
        reader.lookup(USER.name, IDS)
    with (
        pytest.raises(StorageFailed, match=r"readers cannot be used: Too many levels of symbolic links"),
        reader.reading(),
    ):
        pass
    (path / layout.CONTROL).rename(folder / layout.CONTROL)
    (path / layout.CONTROL).symlink_to(folder / layout.CONTROL)
    with pytest.raises(ServiceUnavailable, match="cannot be read: Too many levels of symbolic links"):
        attached(folder)
    target.close()


def test_a_reader_cannot_be_pickled(folder: Path) -> None:
    target = mirror(folder, longest_pin_seconds=600.0)
    reader = attached(folder)
    for use in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or sent .* make one there, SharedReader\('m'\)"):
            use(reader)
    target.close()


def test_a_stopped_mirror_is_not_ready_whatever_its_header_says(folder: Path) -> None:
    target, reader = mirror(folder, longest_pin_seconds=600.0), attached(folder)
    target.apply(release_of(1))
    target.note_readiness(Decision(True, "it has caught up"))
    assert reader.readiness.yes
    target.close()
    header(folder)["ready"] = 1
    assert reader.readiness == Decision(False, "its mirror has stopped")


def test_a_reader_gives_up_if_the_only_version_is_being_written(folder: Path) -> None:
    target, reader = mirror(folder, longest_pin_seconds=600.0), attached(folder)
    target.apply(release_of(1))
    served_side(folder)["sequence"] += 1
    with pytest.raises(ServiceUnavailable, match="try again"), reader.reading():
        pass
    with pytest.raises(ServiceUnavailable, match="try again"):
        reader.lookup(USER.name, IDS)
    served_side(folder)["sequence"] += 1
    with reader.reading() as now:
        assert now.version == 1
    target.close()


def test_a_block_that_fails_on_torn_rows_says_that_they_are_torn(folder: Path) -> None:
    target, reader = mirror(folder, longest_pin_seconds=0.05), attached(folder)
    target.apply(release_of(1))
    with pytest.raises(ValueError, match="its own"), reader.reading():
        raise ValueError("its own")

    def fail() -> None:
        for version in (2, 3):
            target.apply(release_of(version))
        raise ValueError("odd rows")

    with pytest.raises(TornTarget, match="wrote over the rows") as raised, reader.reading():
        fail()
    assert str(raised.value.__cause__) == "odd rows"
    target.close()


def test_a_thread_cannot_nest_blocks_of_reading(folder: Path) -> None:
    target, reader = mirror(folder, longest_pin_seconds=600.0), attached(folder)
    target.apply(release_of(1))
    with reader.reading() as now:
        with pytest.raises(Contradiction, match="already in a block of reading"), reader.reading():
            pass
        assert len(pins(folder)) == 1
        assert now.version == 1
    assert pins(folder) == []
    with reader.reading():
        pass
    target.close()


def test_a_pin_ends_with_its_process_also_if_a_child_of_it_lives(folder: Path) -> None:
    target = mirror(folder, longest_pin_seconds=600.0)
    target.apply(release_of(1))
    started, ending = os.pipe(), os.pipe()

    def pin_and_fork() -> None:
        with attached(folder).reading():
            if not os.fork():
                os.write(started[1], b"x")
                os.close(ending[1])
                os.read(ending[0], 1)
            os._exit(0)

    process = get_context("fork").Process(target=pin_and_fork)
    process.start()
    process.join()
    os.read(started[0], 1)
    assert pins(folder) == [], "the child has no lock on the entry"
    for each in (*started, *ending):
        os.close(each)
    target.close()


def test_a_child_that_is_forked_in_a_block_can_pin(folder: Path) -> None:
    target, reader = mirror(folder, longest_pin_seconds=600.0), attached(folder)
    target.apply(release_of(1))

    def pinned() -> dict[str, list[int]]:
        with reader.reading():
            return {"pins": pins(folder)}

    with reader.reading():
        assert answers_in_a_fork(pinned) == {"pins": [0, 1]}
        assert pins(folder) == [0]
    assert pins(folder) == []
    target.close()


@pytest.mark.parametrize("size", [None, 0, 3])
def test_a_missing_or_short_file_is_an_error_that_names_it(folder: Path, size: int | None) -> None:
    target = mirror(folder, longest_pin_seconds=600.0)
    target.apply(release_of(1))
    for each in layout.folder_of("m", folder).iterdir():
        if each.name not in (layout.CONTROL, layout.READERS):
            each.unlink() if size is None else os.truncate(each, size)
    reader = attached(folder)
    with pytest.raises(StorageFailed, match=r"deltasync-m/\w+ cannot be used .* start the mirror"):
        reader.lookup(USER.name, IDS)
    with pytest.raises(StorageFailed, match="cannot be used"), reader.reading():
        pass
    with pytest.raises(StorageFailed, match="cannot be used"):
        reader.lookup_keys(USER.name, IDS)
    target.close()


def test_a_damaged_number_of_the_side_is_no_crash(folder: Path) -> None:
    target, reader = mirror(folder, longest_pin_seconds=600.0), attached(folder)
    target.apply(release_of(1))
    header(folder)["served"] += 2**40
    assert reader.lookup(USER.name, IDS)[1] == 1
    target.close()


def test_arrays_are_made_once_for_all_versions_in_them(folder: Path) -> None:
    target, reader = mirror(folder, longest_pin_seconds=600.0), attached(folder)
    made = []
    for version in range(1, 5):
        target.apply(release_of(version, USER, ITEM))
        for _ in range(2):
            with reader.reading() as now:
                assert {rows.max() for rows in now.tables.values()} == {version}
                made.append(now)
    first, second = made[:2], made[2:4]
    for some, later in ((first, made[4:6]), (second, made[6:])):
        for each in (*some, *later):
            assert each.tables is some[0].tables
            assert each.keyed is some[0].keyed
            assert each.specs is some[0].specs
    target.apply(release_of(5, USER))
    with reader.reading() as now:
        assert list(now.tables) == list(now.keyed) == [each.name for each in now.specs] == [USER.name]
    target.close()


def test_a_pinned_table_keeps_its_size_while_the_mirror_grows_it(folder: Path) -> None:
    target, reader, other = mirror(folder, longest_pin_seconds=600.0), attached(folder), attached(folder)
    target.apply(release_of(1))
    larger = TableSpec(USER.name, 3 * ROWS, USER.dim)
    with reader.reading() as now:
        applying = threading.Thread(target=target.apply, args=(release_of(2, larger),))
        applying.start()
        wait_for(lambda: other.version().version == 2)
        assert now.tables[USER.name].shape == (ROWS, USER.dim)
        assert {now.tables[USER.name].min(), now.tables[USER.name].max()} == {1.0}
        assert other.lookup(USER.name, np.arange(3 * ROWS))[0].min() == 2.0
    applying.join()
    with reader.reading() as now:
        assert now.tables[USER.name].shape == (3 * ROWS, USER.dim)
        assert now.tables[USER.name].min() == 2.0
    target.close()


def read_and_stop(folder: Path, channel: Connection) -> None:
    """Stop in the middle of a pinned read, and answer afterwards."""
    try:
        with attached(folder).reading() as now:
            os.kill(os.getpid(), signal.SIGSTOP)
            answer = float(now.tables[USER.name].sum())
        channel.send(answer)
    except TornTarget:
        channel.send("torn")


def test_a_suspended_reader_loses_its_pin_and_gets_a_torn_target(folder: Path) -> None:
    target = mirror(folder, longest_pin_seconds=0.05)
    target.apply(release_of(1))
    context = get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=read_and_stop, args=(folder, there))
    process.start()
    assert process.pid
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert pins(folder)
    for version in (2, 3):
        target.apply(release_of(version))
    assert attached(folder).version().version == 3
    os.kill(process.pid, signal.SIGCONT)
    assert here.recv() == "torn"
    process.join(20)
    target.close()


def as_another(folder: Path, group: int) -> dict[str, object]:
    """What a process of another user and a group may do."""
    os.setgroups([])
    os.setgid(group)
    os.setuid(NOBODY)
    if refused := error_of(lambda: attached(folder)):
        return {"refused": refused}
    reader, path = attached(folder), layout.folder_of("m", folder)
    with reader.reading() as now:
        version = now.version
    can_write = [each.name for each in path.iterdir() if os.access(each, os.W_OK)]
    return {"version": version, "can_write": can_write, "can_add": os.access(path, os.W_OK)}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize(
    ("readable_by", "own_group", "may_read"),
    [
        ("owner", True, False),
        ("owner", False, False),
        ("group", True, True),
        ("group", False, False),
        ("all", False, True),
    ],
)
def test_other_users_read_as_allowed_and_write_only_the_readers_file(
    folder: Path, readable_by: str, own_group: bool, may_read: bool
) -> None:
    folder.chmod(0o755)
    target = mirror(folder, readable_by=readable_by)
    target.apply(release_of(1))
    attached(folder).lookup_keys(USER.name, IDS)  # Compiles what the child needs, which may not write the cache.
    found = answers_in_a_fork(lambda: as_another(folder, os.getegid() if own_group else NOBODY))
    if may_read:
        assert found == {"version": 1, "can_write": [layout.READERS], "can_add": False}
    else:
        assert "ServiceUnavailable: mirror 'm' cannot be read: Permission denied" in found["refused"]
    target.close()
