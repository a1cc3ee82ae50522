"""Checkpoints in real object storage, which is killed and comes back."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.checkpointed import MODEL, Checkpointed, loaded, same
from tests.support.fleet import WAIT, Recorder, Trainer, admin_of, follow
from tests.support.object_storage import ObjectStorage
from tests.support.server import RunningService

from deltasync.base.errors import InvalidInput, StorageFailed
from deltasync.checkpoints.chunks import CheckpointDamaged
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.store import CheckpointStore, NotCopied, models_of
from deltasync.checkpoints.writing import WriteOptions
from deltasync.service.backup import BackupPlace
from deltasync.service.restore import restore


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStorage]:
    with ObjectStorage(tmp_path_factory.mktemp("storage")) as storage:
        yield storage


@pytest.fixture
def place(storage: ObjectStorage, request: pytest.FixtureRequest) -> Place:
    bucket = f"bucket-{abs(hash(request.node.name)) % 10**8}"
    place = Place(f"s3://{bucket}/models", storage.settings)
    place._files.mkdir(bucket)
    return place


def _world(folder: Path, place: Place) -> Checkpointed:
    world = Checkpointed(CheckpointStore(MODEL, Place(str(folder / "checkpoints")), place), options=WriteOptions())
    world.model.add("user", 100_000, 32)
    world.model.change("user", 0.5)
    return world


def test_objects_are_there_whole_and_listed(place: Place) -> None:
    assert place.names("m/data") == []
    content = os.urandom(9_000_000)
    place.put("m/data/1", content)
    place.put("m/data/0", b"x")
    listed = place.names("m/data")
    assert [(each.name, each.bytes) for each in listed] == [("m/data/0", 1), ("m/data/1", 9_000_000)]
    assert all(each.modified for each in listed)
    assert place.get("m/data/1") == content
    with place.open("m/data/1") as file:
        assert file.read(10) == content[:10]
    place.remove("m/data/1")
    place.remove("m/data/1")
    assert [each.name for each in place.names("m/data")] == ["m/data/0"]
    with pytest.raises(CheckpointDamaged, match="m/data/1 is missing"):
        place.get("m/data/1")


def test_a_model_is_taken_over_by_way_of_object_storage(place: Place, tmp_path: Path) -> None:
    world = _world(tmp_path, place)
    for _ in range(3):
        world.model.change("user", 0.1)
        made = world.write()
        world.store.copy_to_remote(made)
    world.store.remove_old(2, remote=True)
    assert models_of(place) == [MODEL]
    other = CheckpointStore(MODEL, Place(str(tmp_path / "other")), place)
    found = other.manifests()
    assert (found.manifests[0], len(found.manifests), found.problems, found.unreachable) == (made, 2, [], [])
    assert other.verify() == []
    assert same(loaded(other, made), world.held[made.id])
    other.remove_all()
    assert models_of(place) == []


def test_a_backup_is_made_in_object_storage_and_restored(
    storage: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the place of one that was broken off."""
    for name, value in (("ENDPOINT_URL", storage.url), ("ACCESS_KEY_ID", "any"), ("SECRET_ACCESS_KEY", "any")):
        monkeypatch.setenv(f"AWS_{name}", value)
    url = "s3://backups/monday"
    place, target = Place(url), Recorder()
    place._files.mkdir("backups")
    with RunningService(tmp_path / "data") as service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        admin_of(service).backup(url)
        with pytest.raises(InvalidInput, match="s3://backups/monday is not empty"):
            admin_of(service).backup(url)
        place.remove("backup.json")
        BackupPlace(f"{url}-begun").begin()
        place.put("backup.json", Place(f"{url}-begun").get("backup.json"))
        with pytest.raises(StorageFailed, match="the backup is incomplete"):
            restore(url, tmp_path / "new")
        head = trainer.change(7)
        made = admin_of(service).backup(url)
    folders = [each.name for each in place.names("checkpoints/clicks")]
    assert folders == ["checkpoints/clicks/data", "checkpoints/clicks/manifests"]
    assert sum(file.bytes for file in place.names(folders[0])) == made["bytes"]
    assert restore(url, tmp_path / "new").models == {"clicks": head.number}
    with RunningService(tmp_path / "new") as service, follow(service, "predictors", "new", target) as replica:
        replica.wait_for(head.number, WAIT)
    assert target.bytes() == trainer.expected()


@pytest.mark.nightly
def test_storage_that_is_gone_is_an_error_and_no_more(tmp_path: Path) -> None:
    with ObjectStorage(tmp_path / "storage") as storage:
        settings = {
            **storage.settings,
            "config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 1},
        }
        place = Place("s3://gone/models", settings)
        place._files.mkdir("gone")
        world = _world(tmp_path, place)
        first = world.write()
        world.store.copy_to_remote(first)
        storage.kill()
        world.model.change("user", 0.1)
        second = world.write()
        with pytest.raises(NotCopied, match="s3://gone/models has no copy"):
            world.store.copy_to_remote(second)
        found = world.store.manifests()
        assert (found.manifests, len(found.unreachable)) == ([second, first], 1)
        assert same(loaded(world.store, second), world.held[second.id])
        storage.start()
        world.model.change("user", 0.1)
        third = world.write()
        world.store.copy_to_remote(third)
        remote = CheckpointStore(MODEL, place)
        assert remote.manifests().manifests == [third, first]
        assert same(loaded(remote, third), world.held[third.id])
