"""Kept versions, in a local and a remote place."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.checkpointed import MODEL, Checkpointed
from tests.support.controlled_storage import ControlledStorage
from tests.support.seals import sealed

from deltasync.base.errors import InvalidInput, NotFound, StorageFailed
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.kept_version import (
    KeptVersion,
    SharedFiles,
    check_kept_name,
    find_kept,
    kept_file,
    pack_kept,
)
from deltasync.checkpoints.manifest import File, Manifest, pack_manifest
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
        assert {file.name for file in first.files} <= {each.name for each in place.names(f"{MODEL}/data")}
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


def test_verify_names_a_damaged_kept_version_whose_checkpoint_stays(world: Checkpointed, tmp_path: Path) -> None:
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
    assert store.manifest_of(first.id) == first


@pytest.mark.parametrize("reference", ["good", "3", "003"])
def test_a_kept_version_is_found_by_name_and_number(world: Checkpointed, reference: str) -> None:
    version = KeptVersion(model=MODEL, name="good", id="i", seal=sealed(3), bytes=1, kept_unix_ns=1, by="me")
    assert find_kept([version], MODEL, reference) == version
    with pytest.raises(NotFound, match="has no kept version '999"):
        find_kept([version], MODEL, "9" * 5000)  # Python refuses to parse it.
    with pytest.raises(NotFound, match="has no kept version 'bad'") as error:
        find_kept([version], MODEL, "bad")
    assert "good" in error.value.detail


@pytest.mark.parametrize("name", ["12", "live", "a b/c", "x" * 300])
def test_a_name_that_could_be_a_number_or_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        check_kept_name(name)


def cost_of_keeping(world: Checkpointed, storage: ControlledStorage, before: int) -> Counter[str]:
    """Calls of storage to write, keep, list and release a version beside others, and to remove old checkpoints."""
    place = Place(storage.url)
    store = CheckpointStore(MODEL, place)
    made = world.write(store)
    for each in range(before):
        other = replace(made, id=f"{each + 1:020d}-{each:08x}")
        place.put(other.name, pack_manifest(other))
        place.put(kept_file(MODEL, other.id), pack_kept(kept(other)))
    assert len(CheckpointStore(MODEL, place).kept()) == len(store.kept()) == before
    world.model.change("user", 0.5)
    storage.calls.clear()
    newest = world.write(store)
    store.keep(kept(newest), newest)
    assert len(store.kept()) == before + 1
    assert store.own_bytes(store.kept()[-1]) == 0, "the newest checkpoint has the same files"
    store.remove_old(2)
    store.release(kept(newest))
    assert len(store.kept()) == before
    calls = Counter(storage.calls)
    assert [each.id for each in store.kept()] == [each.id for each in CheckpointStore(MODEL, place).kept()]
    return calls


def test_a_version_costs_as_many_calls_beside_many_others(world: Checkpointed) -> None:
    few, many = ControlledStorage("few"), ControlledStorage("many")
    cheap = cost_of_keeping(world, few, 3)
    world.newest = None
    assert cost_of_keeping(world, many, 200) == cheap


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sets(st.integers(0, 6))), max_size=30))
def test_own_bytes_are_those_of_files_that_no_other_checkpoint_uses(changes: list[tuple[str, set[int]]]) -> None:
    shared, expected = SharedFiles(), dict[str, set[int]]()
    for id, numbers in changes:  # noqa: A001
        if numbers:
            shared.set(id, [File(str(each), 1 << each) for each in numbers])
            expected[id] = numbers
        else:
            shared.remove(id)
            expected.pop(id, None)
        for each in "abcd":
            others = set[int]().union(*(some for other, some in expected.items() if other != each))
            own = sum(1 << number for number in expected[each] - others) if each in expected else None
            assert shared.own_bytes(each) == own
        used = set[int]().union(*expected.values())
        assert {number for number in range(7) if shared.uses(str(number))} == used
