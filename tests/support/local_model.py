"""A model in this process: tests add cuts directly, without a rank or a service."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tests.support.seals import sealed

from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.manifest import Manifest
from deltasync.checkpoints.store import CheckpointStore
from deltasync.core.cut_times import StopWatch
from deltasync.core.policy import Policy
from deltasync.core.rows import RowBatch, Values
from deltasync.core.seal import Seal
from deltasync.core.table_memory import NoTableMemory, TableMemory
from deltasync.core.tables import Shard, TableSpec
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions
from deltasync.log.records import pack_layout, pack_rows
from deltasync.model.model import CompleteCut, Model
from deltasync.model.model_store import recorded_models
from deltasync.views.decision import RELEASE_OPTIONS, ReleaseOptions
from deltasync.views.log import ViewLog
from deltasync.views.view import View

Rows = Mapping[int, Values]
T = TypeVar("T")


def _raise(_: str, error: Exception) -> None:
    raise error


async def commit(
    model: Model,
    seal: Seal,
    rows: Sequence[RowBatch] | None,
    durable: Callable[[], None] = lambda: None,
    failed: Callable[[str, Exception], None] = _raise,
) -> None:
    """Make a cut, whose rows are in the log, the next version of a model."""
    cut = CompleteCut(seal, [table.spec for table in model.tables], rows, (), StopWatch({}))
    await model.commit(cut, durable, failed, asyncio.Event())


class FaultyLog(LmdbStore):
    """A log that calls `before_append` with the name of a stream, which may wait, raise or return a refusal."""

    before_append: Callable[[str], object] = staticmethod(lambda _stream: None)

    def append(self, stream: str, *arguments: Any, **options: Any) -> Future[None]:
        note = stream.startswith("heads/") and options.get("patient")  # A view waits for all but notes.
        if not note and isinstance(refusal := self.before_append(stream), Exception):
            refused: Future[None] = Future()
            refused.set_exception(refusal)
            return refused
        return super().append(stream, *arguments, **options)


class FullMemory(TableMemory):
    """Memory without room for another table while it is `full`."""

    full = False

    def check(self, nbytes: int, what: str) -> None:
        if self.full:
            raise NoTableMemory("the disk is full")


class SteppedModel(Model):
    """A model that awaits `before_turn` with the number of each turn of a release on its thread."""

    before_turn: Callable[[int], Awaitable[None]] | None = None
    turns = count(1)

    async def on_thread(self, function: Callable[..., T], *args: object) -> T:
        if self.before_turn and function.__name__ == "_turn":
            await self.before_turn(next(self.turns))
        return await super().on_thread(function, *args)


class LocalModel:
    """A model, its log and checkpoints in a folder, and its views.

    Another one on the same folder simulates a restart.

    Attributes:
        model: the model, a `SteppedModel` unless a test passes its own.
        log: its log, a `FaultyLog`.
        options: how new views make releases.
        views: the views in use, by consumer.
        lost: why a view could not be restored, by consumer.
    """

    def __init__(
        self,
        directory: Path,
        log_max_bytes: int = 1 << 28,
        model: Model | None = None,
        options: ReleaseOptions = RELEASE_OPTIONS,
    ) -> None:
        """With `model`, use that model, for example of a service."""
        self.directory, self.options = directory, options
        if model is None:
            log = FaultyLog(LogOptions(directory=directory / "log", max_bytes=log_max_bytes))
            store = CheckpointStore("clicks", Place(str(directory / "checkpoints")))
            model = SteppedModel("clicks", log, store, FullMemory())
        self.model: Any = model
        self.log: Any = model.log
        self.views, self.lost = dict[str, View](), dict[str, str]()

    @classmethod
    async def opened(cls, directory: Path, **settings: Any) -> "LocalModel":
        """Open what a folder has, if anything."""
        local = cls(directory, **settings)
        names = local.log.items("view/")
        views = [View(name, local.model, ViewLog(local.log, name).view(), local.options) for name in names]
        if record := recorded_models(local.log).get("clicks"):
            await local.model.recover(record, [view.replay for view in views if view.replay])
            local.lost = {view.owner: lost for view in views if (lost := await view.recover())}
            local.views = {view.owner: view for view in views if view.owner not in local.lost}
        return local

    def view(self, name: str = "top") -> View:
        """The view of a consumer; creates it if there is none."""
        return self.views.get(name) or self.views.setdefault(name, View(name, self.model, options=self.options))

    async def prepared_view(self, policy: Policy, name: str = "top") -> View:
        """A view with the tables that its policy follows."""
        view = self.view(name)
        await view.prepare(policy)
        return view

    @contextmanager
    def log_that(self, act: Callable[[str], object]) -> Iterator[None]:
        """Call `act` with the stream's name before each record of a release."""
        self.log.before_append = lambda stream: act(stream) if stream.startswith(("heads/", "releases/")) else None
        yield
        self.log.before_append = lambda _stream: None

    @contextmanager
    def full_memory(self) -> Iterator[None]:
        """No table fits into memory."""
        self.model.memory.full = True
        yield
        self.model.memory.full = False

    async def checkpoint(self) -> Manifest:
        """Write a checkpoint of the model and its views."""
        written: Manifest = await self.model.checkpoint(lambda: list(self.views.values()), dict)
        return written

    async def cut(self, changes: Mapping[str, Rows]) -> None:
        """Publish some rows, by table and id, as the next version."""
        await self.cut_batches(self.batches(changes))

    def batches(self, changes: Mapping[str, Rows]) -> list[RowBatch]:
        """Batches of some rows, by table and id."""
        tables = {table.spec.name: table.spec for table in self.model.tables}
        return [
            RowBatch(
                Shard.whole(tables[name]), np.array(sorted(some)), np.stack([some[row] for row in sorted(some)])
            )
            for name, some in changes.items()
            if some
        ]

    async def cut_batches(
        self, rows: Sequence[RowBatch], whole: Sequence[str] = (), *, resync: bool = False
    ) -> None:
        """Publish some rows as the next version; for the tables in `whole`, these are all rows.

        `resync`: the rows are from a run that does not continue the earlier one.
        """
        await commit(self.model, self.seal_of_cut(rows, whole, resync=resync), rows)

    def seal_of_cut(self, rows: Sequence[RowBatch], whole: Sequence[str] = (), *, resync: bool = False) -> Seal:
        """Write the rows of the next version to the log; returns the seal that completes it."""
        store, version = self.model.store, self.model.seals.newest_version + 1
        shards = [batch.shard for batch in rows]
        layout = store.use_layout(
            pack_layout([table.spec for table in self.model.tables], shards), shards, version
        )
        for slot, batch in enumerate(rows):
            store.append(version, 0, slot, pack_rows(slot, batch, layout.number))
        seal = replace(sealed(version), sealed_unix_ns=version, whole=tuple(whole), resync=resync)
        return replace(seal, rows=sum(map(len, rows))).after(self.model.seals.newest)

    async def cut_all(self, rows: Sequence[Values]) -> None:
        """Publish every row."""
        names = [table.spec.name for table in self.model.tables]
        await self.cut({name: dict(enumerate(some)) for name, some in zip(names, rows, strict=True)})

    async def add(self, *tables: TableSpec) -> None:
        await self.model.tables.add(list(tables))

    async def close(self) -> None:
        """Stop like a crash: loses what is only in memory."""
        await self.model.stop()
        self.log.close()
