"""What the replicas of a soak put rows into: one store for each kind of target there is."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from tests.soak.training import beacons

from deltasync.client import CallbackTarget, KeyedTarget, NumpyTarget, Position, ReadableTarget, Release, Target
from deltasync.core.position import line_of
from deltasync.core.rows import Ids, Values
from deltasync.core.tables import TableSpec
from deltasync.trainer.example.options import ModelOptions

# What of `Store.held` says of which rows a table's are, or which version each row was told with, begins so.
KEYS, TOLD = "keys:", "told:"
# What the TorchRec trainer trains.
CLICK_MODEL = ModelOptions(users=400, items=300, cross_buckets=300, dim=8, hidden=16)


class Store(Protocol):
    """A target, and what it holds."""

    target: Target
    position: Position

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """See `ReadableTarget`."""

    def held(self) -> dict[str, Any]:
        """[rows, dim] by table; by key [keys, dim], and `KEYS` [keys], ascending; of ids only `TOLD`."""

    def mixed(self, release: Release) -> str:
        """What shows that it holds rows of two steps, or of another one than a release tells; or nothing."""


class _InMemory:
    position = Position()

    def __init__(self, target: ReadableTarget) -> None:
        self.target: Target = target
        self._readable = target

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        return self._readable.read(table, ids)

    def mixed(self, release: Release) -> str:
        for table in release.tables:
            marks = self.read(table, beacons(table.name))
            # Of a table of which no version is sealed yet, all rows are zeros.
            if marks is not None and marks.any() and not (marks.astype(np.int64) == release.step % 2048).all():
                return f"table {table.name!r} has rows of steps {np.unique(marks).tolist()} in step {release.step}"
        return ""


class NumpyStore(_InMemory):
    """Rows in NumPy arrays, which readers need not wait for."""

    def __init__(self, _replica: str, _socket: str) -> None:
        self._arrays = NumpyTarget(reads="copies")
        super().__init__(self._arrays)

    def held(self) -> dict[str, Any]:
        return dict(self._arrays.tables)


class KeyedStore(_InMemory):
    def __init__(self, _replica: str, _socket: str) -> None:
        self._keyed = KeyedTarget()
        super().__init__(self._keyed)

    def held(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with self._keyed.reading() as reading:
            for name, table in reading.tables.items():
                found[KEYS + name] = table.keys()
                found[name], _ = table.lookup(found[KEYS + name])
        return found


class IdsStore:
    """Which ids a consumer of mode `ids` was told, and the newest version that each was told with."""

    position = Position()

    def __init__(self, _replica: str, _socket: str) -> None:
        self.target: Target = CallbackTarget(self._apply)
        self._told: dict[str, Ids] = {}
        self._history = ""

    def read(self, _table: TableSpec, _ids: Ids) -> Values | None:
        """Nothing can be read back."""
        return None

    def mixed(self, _release: Release) -> str:
        """Rows have no values."""
        return ""

    def held(self) -> dict[str, Any]:
        return {TOLD + name: told for name, told in self._told.items()}

    def _apply(self, release: Release) -> None:
        if release.resync or line_of(release.position.history) != line_of(self._history):  # Versions count anew.
            self._told.clear()
        elif release.position.history != self._history:  # A restored service goes on from this version.
            for told in self._told.values():
                np.minimum(told, release.version, out=told)
        self._history = release.position.history
        for table in release.tables:
            told = np.zeros(table.rows, np.int64)
            before = self._told.get(table.name, told[:0])
            told[: len(before)] = before
            self._told[table.name] = told
        for rows in release.rows:
            self._told[rows.table.name][rows.ids] = release.version


class TorchStore(_InMemory):
    """The click model of the TorchRec trainer."""

    def __init__(self, _replica: str, _socket: str) -> None:
        from deltasync.client.targets.torch_target import TorchTarget
        from deltasync.trainer.example.model import ClickModel

        self._module = TorchTarget(ClickModel(CLICK_MODEL).eval())
        super().__init__(self._module)

    def held(self) -> dict[str, Any]:
        return {name: rows.numpy() for name, rows in self._module.tables().items()}


class RedisStore:
    """Rows in a server, which outlive the replica."""

    def __init__(self, replica: str, socket: str) -> None:
        import redis

        from deltasync.client.targets.redis_target import RedisRows, RedisTarget

        client = redis.Redis(unix_socket_path=socket)
        self._redis, self._rows = RedisTarget(client, replica), RedisRows(client, replica)
        self.target: Target = self
        self.position = self._redis.position
        self._tables: list[TableSpec] = []

    def apply(self, release: Release) -> None:
        self._redis.apply(release)
        self._tables = release.tables

    def read(self, _table: TableSpec, _ids: Ids) -> Values | None:
        """Nothing is read back."""
        return None

    def mixed(self, _release: Release) -> str:
        """Whoever reads while a release is written finds rows of two versions, as `RedisTarget` says."""
        return ""

    def held(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for table in self._tables:
            rows, there = self._rows.lookup(table.name, np.arange(table.rows))
            found[KEYS + table.name], found[table.name] = np.flatnonzero(there), rows[there]
        return found


STORES: dict[str, Callable[[str, str], Store]] = {
    "numpy": NumpyStore,
    "keyed": KeyedStore,
    "ids": IdsStore,
    "torch": TorchStore,
    "redis": RedisStore,
}
