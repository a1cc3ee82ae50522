"""Every moment at which the service may die: its folder as it is then, and what comes back from it."""

import asyncio
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from tests.support.wire import ITEM, TABLES, USER, block, part, publish_open

from deltasync.core.tables import Shard
from deltasync.feeds.model import Model
from deltasync.publish.coordinator import CutCoordinator
from deltasync.publish.opening import check_open
from deltasync.publish.session import PublishSession, open_session
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service
from deltasync.storage import mapping
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.mapped_table import MappedTable
from deltasync.storage.mapping import Mapping, TouchedArray
from deltasync.storage.private_memory import PrivateMemory
from deltasync.v1 import publish_pb2

SHARDS = [
    [Shard(USER, 0, 25, 0, 4), Shard(ITEM, 0, 30, 0, 2)],
    [Shard(USER, 25, 15, 0, 4), Shard(ITEM, 0, 30, 2, 4)],
]
STEPS = 5
Versions: TypeAlias = list[dict[str, np.ndarray]]


@dataclass
class Image:
    """What the disk holds at some moment, and the last version that was acknowledged by then."""

    path: Path
    moment: str
    acknowledged: int


@dataclass
class Camera:
    """Takes an image after every commit, every write to a table or to one of its files, and every flush."""

    data_dir: Path
    images: list[Image] = field(default_factory=list)
    acknowledged: int = 0
    on: bool = False
    # Held by whatever writes: a folder is copied as it is at one moment.
    still: threading.RLock = field(default_factory=threading.RLock)

    def take(self, moment: str, *, power_loss: bool = False) -> None:
        if not self.on:
            return
        path = self.data_dir.with_name(f"image-{len(self.images)}")
        shutil.copytree(self.data_dir, path)
        if power_loss:
            # Only what was flushed is sure to be there.
            shutil.rmtree(path / "models")
            shutil.copytree(self.flushed, path / "models")
        self.images.append(
            Image(path, f"{'power loss' if power_loss else 'kill'} after {moment}", self.acknowledged)
        )

    def both(self, moment: str) -> None:
        self.take(moment)
        self.take(moment, power_loss=True)

    @property
    def flushed(self) -> Path:
        return self.data_dir.with_name("flushed")

    def keep(self, flushed: Mapping) -> None:
        """Note that a file is on disk as it is now."""
        file = Path(flushed.name)
        shutil.copyfile(file, self.flushed / file.relative_to(self.data_dir / "models"))
        self.take("flush of one file", power_loss=True)

    def after(self, patch: pytest.MonkeyPatch, owner: type, name: str, then: Callable[[Any], None]) -> None:
        original = getattr(owner, name)

        def wrapped(this: Any, *arguments: Any, **fields: Any) -> Any:
            with self.still:
                result = original(this, *arguments, **fields)
                then(this)
                return result

        patch.setattr(owner, name, wrapped)


def expected_rows() -> Versions:
    """Every table as of every version; version 0 is all zero."""
    rng = np.random.default_rng(3)
    versions = [{table.name: np.zeros((table.rows, table.dim), table.dtype) for table in TABLES}]
    for _ in range(STEPS):
        tables = {name: rows.copy() for name, rows in versions[-1].items()}
        for table in TABLES:
            ids = np.arange(table.rows) if len(versions) == 1 else rng.choice(table.rows, 6, replace=False)
            tables[table.name][ids] = rng.normal(size=(len(ids), table.dim)).astype(table.dtype)
        versions.append(tables)
    return versions


async def publish(
    session: PublishSession, shards: list[Shard], versions: list[dict[str, np.ndarray]], step: int
) -> int:
    changes = []
    for slot, shard in enumerate(shards):
        old, new = (block(versions[each][shard.table.name], shard) for each in (step - 1, step))
        changed = np.arange(shard.rows) if step == 1 else np.flatnonzero((old != new).any(axis=1))
        # One chunk a row, so that there is much that a crash can tear apart.
        changes += [(slot, [shard.row_offset + row], new[[row]]) for row in changed]
    for request in part(step, changes, full=step == 1):
        if request.HasField("close"):
            return (await session.close(request.close)).number
        await session.add(request.chunk.step, request.chunk.rows)
    raise AssertionError("a part ends with a close")


async def flush(model: Model, camera: Camera) -> None:
    await asyncio.to_thread(model.flush)
    with camera.still:
        camera.both("flush")


async def train(data_dir: Path, versions: Versions, camera: Camera) -> None:
    async with asyncio.TaskGroup() as tasks:
        service = Service(ServiceOptions(data_dir=data_dir), tasks)
        coordinator: CutCoordinator = await service.open_model("clicks")
        await coordinator.model.add_tables(TABLES)  # As for the first cut; what is on disk of them, it is then.
        sessions = []
        for rank, shards in enumerate(SHARDS):
            message: publish_pb2.PublishOpen = publish_open(rank=rank, world_size=2, shards=shards).open
            sessions.append(await open_session(coordinator, check_open(message)))
        shutil.copytree(data_dir / "models", camera.flushed)
        flushing = asyncio.create_task(asyncio.sleep(0))
        for step in range(1, STEPS + 1):
            camera.on = step > 1  # The first cut is as large as all others together.
            with camera.still:
                camera.both("commit")  # The last one: a cut's rows and its seal may be in one.
            sealed = await asyncio.gather(
                *(publish(*each, versions, step) for each in zip(sessions, SHARDS, strict=True))
            )
            assert sealed == [step, step]
            camera.acknowledged = step
            await coordinator.drain()
            await flushing
            if step % 2 == 0:
                # While the next cut arrives, is sealed and applied.
                flushing = asyncio.create_task(flush(coordinator.model, camera))
        camera.on = False
        await service.drain()


async def recovered(data_dir: Path) -> tuple[int, dict[str, np.ndarray]]:
    async with asyncio.TaskGroup() as tasks:
        service = Service(ServiceOptions(data_dir=data_dir), tasks)
        await service.recover()
        model = service.models["clicks"]
        head, tables = model.position.number, {each.spec.name: np.array(each.rows) for each in model.tables}
        stamps = [int(each.stamps.max()) for each in model.tables]
        assert max(stamps) == head
        await service.drain()
    return head, tables


def test_whenever_it_dies_every_acknowledged_version_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_file: bool
) -> None:
    private = not shared_file  # Mapped, that is: one test for either.
    versions, camera = expected_rows(), Camera(tmp_path / "data")
    with monkeypatch.context() as patch:
        camera.after(patch, LmdbStore, "_commit", lambda _: camera.both("commit"))
        camera.after(patch, MappedTable, "apply", lambda _: camera.both("apply"))
        camera.after(patch, Mapping, "flush", camera.keep)
        camera.after(patch, TouchedArray, "write", lambda _: camera.take("write of one array"))
        camera.after(patch, MappedTable, "remove_stale", lambda _: None)
        patch.setattr(mapping, "PRIVATE", PrivateMemory(1 << 40 if private else 0))
        asyncio.run(train(tmp_path / "data", versions, camera))
    assert {image.moment for image in camera.images} == {
        f"{death} after {moment}" for death in ("kill", "power loss") for moment in ("commit", "apply", "flush")
    } | {"power loss after flush of one file"} | ({"kill after write of one array"} if private else set())
    assert len(camera.images) > 50
    heads = set()
    for image in camera.images:
        head, tables = asyncio.run(recovered(image.path))
        assert image.acknowledged <= head <= STEPS, image
        for name, rows in versions[head].items():
            np.testing.assert_array_equal(tables[name], rows, err_msg=str(image))
        heads.add(head)
        shutil.rmtree(image.path)
    assert heads == set(range(1, STEPS + 1))
