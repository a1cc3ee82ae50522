"""A model in this process: cuts go straight into it, without a rank or a service."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.seals import sealed

from deltasync.core.policy import Policy
from deltasync.core.rows import RowBatch, Values
from deltasync.core.tables import Shard, TableSpec
from deltasync.feeds.model import Model
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_store import LogOptions, LogStore
from deltasync.storage.model_records import recorded_models
from deltasync.views.records import recorded_view
from deltasync.views.view import View

Rows = Mapping[int, Values]


class LocalModel:
    """A model and its log in a folder, and a view of it: another one of the same folder is a restart."""

    def __init__(self, directory: Path, log_max_bytes: int = 1 << 28) -> None:
        self._directory = directory
        self.log: LogStore = LmdbStore(LogOptions(directory=directory / "log", max_bytes=log_max_bytes))
        self.model = Model("clicks", self.log, directory / "model")

    @classmethod
    async def opened(cls, directory: Path, **settings: Any) -> "LocalModel":
        """What there was in a folder, if anything."""
        local = cls(directory, **settings)
        if record := recorded_models(local.log).get("clicks"):
            await local.model.recover(record)
        return local

    @property
    def view_directory(self) -> Path:
        return self._directory / "view"

    def view(self) -> View:
        """A view, or the one there was."""
        view = View("top", self.model, self.view_directory)
        if record := recorded_view(self.log, "top"):
            view.recover(record)
        return view

    async def prepared_view(self, policy: Policy) -> View:
        """A view that has the tables that the policy follows."""
        view = self.view()
        await view.prepare(policy)
        return view

    async def cut(self, changes: Mapping[str, Rows]) -> None:
        """Publish some rows, by table and id, as the next version."""
        await self.cut_batches(self.batches(changes))

    def batches(self, changes: Mapping[str, Rows]) -> list[RowBatch]:
        """Some rows, by table and id."""
        tables = {mapped.spec.name: mapped.spec for mapped in self.model.tables}
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
        """Publish some rows as the next version; of the tables `whole`, all that there are.

        `resync`: they are of a run that does not go on from the one before.
        """
        version = self.model.seals.newest_version + 1
        seal = replace(sealed(version), sealed_unix_ns=version, whole=tuple(whole), resync=resync)
        seal = seal.after(self.model.seals.newest)
        self.model.store.seal(seal).result()
        self.model.seals.append(seal)
        self.model.published |= {mapped.spec.name: mapped.spec.rows for mapped in self.model.tables}
        await self.model.apply_cut(seal, rows)
        self.model.flush()  # So that it needs no records of its cuts to come back.

    async def cut_all(self, rows: Sequence[Values]) -> None:
        """Publish every row."""
        names = [mapped.spec.name for mapped in self.model.tables]
        await self.cut({name: dict(enumerate(some)) for name, some in zip(names, rows, strict=True)})

    async def add(self, *tables: TableSpec) -> None:
        await self.model.add_tables(list(tables))

    async def close(self) -> None:
        """End, with nothing of the view flushed."""
        await self.model.close()
        self.log.close()
