"""A failure, the end of the process or a power cut at any moment leaves sound checkpoints."""

import copy
import shutil
from pathlib import Path

import pytest
from tests.support.checkpointed import MODEL, Checkpointed, loaded, same
from tests.support.examples import examples
from tests.support.mortal_place import Calls, Killed, MortalPlace, PowerCuts

from deltasync.base.errors import StorageFailed
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.manifest import Manifest
from deltasync.checkpoints.store import CheckpointStore


def _store(folder: Path) -> CheckpointStore:
    """The store of another process."""
    return CheckpointStore(MODEL, Place(str(folder / "local")), Place(str(folder / "remote")))


def _all_of(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}


def _named(manifests: list[Manifest]) -> set[str]:
    return {name for each in manifests for name in (each.name, *(file.name for file in each.files))}


def _go_on(world: Checkpointed, store: CheckpointStore) -> None:
    """Write, copy and remove checkpoints, as a service does."""
    made = world.write(store)
    store.copy_to_remote(made)
    store.remove_old(2)
    store.remove_old(2, remote=True)


@pytest.mark.parametrize("kills", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["failure", "kill"])
def test_the_next_process_finds_sound_checkpoints(world: Checkpointed, tmp_path: Path, kills: bool) -> None:
    before = tmp_path / "before"
    for share in (0.3, 0.1, 0.1):
        world.model.change("user", share)
        _go_on(world, _store(before))
    assert world.newest
    # The last one begins a new base, so that all others are removed once there are two of it.
    world.model.change("user", 1.0)
    happened, last, stride = True, 0, 1 if examples() > 20 else 4
    while happened:
        last += stride
        folder, calls = tmp_path / f"{last}", Calls(last, kills=kills)
        shutil.copytree(before, folder)
        again = copy.copy(world)
        again.held = dict(world.held)
        store = CheckpointStore(MODEL, MortalPlace(folder / "local", calls), MortalPlace(folder / "remote", calls))
        try:
            _go_on(again, store)
            happened = False
        except (StorageFailed, Killed):
            pass
        _check(folder, again, complete=not happened)
        shutil.rmtree(folder)
    assert last > 30


def _check(folder: Path, world: Checkpointed, *, complete: bool) -> None:
    store = _store(folder)
    found = store.manifests()
    assert (found.problems, found.unreachable) == ([], [])
    assert store.verify() == []  # So nothing is missing that any manifest names.
    for place in ("local", "remote"):
        assert CheckpointStore(MODEL, Place(str(folder / place))).manifests().manifests
    for manifest in found.manifests:
        if manifest.id in world.held:  # Else it is complete, but who wrote it never heard of that.
            assert same(loaded(store, manifest), world.held[manifest.id])
    assert len(loaded(store, found.manifests[0])) == 2
    if complete:
        assert found.manifests[0] == world.newest
    # What was left behind is gone after the next one; elsewhere, an hour later.
    world.newest = found.manifests[0]
    world.model.number += 1
    _go_on(world, store)
    kept = store.manifests().manifests
    assert _all_of(folder / "local") == _named(kept[:2])
    assert _all_of(folder / "remote") >= _named(kept[:1])
    assert store.verify() == []


def test_a_failure_leaves_no_half_files(world: Checkpointed, tmp_path: Path) -> None:
    first = world.write(_store(tmp_path))
    world.model.change("user", 1.0)
    for last in range(1, 100):
        try:
            world.write(CheckpointStore(MODEL, MortalPlace(tmp_path / "local", Calls(last))))
            break
        except StorageFailed:
            assert _all_of(tmp_path / "local") == _named([first])
    assert last > 10


def test_what_breaks_off_leaves_nothing(world: Checkpointed, tmp_path: Path) -> None:
    first = world.write()
    world.model.change("user", 1.0)
    turns = iter("ab")

    def check() -> None:
        if next(turns, None) is None:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        world.write(check=check)
    assert _all_of(tmp_path / "checkpoints") == _named([first])
    second = world.write()
    assert same(loaded(world.store, second), world.held[second.id])


def test_power_cuts_leave_sound_checkpoints(
    world: Checkpointed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    cuts, promised = PowerCuts(monkeypatch, root), list[tuple[int, Manifest]]()
    store = CheckpointStore(MODEL, Place(str(root / "local")))
    for share in (0.3, 0.1, 1.0, 0.1, 1.0, 1.0, 0.1):
        world.model.change("user", share)
        made = world.write(store)
        promised.append((len(cuts.images) - 1, made))
        store.remove_old(2)
    for number, image in enumerate(cuts.images):
        cuts.restore(image, tmp_path / f"{number}")
        found = CheckpointStore(MODEL, Place(str(tmp_path / f"{number}" / "local")))
        manifests, owed = found.manifests(), [each for at, each in promised if at <= number]
        assert manifests.problems == []
        assert {each.id for each in owed[-2:]} <= {each.id for each in manifests.manifests}
        for manifest in manifests.manifests:
            if manifest.id in world.held:
                assert same(loaded(found, manifest), world.held[manifest.id])
        assert found.verify() == []
