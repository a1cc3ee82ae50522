"""Every moment at which the service may die: its folder as it is then, and what comes back from it."""

import asyncio
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from tests.support.faults import Faults, Hook
from tests.support.fleet import AT_ONCE
from tests.support.local_service import opened, send, view_of
from tests.support.mortal_place import PowerCuts
from tests.support.wire import ITEM, TABLES, USER, block, part, publish_open

from deltasync.base.events import EventKind
from deltasync.checkpoints.file_storage import UNFINISHED, Place
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.tables import Shard
from deltasync.core.value_types import ValueType
from deltasync.cuts.messages import check_open
from deltasync.cuts.session import PublishSession, open_session
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions, LogStore, Submitted
from deltasync.service.service import Service
from deltasync.v1 import publish_pb2
from deltasync.views.view import View

SHARDS = [
    [Shard(USER, 0, 25, 0, 4), Shard(ITEM, 0, 30, 0, 2)],
    [Shard(USER, 25, 15, 0, 4), Shard(ITEM, 0, 30, 2, 4)],
]
STEPS = 5
POLICY = Policy(top_k=9, value_type=ValueType.INT8)
Versions: TypeAlias = list[dict[str, np.ndarray]]
Held: TypeAlias = dict[str, bytes]


@dataclass
class Image:
    """What the disk holds at some moment, and what was promised by then: a version and a release."""

    path: Path
    moment: str
    acknowledged: int
    released: int


@dataclass
class Camera:
    """Takes an image after every commit of the log, and around all that happens to a file of a checkpoint.

    Attributes:
        held: what replicas of the view hold, by its position.
    """

    data_dir: Path
    power: PowerCuts
    images: list[Image] = field(default_factory=list)
    held: dict[Position, Held] = field(default_factory=dict)
    acknowledged: int = 0
    released: int = 0
    on: bool = False
    # Held by whatever writes: a folder is copied as it is at one moment.
    still: threading.RLock = field(default_factory=threading.RLock)

    def both(self, moment: str) -> None:
        self._take(f"kill {moment}")
        if path := self._take(f"power loss {moment}"):
            shutil.rmtree(path / "checkpoints", ignore_errors=True)
            self.power.restore(self.power.images[-1], path / "checkpoints")

    def half(self, file: Path, content: bytes | memoryview) -> None:
        """Before a file is written: as it is in between."""
        if path := self._take("kill while a file is written"):
            made = path / file.relative_to(self.data_dir)
            made.parent.mkdir(parents=True, exist_ok=True)
            made.write_bytes(content[: len(content) // 2])

    def _take(self, moment: str) -> Path | None:
        if not self.on:
            return None
        path = self.data_dir.with_name(f"image-{len(self.images)}")
        shutil.copytree(self.data_dir, path)
        self.images.append(Image(path, moment, self.acknowledged, self.released))
        return path

    def put(self, call: Hook, place: Place, name: str, content: bytes | memoryview) -> None:
        with self.still:
            self.half(Path(place.url) / f"{name}{UNFINISHED}", content)
            call(place, name, content)
            self.both("after a file was written")

    def remove(self, call: Hook, place: Place, name: str) -> None:
        with self.still:
            call(place, name)
            self.both("after a file was removed")


class Watched(Faults):
    """A log and places of which a camera takes images."""

    def __init__(self, camera: Camera) -> None:
        super().__init__()
        self._camera = camera
        self.place.hooks |= {"put": camera.put, "remove": camera.remove}

    def open_log(self, options: LogOptions) -> LogStore:
        camera = self._camera

        class WatchedLog(LmdbStore):
            def _commit(self, batch: list[Submitted]) -> None:
                with camera.still:
                    super()._commit(batch)
                    camera.both("after a commit")

        return self.wrap(WatchedLog(options))


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
    position = await send(session, part(step, changes, full=step == 1))
    assert position
    return position.number


async def held_by_replicas(view: View) -> Held:
    tables = view.state.tables
    return await view.model.on_thread(lambda: {table.name: table.held.rows.tobytes() for table in tables})


async def train(data_dir: Path, versions: Versions, camera: Camera) -> None:
    async with opened(data_dir, faults=Watched(camera), keep_checkpoints=2, releases=AT_ONCE) as service:
        coordinator = await service.publishing.open("clicks")
        sessions = []
        for rank, shards in enumerate(SHARDS):
            message: publish_pb2.PublishOpen = publish_open(rank=rank, world_size=2, shards=shards).open
            sessions.append(await open_session(coordinator, check_open(message)))
        consumer = await service.consumers.create("top", "clicks", POLICY)
        service.registry.connect(consumer, "r", asyncio.Event())
        checkpointing: asyncio.Task[Any] = asyncio.create_task(asyncio.sleep(0))
        for step in range(1, STEPS + 1):
            camera.on = step > 1  # The first cut is as large as all others together.
            with camera.still:
                camera.both("after a commit")  # The last one: a cut's rows and its seal may be in one.
            sealed = await asyncio.gather(
                *(publish(*each, versions, step) for each in zip(sessions, SHARDS, strict=True))
            )
            assert sealed == [step, step]
            camera.acknowledged = step
            await coordinator.drain()
            await follow(service, step, camera)
            await checkpointing
            if step != 3:
                # While the next cut arrives, is sealed and applied.
                checkpointing = asyncio.create_task(service.checkpoints.make("clicks"))
        await checkpointing
        camera.on = False


async def follow(service: Service, version: int, camera: Camera) -> None:
    """Be the replica of the view until it has a release of a version. The next one comes once it has this one."""
    view, consumer = view_of(service, "top"), service.registry.get("top")
    while view.state.compared_version < version:
        service.registry.acknowledge(consumer, consumer.replicas["r"], view.position)
        await view.changed()
        camera.held[view.position] = await held_by_replicas(view)
        camera.released = view.position.number


async def check(image: Image, versions: Versions, held: dict[Position, Held]) -> int:
    failures = list[str]()
    async with opened(
        image.path, lambda event: failures.append(event.text) if event.kind is EventKind.FAILED else None
    ) as service:
        assert failures == [], "no crash is damage"
        model = service.models["clicks"]
        head = model.position.number
        assert image.acknowledged <= head <= STEPS
        for table in model.tables:
            np.testing.assert_array_equal(table.rows, versions[head][table.spec.name])
            assert int(table.stamps.max()) == head
        view = view_of(service, "top")
        assert view.position.number >= image.released
        if image.released:
            assert await held_by_replicas(view) == held[view.position]
    return head


def test_every_acknowledged_version_and_release_survives_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = expected_rows()
    with monkeypatch.context() as patch:
        camera = Camera(tmp_path / "data", PowerCuts(patch, tmp_path / "data" / "checkpoints"))
        asyncio.run(train(tmp_path / "data", versions, camera))
    assert {image.moment for image in camera.images} == {
        f"{death} {moment}"
        for death in ("kill", "power loss")
        for moment in ("after a commit", "after a file was written", "after a file was removed")
    } | {"kill while a file is written"}
    assert len(camera.images) > 50
    heads = set()
    for image in camera.images:
        heads.add(asyncio.run(check(image, versions, camera.held)))
        shutil.rmtree(image.path)
    assert heads == set(range(1, STEPS + 1))
