"""Logs for tests: a service's log, one with a slow disk, and one whose disk refuses LMDB's head pages."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

from deltasync.log.log_store import LogStore
from deltasync.service.service import Service

_TIMEOUT = 20


def log_of(service: Service) -> LogStore:
    """The log that all models share."""
    (log,) = service.logs.each()
    return log


@contextmanager
def held_up(log: LogStore) -> Iterator[None]:
    """Delay all submitted writes while the block runs."""
    begun, go = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        begun.set()
        assert go.wait(_TIMEOUT)

    log.queue.submit(wait, 0)
    assert begun.wait(_TIMEOUT)
    try:
        yield
    finally:
        go.set()


class Heads:
    """Controls writes of the head pages of LMDB files that are opened from now on.

    After the disk has refused one, LMDB neither reads nor writes until it is opened again.

    Attributes:
        refused: whether the disk refuses head pages.
        landed: whether a refused page is written nevertheless.
        opened: whether the file can be opened.
        left: what a vain attempt to open it leaves in the file; empty = what was there.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.refused, self.landed, self.opened, self.left = False, False, True, b""
        self._open = lmdb.open
        patch.setattr("deltasync.log.lmdb_store.lmdb.open", self._environment)

    def _environment(self, folder: str, **named: Any) -> "_Environment":
        if not self.opened:
            if self.left:
                (Path(folder) / "data.mdb").write_bytes(self.left)
            raise lmdb.DiskError("data.mdb: Input/output error")
        return _Environment(self, self._open(folder, **named))


class _Environment:
    def __init__(self, heads: Heads, environment: lmdb.Environment) -> None:
        self._heads, self._environment, self._panicked = heads, environment, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def begin(self, *, write: bool = False, **named: Any) -> Any:
        if self._panicked:
            raise lmdb.PanicError("mdb_txn_begin: MDB_PANIC: Update of meta page failed")
        return self._writing(**named) if write else self._environment.begin(**named)

    @contextmanager
    def _writing(self, **named: Any) -> Iterator[lmdb.Transaction]:
        with self._environment.begin(write=True, **named) as txn:
            yield txn
            if not self._heads.refused:
                return
            if not self._heads.landed:
                txn.abort()
        self._panicked = True
        raise lmdb.Error("mdb_txn_commit: Input/output error")
