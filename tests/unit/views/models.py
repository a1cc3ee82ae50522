"""A model in this process that comes back after a crash."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.local_model import LocalModel, Rows

from deltasync.core.tables import TableSpec


class Models:
    """The model of a folder: one at a time is open, as in one process after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: LocalModel | None = None

    async def open(self, **settings: Any) -> LocalModel:
        """End the one before as a crash does."""
        await self.close()
        self._open = await LocalModel.opened(self.folder, **settings)
        return self._open

    async def published(self, *tables: TableSpec, rows: Mapping[str, Rows]) -> LocalModel:
        """A new model, and some of its rows as version 1."""
        local = await self.open()
        await local.add(*tables)
        await local.cut(rows)
        return local

    async def close(self) -> None:
        if self._open:
            local, self._open = self._open, None
            await local.close()
