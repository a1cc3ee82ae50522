"""Two places: what is copied, fetched and removed; how much is written; disks and object storage that refuse."""

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.checkpointed import MODEL, Checkpointed, loaded, same
from tests.support.controlled_storage import ControlledStorage

from deltasync.base.errors import InvalidInput, StorageFailed
from deltasync.checkpoints.chunks import CheckpointDamaged
from deltasync.checkpoints.file_storage import Place, PlaceFailed, StoredFile
from deltasync.checkpoints.manifest import Manifest
from deltasync.checkpoints.store import CheckpointStore, NotCopied, models_of
from deltasync.core.rows import DamagedRows

HOUR = 3600.0


class Elsewhere(Place):
    """A place that can be told to refuse, to have an old listing, and what its clock says.

    Attributes:
        down: why every call is refused; empty if none is.
        ahead: by how many seconds its clock is ahead of this machine's.
    """

    down, ahead = "", 0.0
    _old: dict[str, list[StoredFile]] | None = None

    def list_as_now(self) -> None:
        """Go on giving the listing that it has now."""
        folders = (f"{MODEL}/manifests", f"{MODEL}/data", f"{MODEL}/kept")
        self._old = {folder: self.names(folder) for folder in folders}

    def put(self, name: str, content: bytes | memoryview) -> None:
        self._check()
        super().put(name, content)

    def get(self, name: str) -> bytes:
        self._check()
        return super().get(name)

    def names(self, folder: str) -> list[StoredFile]:
        self._check()
        found = self._old[folder] if self._old else super().names(folder)
        return [StoredFile(each.name, each.bytes, (each.modified or 0.0) + self.ahead) for each in found]

    def _check(self) -> None:
        if self.down:
            raise PlaceFailed(self.down)


@pytest.fixture
def remote(tmp_path: Path) -> Elsewhere:
    return Elsewhere(str(tmp_path / "remote"))


@pytest.fixture
def store(world: Checkpointed, tmp_path: Path, remote: Elsewhere) -> CheckpointStore:
    world.store = CheckpointStore(MODEL, Place(str(tmp_path / "checkpoints")), remote)
    return world.store


def _next(world: Checkpointed, share: float = 0.05) -> Manifest:
    world.model.change("user", share)
    made = world.write()
    world.store.copy_to_remote(made)
    return made


def _age(folder: Path, seconds: float) -> None:
    """Have all files written so much earlier."""
    for path in folder.rglob("*"):
        if path.is_file():
            at = path.stat().st_mtime - seconds
            os.utime(path, (at, at))


def test_bytes_written_are_bounded_by_bytes_changed(world: Checkpointed) -> None:
    world.views.clear()
    world.model.add("large", 1000, 16)
    changed = written = 0
    for share in (1.0, *[0.1] * 50):
        _, table = world.model.tables["large"]
        before = table.counts.newest
        world.model.change("large", share)
        changed += table.counts.after(before) * table.spec.row_bytes
        made = world.write()
        written += made.new_bytes
        assert made.bytes < 3.2 * made.layers[0].bytes
        world.store.remove_old(2)
    assert changed > 5.5 * table.spec.nbytes
    assert written < 2.2 * changed
    assert len(made.layers) > 1


def test_another_process_starts_from_the_copy(
    world: Checkpointed, store: CheckpointStore, remote: Elsewhere, tmp_path: Path
) -> None:
    _next(world)
    newest = _next(world)
    assert models_of(remote) == [MODEL]
    other = CheckpointStore(MODEL, Place(str(tmp_path / "other")), remote)
    assert other.manifests().manifests[0] == newest
    assert other.copied_version == newest.version
    assert same(loaded(other, newest), world.held[newest.id])
    # It goes on from the files that it has fetched.
    world.store, world.model.number = other, world.model.number + 1
    following = _next(world)
    assert following.layers[:-1] == newest.layers
    assert same(loaded(CheckpointStore(MODEL, remote), following), world.held[following.id])
    # And the first one goes on from those of the other.
    world.store = store
    assert store.manifests().manifests[0] == following
    assert same(loaded(store, following), world.held[following.id])


def test_a_damaged_file_is_fetched_from_the_copy(
    world: Checkpointed, store: CheckpointStore, tmp_path: Path
) -> None:
    made = _next(world)
    damaged, missing = (tmp_path / "checkpoints" / file.name for file in made.files[:2])
    content = damaged.read_bytes()
    damaged.write_bytes(content[:100] + b"\xff" + content[101:])
    missing.unlink()
    assert same(loaded(store, made), world.held[made.id])
    assert damaged.read_bytes() == content
    assert store.verify() == []


def test_what_is_damaged_in_both_places_is_named(
    world: Checkpointed, store: CheckpointStore, tmp_path: Path
) -> None:
    made = _next(world)
    for place in ("checkpoints", "remote"):
        (tmp_path / place / made.files[0].name).unlink()
    with pytest.raises(CheckpointDamaged, match=f"checkpoints/{made.files[0].name}.*remote/{made.files[0].name}"):
        loaded(store, made)
    assert len(store.verify()) == 2


def test_a_copy_that_fails_leaves_the_checkpoint(
    world: Checkpointed, store: CheckpointStore, remote: Elsewhere
) -> None:
    first = _next(world)
    remote.down = "no route to host"
    world.model.change("user", 0.1)
    second = world.write()
    with pytest.raises(NotCopied, match=r"version 3 .* complete.*remote has no copy.*no route to host"):
        store.copy_to_remote(second)
    found = store.manifests()
    assert (found.manifests, found.problems) == ([second, first], [])
    assert ["no route" in each for each in found.unreachable] == [True]
    assert same(loaded(store, second), world.held[second.id])
    store.remove_old(1)
    with pytest.raises(PlaceFailed, match="no route"):
        store.remove_old(1, remote=True)
    remote.down = ""
    third = _next(world)
    assert same(loaded(CheckpointStore(MODEL, remote), third), world.held[third.id])
    assert store.copied_version == third.version


def test_old_checkpoints_are_removed_with_files_that_no_other_names(
    world: Checkpointed, store: CheckpointStore, tmp_path: Path
) -> None:
    made = [_next(world, share) for share in (0.05, 0.05, 1.0, 0.05)]
    made += [_next(world, 1.0) for _ in range(3)]
    for remote in (False, True):
        _age(tmp_path, 2 * HOUR)
        newest = _next(world)
        made.append(newest)
        store.remove_old(2, remote=remote)
        folder = tmp_path / ("remote" if remote else "checkpoints")
        names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        kept = made[-2:]
        assert names == {name for each in kept for name in (each.name, *(file.name for file in each.files))}


def test_a_later_checkpoint_is_the_newest_whatever_the_clock_shows(world: Checkpointed, tmp_path: Path) -> None:
    clock = iter((1 << 60, 0))
    world.store = CheckpointStore(MODEL, Place(str(tmp_path / "checkpoints")), clock=lambda: next(clock))
    world.write()
    world.model.change("user", 0.05)
    later = world.write()
    assert world.store.manifests().manifests[0] == later


def test_an_old_listing_and_a_wrong_clock_remove_nothing_that_is_named(
    world: Checkpointed, store: CheckpointStore, remote: Elsewhere, tmp_path: Path
) -> None:
    first = _next(world)
    _age(tmp_path, 3 * HOUR)
    remote.list_as_now()
    second = _next(world, 1.0)
    for ahead in (0.0, 2 * HOUR, -2 * HOUR):
        remote.ahead = ahead
        store.remove_old(2, remote=True)
        for manifest in (first, second):
            assert same(loaded(CheckpointStore(MODEL, Place(remote.url)), manifest), world.held[manifest.id])
    # Files of a checkpoint that another process is copying are younger than its manifest.
    remote._old = None
    ahead = int(2 * HOUR * 1e9)
    there = Place(str(tmp_path / "other"))
    other = CheckpointStore(MODEL, there, Place(remote.url), clock=lambda: time.time_ns() + ahead)
    world.store, world.newest = other, None
    world.model.change("user", 1.0)
    third = world.write()
    remote_only = Path(remote.url)
    other.copy_to_remote(third)
    (remote_only / third.name).unlink()
    store.remove_old(2, remote=True)
    assert all((remote_only / file.name).exists() for file in third.files)


def test_files_of_a_damaged_manifest_stay_until_it_is_old(
    world: Checkpointed, store: CheckpointStore, tmp_path: Path
) -> None:
    first = _next(world)
    path = tmp_path / "checkpoints" / first.name
    path.write_bytes(path.read_bytes()[:-1])
    world.newest = None
    _next(world)
    store.remove_old(2)
    assert all((tmp_path / "checkpoints" / file.name).exists() for file in first.files)
    _next(world)
    store.remove_old(2)
    assert not path.exists()
    assert not any((tmp_path / "checkpoints" / file.name).exists() for file in first.files)
    assert store.manifests().problems == []


@pytest.mark.parametrize("harm", ["missing", "cut", "known to be damaged"])
def test_checkpoints_that_cannot_be_loaded_replace_no_others(
    world: Checkpointed, store: CheckpointStore, tmp_path: Path, harm: str
) -> None:
    made = list[Manifest]()
    for _ in range(4):
        world.newest = None
        made.append(_next(world))
    for remote in (False, True):
        folder = tmp_path / ("remote" if remote else "checkpoints")
        for each in made[2:]:
            path = folder / each.files[0].name
            if harm == "missing":
                path.unlink()
            else:
                content = path.read_bytes()
                path.write_bytes(content[:-1] if harm == "cut" else b"x" + content[1:])
        if harm == "known to be damaged":
            assert len(store.verify()) == 2 + 2 * remote
        _age(tmp_path, 2 * HOUR)
        store.remove_old(2, remote=remote)
        place = CheckpointStore(MODEL, Place(str(folder)))
        assert [each.id for each in place.manifests().manifests] == [each.id for each in reversed(made)]
        for each in made[:2]:
            assert same(loaded(place, each), world.held[each.id])
    for _ in range(2):
        world.newest = None
        made.append(_next(world))
    _age(tmp_path, 2 * HOUR)
    for remote in (False, True):
        store.remove_old(2, remote=remote)
    assert store.manifests().manifests == made[:-3:-1]


def test_the_last_two_checkpoints_that_a_process_used_are_not_removed(
    world: Checkpointed, store: CheckpointStore, tmp_path: Path
) -> None:
    """It is the one that the log goes on from if the newest is damaged, whatever others there are between them."""
    used = _next(world)
    for _ in range(2):
        world.newest = None
        _next(world, 1.0)
    other = CheckpointStore(MODEL, Place(str(tmp_path / "checkpoints")), Place(str(tmp_path / "remote")))
    assert same(loaded(other, used), world.held[used.id])
    world.store, world.newest = other, None
    newest = _next(world, 1.0)
    _age(tmp_path, 2 * HOUR)
    for remote in (False, True):
        other.remove_old(2, remote=remote)
    assert [each.id for each in other.manifests().manifests][::2] == [newest.id, used.id]
    for place in ("checkpoints", "remote"):
        assert same(loaded(CheckpointStore(MODEL, Place(str(tmp_path / place))), used), world.held[used.id])
    following = _next(world, 1.0)
    other.remove_old(2)
    found = CheckpointStore(MODEL, Place(str(tmp_path / "checkpoints"))).manifests().manifests
    assert found == [following, newest]


@contextmanager
def _unreadable(path: Path) -> Iterator[None]:
    """The system cannot read a file while the block runs."""
    path.rename(path.with_name("away"))
    path.mkdir()
    yield
    path.rmdir()
    path.with_name("away").rename(path)


def test_an_unreadable_file_is_not_taken_for_damaged(world: Checkpointed, tmp_path: Path) -> None:
    made = world.write()
    with _unreadable(tmp_path / "checkpoints" / made.files[0].name):
        with pytest.raises(PlaceFailed, match=f"{made.files[0].name} cannot be read: Is a directory"):
            loaded(world.store, made)
        ((problem),) = world.store.verify()
        assert "cannot be read now" in problem
    assert same(loaded(world.store, made), world.held[made.id])


def test_an_unreadable_file_is_fetched_from_the_copy(
    world: Checkpointed, store: CheckpointStore, tmp_path: Path
) -> None:
    made = _next(world)
    with _unreadable(tmp_path / "checkpoints" / made.files[0].name):
        assert same(loaded(store, made), world.held[made.id])


def test_a_disk_that_refuses_is_named_with_the_remedy(world: Checkpointed, tmp_path: Path) -> None:
    first = world.write()
    world.model.change("user", 1.0)
    files, (soft, hard) = _files(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(PlaceFailed, match=f"{tmp_path}/checkpoints/{MODEL}/data/.*ulimit -f"):
            world.write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _files(tmp_path) == files
    assert same(loaded(world.store, first), world.held[first.id])
    second = world.write()
    assert same(loaded(world.store, second), world.held[second.id])


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_a_folder_that_is_a_file_is_named(world: Checkpointed, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(PlaceFailed, match="move away the file"):
        world.write()


def test_an_error_without_a_number_is_told_in_its_own_words(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    place.put("a", b"")
    told = pytest.raises(PlaceFailed, match=f"{tmp_path}/a cannot be read: .*read by another")
    with told, place.open("a"):
        raise OSError("read by another")


def test_damaged_rows_are_not_written(world: Checkpointed, tmp_path: Path) -> None:
    _, table = world.model.tables["user"]
    row = int(table.changed_since(0)[3])
    table.rows[row, 0] += 1
    with pytest.raises(DamagedRows, match=f"row {row}"):
        world.write()
    assert _files(tmp_path) == set()


def test_a_view_that_cannot_say_its_state_is_left_out_in_the_end(
    world: Checkpointed, caplog: pytest.LogCaptureFixture
) -> None:
    world.options = replace(world.options, patience_seconds=0.05)
    world.views["mobile"].busy = 10**9
    made = world.write()
    assert [entry.key.owner for entry in made.tables] == [""]
    assert "mobile" in caplog.text
    world.views["mobile"].busy = 0
    made = world.write()
    assert same(loaded(world.store, made), world.held[made.id])


def test_places_that_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="nowhere"):
        Place("nowhere://bucket")
    place = Place(f"file://{tmp_path}/a")
    place.put("b/c", b"d")
    assert (tmp_path / "a" / "b" / "c").read_bytes() == place.get("b/c") == b"d"


@pytest.fixture
def memory() -> Iterator[Place]:
    place = Place("memory://bucket/checkpoints")
    yield place
    place._files.store.clear()


def test_object_storage_has_the_same(world: Checkpointed, memory: Place, tmp_path: Path) -> None:
    world.store = CheckpointStore(MODEL, Place(str(tmp_path / "checkpoints")), memory)
    made = [_next(world, 1.0) for _ in range(4)]
    world.store.remove_old(2, remote=True)
    other = CheckpointStore(MODEL, memory)
    assert models_of(memory) == [MODEL]
    assert other.manifests().manifests == made[:1:-1]
    assert other.verify() == []
    assert same(loaded(other, made[-1]), world.held[made[-1].id])
    with pytest.raises(CheckpointDamaged, match=r"memory://bucket/checkpoints/.* is missing"):
        memory.get("nothing")
    with pytest.raises(StorageFailed):
        loaded(CheckpointStore(MODEL, Place(str(tmp_path / "empty"))), made[-1])
    world.store.remove_all()
    assert memory.names(f"{MODEL}/data") == memory.names(f"{MODEL}/manifests") == []


def test_storage_that_alters_files_gets_a_few_of_them_and_not_all(world: Checkpointed, tmp_path: Path) -> None:
    storage = ControlledStorage("alters")
    storage.alter = lambda content: b"%x\r\n" % len(content) + content
    world.store = CheckpointStore(MODEL, Place(str(tmp_path / "checkpoints")), Place(storage.url))
    world.model.add("large", 1000, 16)
    world.model.change("large", 1.0)
    for _ in range(20):
        world.model.change("user", 0.05)
        made = world.write()
    assert len(made.files) > 20
    for _ in range(2):
        storage.calls.clear()
        with pytest.raises(NotCopied, match=r"has \d+ bytes, \d+ were written"):
            world.store.copy_to_remote(made)
        assert storage.calls["put"] < 10
    storage.alter = lambda content: content
    world.store.copy_to_remote(made)
    assert CheckpointStore(MODEL, Place(storage.url)).verify() == []
