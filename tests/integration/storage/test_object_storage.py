"""Snapshots in real object storage, which is killed and comes back."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.local_service import publish
from tests.support.object_storage import ObjectStorage
from tests.unit.service.test_snapshots import MODEL, Process, cut, in_processes

from deltasync.core.errors import StorageFailed
from deltasync.snapshots.place import SnapshotPlace
from deltasync.snapshots.reading import check_snapshot, models_of, snapshots_of


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStorage]:
    with ObjectStorage(tmp_path_factory.mktemp("storage")) as storage:
        yield storage


@pytest.fixture
def place(storage: ObjectStorage, request: pytest.FixtureRequest) -> SnapshotPlace:
    bucket = f"bucket-{abs(hash(request.node.name)) % 10**8}"
    place = SnapshotPlace(f"s3://{bucket}/models", storage.settings)
    place._files.mkdir(bucket)
    return place


def test_objects_are_there_whole_and_listed(place: SnapshotPlace) -> None:
    assert place.names("m/data") == []
    content = os.urandom(9_000_000)
    place.put("m/data/1", content)
    place.put("m/data/0", b"x")
    assert [(each.name, each.bytes) for each in place.names("m/data")] == [
        ("m/data/0", 1),
        ("m/data/1", 9_000_000),
    ]
    assert place.get("m/data/1") == content
    assert place.get("m/data/1", 10, 20) == content[10:20]
    place.remove("m/data/1")
    place.remove("m/data/1")
    assert [each.name for each in place.names("m/data")] == ["m/data/0"]
    with pytest.raises(StorageFailed, match="m/data/1"):
        place.get("m/data/1")


@in_processes()
async def test_a_model_is_taken_over_by_way_of_object_storage(
    a: Process, b: Process, place: SnapshotPlace
) -> None:
    for each in (a, b):
        each.place = each.snapshots.place = each.files._place = place
    await a.take()
    session = await publish(a.service)
    await a.snapshots.make(MODEL)
    await cut(session, 2, 1, 2)
    second = await a.snapshots.make(MODEL)
    await cut(session, 3, 3)
    before = a.rows
    assert models_of(place) == [MODEL]
    assert check_snapshot(place, second) == []
    await a.give_up()
    await b.take()
    assert all(np.array_equal(each, before[name]) for name, each in b.rows.items())


@pytest.mark.nightly
@in_processes()
async def test_storage_that_is_gone_is_an_error_and_no_more(a: Process, b: Process, tmp_path: Path) -> None:
    with ObjectStorage(tmp_path / "storage") as storage:
        settings = {
            **storage.settings,
            "config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 1},
        }
        place = a.snapshots.place = a.files._place = SnapshotPlace("s3://gone/models", settings)
        place._files.mkdir("gone")
        await a.take()
        session = await publish(a.service)
        await a.snapshots.make(MODEL)
        storage.kill()
        await cut(session, 2, 1)
        with pytest.raises(StorageFailed):
            await a.snapshots.make(MODEL)
        assert a.snapshots.troubles
        await cut(session, 3, 2)
        storage.start()
        made = await a.snapshots.make(MODEL)
        assert (made.version, a.snapshots.troubles) == (3, [])
        assert [each.version for each in snapshots_of(place, MODEL).manifests] == [3, 1]
