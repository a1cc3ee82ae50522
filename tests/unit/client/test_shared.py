"""Tables in shared memory: one target writes them, readers in this and other processes read them."""

import fcntl
import os
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.keyed_model import BIAS, CHANGES, ITEM, ROWS, TABLES, USER, Change, KeyedModel
from tests.support.shared_memory import attached, mirror, move, release_of, remove_files
from tests.support.small_memory import forked, in_new_process
from tests.support.waiting import wait_for

from deltasync.base.decision import Decision
from deltasync.base.errors import Contradiction, InvalidInput, NotFound, ServiceUnavailable, StorageFailed
from deltasync.client import NumpyTarget, Release, TableSpec, TornTarget
from deltasync.client.shared import layout
from deltasync.client.shared.reader import SharedReader
from deltasync.client.shared.target import SharedTarget
from deltasync.client.targets.checksums import TargetChecksums

WHOLE = st.frozensets(st.sampled_from([table.name for table in TABLES]))


def keyed_of(reader: SharedReader) -> dict[str, dict[int, float]]:
    """The first value of each row by key, looked up in two ways."""
    with reader.reading() as now:
        keys = {name: now.keyed[name].keys() for name in (USER.name, ITEM.name, BIAS.name)}
        version = now.version
    held = {}
    for name, some in keys.items():
        values, exist, at = reader.lookup_keys(name, some[::-1])
        assert exist.all()
        assert at == version
        held[name] = dict(zip(some[::-1].tolist(), values[:, 0].tolist(), strict=True))
    return held


@given(steps=st.lists(st.tuples(CHANGES, st.booleans(), WHOLE, st.booleans()), min_size=1, max_size=6))
def test_readers_see_the_model_also_after_restarts_of_the_mirror(
    steps: list[tuple[Change, bool, frozenset[str], bool]],
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        model, plain = KeyedModel(), NumpyTarget()
        target = mirror(Path(name))
        reader = attached(Path(name))
        checksums, by_row = TargetChecksums(target), TargetChecksums(plain)
        for change, resync, whole, restart in steps:
            held = model.version
            model.change(change)
            release = model.release(held, resync=resync or not held, whole=whole)
            plain.apply(release)
            target.apply(release)
            assert checksums.after(release) == by_row.after(release)
            assert keyed_of(reader) == model.expected()
            assert reader.version().version == model.version
            for table, rows in plain.tables.items():
                found, _ = reader.lookup(table, np.arange(len(rows) + 1))
                assert found[:-1].tobytes() == rows.tobytes()
                assert not found[-1].any()
            if restart:
                target.close()
                target = mirror(Path(name))
                assert target.position == release.position
                checksums = TargetChecksums(target)
        target.close()


def test_a_pinned_version_stays_until_its_block_ends_or_the_limit(folder: Path) -> None:
    target = mirror(folder, longest_pin_seconds=0.05)
    target.apply(release_of(1))
    reader = attached(folder)
    with reader.reading() as now:
        applying = threading.Thread(target=target.apply, args=(release_of(2),))
        applying.start()
        wait_for(lambda: reader.version().version == 2)
        assert now.version == 1
        assert now.tables[USER.name].max() == 1.0, "others have the next version already"
    applying.join()
    with pytest.raises(TornTarget, match="wrote over the rows"), reader.reading() as now:
        target.apply(release_of(3))
    with reader.reading() as now:
        assert now.tables[USER.name].min() == 3.0
        assert not now.tables[USER.name].flags.writeable
    target.close()


def test_no_reader_waits_for_a_first_copy_that_is_arriving(folder: Path) -> None:
    target = mirror(folder)
    reader = attached(folder)
    assert target.takes_parts
    target.apply(replace(release_of(1), more=True))
    with pytest.raises(ServiceUnavailable, match="has no version yet"):
        reader.lookup(USER.name, np.arange(1))
    with pytest.raises(ServiceUnavailable, match="has no version yet"), reader.reading():
        pass
    target.apply(release_of(1))
    with reader.reading() as now:
        assert now.version == 1
    target.close()


def test_a_mirror_killed_while_writing_its_readiness_recovers(folder: Path) -> None:
    def die() -> None:
        target = mirror(folder)
        target.note_readiness(Decision(True, Last("the last word")))

    class Last(str):
        def encode(self, *_: object) -> bytes:
            os._exit(0)

    process = get_context("fork").Process(target=die)
    process.start()
    process.join(20)
    target = mirror(folder)
    target.note_readiness(Decision(True, "it has caught up"))
    header = np.fromfile(layout.folder_of("m", folder) / layout.CONTROL, layout.HEADER, 1)
    assert header["state_sequence"][0] % 2 == 0
    target.close()


def test_a_reader_that_damages_what_it_may_write_harms_nobody(folder: Path) -> None:
    target = mirror(folder, longest_pin_seconds=60.0)
    target.apply(release_of(1))
    reader = attached(folder)
    for content in (b"", b"\xff" * 100, b"\xff" * layout.READERS_BYTES):
        with reader.reading() as now:
            assert now.version == 1
        (layout.folder_of("m", folder) / layout.READERS).write_bytes(content)
        with reader.reading() as now:
            assert now.tables[USER.name].max() == 1.0
    target.apply(release_of(2))
    assert reader.version().version == 2
    target.close()


def test_a_reader_never_confuses_a_new_file_with_an_old_one(folder: Path) -> None:
    def both(version: int) -> Release:
        users, items = (release_of(version, table) for table in (USER, ITEM))
        return replace(users, tables=[ITEM, USER], rows=[*items.rows, *users.rows], resync=version == 1)

    target = mirror(folder)
    reader = attached(folder)
    for version in (1, 2):
        target.apply(both(version))
    assert reader.lookup(USER.name, np.arange(ROWS))[0].max() == 2.0
    for version in (3, 4, 5):
        target.apply(release_of(version, ITEM))
    target.close()
    target = mirror(folder)
    target.apply(both(6))
    assert reader.lookup(USER.name, np.arange(ROWS))[0].max() == 6.0
    target.close()


def test_no_reader_sees_a_torn_row_during_releases(folder: Path) -> None:
    def look(name: str, found: "list[str]") -> None:
        reader, ids = attached(Path(name)), np.arange(table.rows)
        for turn in range(200):
            rows, version = reader.lookup(table.name, ids)
            if not (rows == version).all():
                found.append(f"torn: {version}")
            if turn % 10 == 0:
                with reader.reading() as now:
                    if not (now.tables[table.name] == now.version).all():
                        found.append(f"torn whole: {now.version}")

    table = TableSpec("wide", 2000, 64)
    target = mirror(folder)
    target.apply(release_of(1, table, resync=True))
    found = list[str]()
    threads = [threading.Thread(target=look, args=(str(folder), found)) for _ in range(3)]
    for each in threads:
        each.start()
    version = 1
    while any(each.is_alive() for each in threads):
        version += 1
        target.apply(release_of(version, table))
    assert found == []
    assert version > 3
    target.close()


def test_tables_grow_come_and_go_and_leave_no_file(folder: Path) -> None:
    target = mirror(folder)
    reader = attached(folder)
    target.apply(release_of(1))
    larger = TableSpec(USER.name, 3 * ROWS, USER.dim)
    target.apply(release_of(2, larger))
    assert reader.lookup(USER.name, np.arange(3 * ROWS))[0].min() == 2.0
    target.apply(release_of(3, ITEM))
    assert reader.lookup(ITEM.name, np.arange(ROWS))[0].min() == 3.0
    with pytest.raises(NotFound, match=f"no table '{USER.name}'"):
        reader.lookup(USER.name, np.arange(1))
    arrays = [each.name for each in layout.folder_of("m", folder).iterdir()]
    assert len(arrays) == 3 + 4, "control, writer and readers, and rows and masks of one table on two sides"
    target.close()


def test_foreign_or_damaged_mirrors_are_refused(folder: Path) -> None:
    with pytest.raises(NotFound, match="no mirror 'm' in"):
        attached(folder)
    target = mirror(folder)
    reader = attached(folder)
    assert not reader.readiness.yes
    with pytest.raises(ServiceUnavailable, match="has no version yet"):
        reader.lookup(USER.name, np.arange(1))
    with pytest.raises(Contradiction, match="another process writes"):
        mirror(folder)
    target.apply(release_of(1))
    target.note_readiness(Decision(True, "it has caught up"))
    assert reader.readiness == Decision(True, "it has caught up")
    with pytest.raises(InvalidInput, match="row -1 of table"):
        reader.lookup(USER.name, np.array([-1]))
    other = release_of(2)
    with pytest.raises(Contradiction, match="has model 'clicks', the consumer's is 'views'"):
        target.apply(Release(**{**vars(other), "model": "views"}))
    target.close()
    with pytest.raises(InvalidInput, match="follows consumer 'predictors', not 'canary'"):
        SharedTarget("m", "canary", directory=folder)
    control = layout.folder_of("m", folder) / layout.CONTROL
    content = bytearray(control.read_bytes()[: layout.HEADER.itemsize])
    content[8] = 9
    with control.open("r+b") as file:
        file.write(content)
    for open_it in (attached, mirror):
        with pytest.raises(InvalidInput, match="has layout 9"):
            open_it(folder)
    control.write_bytes(b"something else")
    for open_it in (attached, mirror):
        with pytest.raises(InvalidInput, match="is not a mirror's folder"):
            open_it(folder)


MODES = {"owner": (0o700, 0o600, 0o600), "group": (0o750, 0o640, 0o660), "all": (0o755, 0o644, 0o666)}


@pytest.mark.parametrize(("first", "then"), [("owner", "all"), ("all", "group"), ("group", "owner")])
def test_file_modes_follow_readable_by(folder: Path, first: str, then: str) -> None:
    for version, readable_by in enumerate((first, then), 1):
        target = mirror(folder, readable_by=readable_by)
        target.apply(release_of(version, resync=True))
        path, (mode, of_file, of_readers) = layout.folder_of("m", folder), MODES[readable_by]
        modes = {each.name: each.stat().st_mode & 0o777 for each in path.iterdir()}
        assert path.stat().st_mode & 0o777 == mode
        assert modes.pop(layout.READERS) == of_readers
        assert modes.pop(layout.WRITER) == 0o600
        assert set(modes.values()) == {of_file}
        target.close()


def test_a_started_mirror_is_not_ready_although_its_predecessor_was(folder: Path) -> None:
    def die() -> None:
        target = mirror(folder)
        target.apply(release_of(1))
        target.note_readiness(Decision(True, "it has caught up"))

    assert forked(die) == 0
    reader = attached(folder)
    assert reader.readiness.yes
    target = mirror(folder)
    assert reader.readiness == Decision(False, "its mirror has just started")
    target.close()


def test_heartbeats_use_a_clock_that_nobody_sets(folder: Path) -> None:
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    target = mirror(folder)
    target.note_readiness(Decision(True, "it has caught up"))
    control = np.memmap(layout.folder_of("m", folder) / layout.CONTROL, layout.HEADER, shape=(1,))
    assert before <= control["alive_ns"][0] <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    reader = attached(folder)
    assert reader.readiness.yes
    for seconds in (-3600, 3600):  # The later time is of before the host was started again.
        control["alive_ns"] = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + seconds * 10**9
        assert "its mirror has stopped" in reader.readiness.reason
    target.close()


def test_a_closed_target_writes_nothing(folder: Path) -> None:
    target = mirror(folder)
    target.apply(release_of(1))
    target.close()
    next_target = mirror(folder)
    next_target.note_readiness(Decision(True, "it has caught up"))
    target.close()
    target.note_readiness(Decision(False, "it falls behind"))
    with pytest.raises(Contradiction, match="is closed: create another one"):
        target.apply(release_of(2))
    reader = attached(folder)
    assert (reader.readiness.yes, reader.version().version) == (True, 1)
    with pytest.raises(Contradiction, match="another process writes"):
        mirror(folder)
    next_target.close()


def test_readers_cannot_keep_a_mirror_from_starting(folder: Path) -> None:
    target = mirror(folder)
    target.apply(release_of(1))
    target.close()
    path = layout.folder_of("m", folder)
    fds = [os.open(each, os.O_RDONLY) for each in (path, path / layout.CONTROL, path / layout.READERS)]
    for fd in fds:
        fcntl.flock(fd, fcntl.LOCK_SH)
    mirror(folder).close()
    for fd in fds:
        os.close(fd)


def test_a_forked_process_does_not_hold_the_lock_of_a_dead_mirror(folder: Path) -> None:
    here, there = get_context("fork").Pipe()

    def live_on() -> None:
        there.send(True)
        there.recv()

    def die() -> None:
        target = mirror(folder)
        target.apply(release_of(1))
        get_context("fork").Process(target=live_on).start()
        os._exit(0)

    assert forked(die) == 0
    assert here.recv()
    try:
        mirror(folder).close()
    finally:
        here.send(True)


def test_foreign_files_stay_or_are_refused(folder: Path) -> None:
    path, victim = layout.folder_of("m", folder), folder / "victim"
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidInput, match=r"has other files, such as 'notes.txt'"):
        mirror(folder)
    (path / "notes.txt").unlink()
    victim.write_text("mine")
    (path / "control.new").symlink_to(victim)
    target = mirror(folder)
    for name in ("notes.txt", "2024", "0"):
        (path / name).write_text("mine")
    for version in (1, 2):
        target.apply(release_of(version, resync=True))
    target.close()
    assert {each.read_text() for each in (victim, path / "notes.txt", path / "2024", path / "0")} == {"mine"}
    folder.joinpath("deltasync-link").symlink_to(path)
    with pytest.raises(InvalidInput, match="is a file or a link"):
        SharedTarget("link", "predictors", directory=folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    path = layout.folder_of("m", folder)
    path.mkdir()
    os.chown(path, 10001, 10001)
    with pytest.raises(InvalidInput, match="belongs to another user"):
        mirror(folder)


def replace_files(path: Path) -> None:
    remove_files(path)
    (path / layout.CONTROL).touch()


@pytest.mark.parametrize("lose", [move, shutil.rmtree, replace_files])
def test_a_mirror_notices_that_its_folder_was_moved_or_removed(folder: Path, lose: Callable[[Path], None]) -> None:
    target = mirror(folder)
    target.apply(release_of(1))
    assert target.read(USER, np.arange(1)) is not None
    lose(layout.folder_of("m", folder))
    with pytest.raises(StorageFailed, match="was moved or removed while its mirror runs: start the mirror"):
        target.apply(release_of(2))
    with pytest.raises(StorageFailed, match="was moved or removed"):
        target.read(USER, np.arange(1))
    target.close()


def test_a_folder_without_a_version_ends_with_its_mirror(folder: Path) -> None:
    path = layout.folder_of("m", folder)
    mirror(folder).close()
    assert not path.exists()
    target = mirror(folder)
    with pytest.raises(Contradiction, match="another process writes"):
        mirror(folder)
    assert path.exists()
    (path / "notes.txt").write_text("mine")
    target.close()
    assert [each.name for each in path.iterdir()] == ["notes.txt"]
    (path / "notes.txt").unlink()
    target = mirror(folder)
    target.apply(release_of(1))
    target.close()
    assert attached(folder).version().version == 1
    move(path)
    target = mirror(folder)
    shutil.rmtree(path)
    path.mkdir()
    target.close()
    assert path.exists(), "another folder with the same name is not its own"


@pytest.mark.parametrize("name", ["u\0", "a/b", ""])
def test_invalid_names_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match="mirror name"):
        SharedTarget(name, "predictors", directory=folder)
    with pytest.raises(InvalidInput, match="mirror name"):
        SharedReader(name, directory=folder)
    with pytest.raises(InvalidInput, match="consumer name"):
        SharedTarget("m", name, directory=folder)
    assert list(folder.iterdir()) == []


FIELDS = {
    "name": b"\xff",
    "dtype": b"garbage",
    "kind": b"\x09",
    "dim": b"\0" * 4,
    "rows": b"\xff" * 8,
    "index_slots": b"\x03\0",
}


@pytest.mark.parametrize("field", [*FIELDS, "history", "kept"])
def test_a_damaged_control_file_is_an_error_that_names_it(folder: Path, field: str) -> None:
    target = mirror(folder)
    target.apply(release_of(1))
    target.close()
    side = layout.side_offset(1)  # The first release is written there.
    in_table = field in FIELDS
    places = (layout.TABLE if in_table else layout.SIDE).fields
    assert places
    control = np.memmap(layout.folder_of("m", folder) / layout.CONTROL, np.uint8, "r+")
    at = side + in_table * layout.SIDE.itemsize + places[field][1]
    damage = FIELDS.get(field, b"\xff")
    control[at : at + len(damage)] = np.frombuffer(damage, np.uint8)
    reader = attached(folder)
    for _ in range(2):
        with pytest.raises(StorageFailed, match=r"control cannot be used \(.*: if it is damaged, stop the mirror"):
            read_all(reader)
        with pytest.raises(InvalidInput, match=r"control is missing or damaged \(.*remove the folder"):
            mirror(folder)


def test_no_damage_of_the_control_file_is_more_than_an_error(folder: Path) -> None:
    target, model, random = mirror(folder), KeyedModel(), np.random.default_rng(0)
    model.change(Change(users=frozenset({0}), items=frozenset({3}), raw_ids={0: 7}))
    target.apply(model.release(0, resync=True))
    target.close()
    control = np.memmap(layout.folder_of("m", folder) / layout.CONTROL, np.uint8, "r+")
    whole, side = control.copy(), layout.side_offset(1)
    ends = side + layout.SIDE.itemsize + len(TABLES) * layout.TABLE.itemsize
    places = np.concatenate([np.arange(64, layout.HEADER.itemsize), np.arange(side + 8, ends)])
    for _ in range(300):
        at = random.choice(places, 3)
        control[at] = random.integers(0, 256, 3)
        with suppress(StorageFailed, ServiceUnavailable, NotFound):
            read_all(attached(folder))
        control[at] = whole[at]


def read_all(reader: SharedReader) -> None:
    """Use everything that a reader offers."""
    assert isinstance(reader.model, str)
    assert isinstance(reader.readiness.yes, bool)
    reader.version()
    with reader.reading() as now:
        assert len(now.specs) == len(now.tables)
    for each in now.specs:
        reader.lookup_keys(each.name, np.arange(ROWS))


@pytest.mark.parametrize("content", [None, b"", b"short"])
def test_a_damaged_folder_is_refused_each_time(folder: Path, content: bytes | None) -> None:
    target = mirror(folder)
    target.apply(release_of(1))
    target.close()
    largest = max(layout.folder_of("m", folder).glob("[0-9a-f]"), key=lambda each: each.stat().st_size)
    largest.unlink()
    if content is not None:
        largest.write_bytes(content)
    for _ in range(2):
        with pytest.raises(InvalidInput, match=r"missing or damaged .*remove the folder"):
            mirror(folder)


def use_few_descriptors(folder: Path) -> None:
    tables = [TableSpec(f"table {number}", 1, 1) for number in range(20)]
    release = replace(release_of(1), tables=tables, rows=[])
    target = mirror(folder)
    used = set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(3, 5000) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[60], free[100]))
    with pytest.raises(StorageFailed, match=r"cannot be used: Too many open files: allow more \(ulimit -n\)"):
        target.apply(release)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[100], free[100]))
    target.apply(release)
    reader = attached(folder)
    used = set(map(int, os.listdir("/proc/self/fd")))
    full = next(number for number in range(3, 5000) if number not in used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (full, free[100]))
    larger = replace(release, tables=[replace(table, rows=2) for table in tables])
    for use in (
        lambda: target.apply(larger),
        lambda: reader.lookup("table 3", np.arange(1)),
        lambda: reader.reading().__enter__(),
        lambda: attached(folder),
    ):
        with pytest.raises((StorageFailed, ServiceUnavailable), match=r"Too many open files: allow more"):
            use()


def test_an_array_has_one_descriptor_and_too_few_are_an_error(folder: Path) -> None:
    assert in_new_process(use_few_descriptors, folder) == 0


def test_a_reader_that_pins_again_and_again_delays_one_release(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = mirror(folder, longest_pin_seconds=0.05)
    target.apply(release_of(1))
    fd = os.open(layout.folder_of("m", folder) / layout.READERS, os.O_RDWR)
    assert layout.lock_byte(fd, 7)
    waits, entry, sleep = list[float](), np.zeros(1, layout.READER), time.sleep

    def applied(version: int, side: int) -> bool:
        """Apply a release while the entry pins a side; returns whether the mirror waited."""
        waits.clear()
        entry["side"] = side
        os.pwrite(fd, entry.tobytes(), 7 * layout.READER.itemsize)
        target.apply(release_of(version))
        return bool(waits)

    def wait(seconds: float) -> None:
        waits.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", wait)
    assert [applied(version, side) for version, side in enumerate((1, 2, 1, 2), 2)] == [True, False, False, False]
    assert not applied(6, 0)
    assert applied(7, 1), "it may pin again once the mirror has seen it without a pin"
    entry["pid"] += 1
    assert applied(8, 2), "another reader may have the entry of one that was killed"
    os.close(fd)
    target.close()
