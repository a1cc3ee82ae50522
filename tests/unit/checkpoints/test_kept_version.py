"""Kept versions, in a local and a remote place."""

from pathlib import Path

import pytest
from tests.support.checkpointed import MODEL, Checkpointed
from tests.support.seals import sealed

from deltasync.base.errors import InvalidInput, NotFound, StorageFailed
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.kept_version import KeptVersion, check_kept_name, find_kept
from deltasync.checkpoints.manifest import Manifest
from deltasync.checkpoints.store import CheckpointStore


def kept(manifest: Manifest, name: str = "") -> KeptVersion:
    return KeptVersion(
        model=MODEL,
        name=name,
        id=manifest.id,
        seal=sealed(manifest.version),
        bytes=manifest.bytes,
        kept_unix_ns=1,
        by="me",
    )


def go_on(world: Checkpointed, store: CheckpointStore, times: int) -> None:
    for _ in range(times):
        world.model.change("user", 0.5)
        store.copy_to_remote(world.write(store))
        store.remove_old(2)
        store.remove_old(2, remote=True)


@pytest.mark.parametrize("remote", [False, True])
def test_a_kept_version_outlives_later_checkpoints_and_shares_their_files(
    world: Checkpointed, tmp_path: Path, remote: bool
) -> None:
    places = [Place(str(tmp_path / name)) for name in ("here", "there")[: 1 + remote]]
    store = CheckpointStore(MODEL, *places)
    go_on(world, store, 1)
    first = store.manifests().manifests[0]
    store.keep(kept(first, "good"), first)
    go_on(world, store, 5)
    for place in places:
        reopened = CheckpointStore(MODEL, place)
        assert reopened.kept() == [kept(first, "good")]
        assert len(reopened.manifests().manifests) == 3, "two newest, and the kept one"
        assert reopened.manifest_of(first.id) == first
        assert reopened.is_sound(first)
    assert store.verify() == []
    store.release(kept(first, "good"))
    go_on(world, store, 1)
    for place in places:
        reopened = CheckpointStore(MODEL, place)
        assert reopened.kept() == []
        assert first.id not in {each.id for each in reopened.manifests().manifests}
        with pytest.raises(StorageFailed):
            reopened.manifest_of(first.id)


def test_a_version_whose_files_were_removed_meanwhile_is_not_kept(world: Checkpointed, tmp_path: Path) -> None:
    store = CheckpointStore(MODEL, Place(str(tmp_path / "here")))
    go_on(world, store, 1)
    first = store.manifests().manifests[0]
    go_on(world, store, 4)
    with pytest.raises(StorageFailed, match=f"version {first.version} of model '{MODEL}' is too old to keep"):
        store.keep(kept(first), first)
    assert store.kept() == []


def test_nothing_of_kept_versions_stays_once_all_is_removed(world: Checkpointed, tmp_path: Path) -> None:
    store = CheckpointStore(MODEL, Place(str(tmp_path / "here")))
    go_on(world, store, 1)
    store.keep(kept(store.manifests().manifests[0]), store.manifests().manifests[0])
    store.remove_all()
    assert not (tmp_path / "here" / MODEL).exists()


def test_a_damaged_record_of_a_kept_version_is_named_by_a_check_and_keeps_its_checkpoint(
    world: Checkpointed, tmp_path: Path
) -> None:
    store = CheckpointStore(MODEL, Place(str(tmp_path / "here")))
    go_on(world, store, 1)
    first = store.manifests().manifests[0]
    store.keep(kept(first), first)
    (path,) = (tmp_path / "here" / MODEL / "kept").iterdir()
    path.write_bytes(path.read_bytes()[:-3] + b"xxx")
    second = world.write(store)
    store.keep(kept(second, "good"), second)
    reopened = CheckpointStore(MODEL, Place(str(tmp_path / "here")))
    assert reopened.kept() == [kept(second, "good")], "it does not hide the others"
    (problem,) = store.verify()
    assert path.name in problem
    assert "until you remove it" in problem
    go_on(world, store, 4)
    assert store.is_sound(first)


@pytest.mark.parametrize("reference", ["good", "3"])
def test_a_kept_version_is_found_by_name_and_number(world: Checkpointed, reference: str) -> None:
    version = KeptVersion(model=MODEL, name="good", id="i", seal=sealed(3), bytes=1, kept_unix_ns=1, by="me")
    assert find_kept([version], MODEL, reference) == version
    with pytest.raises(NotFound, match="has no kept version 'bad'") as error:
        find_kept([version], MODEL, "bad")
    assert "good" in error.value.detail


@pytest.mark.parametrize("name", ["12", "live", "a b/c", "x" * 300])
def test_a_name_that_could_be_a_number_or_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        check_kept_name(name)
