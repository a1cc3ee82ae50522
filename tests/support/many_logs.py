"""Logs of models that services take over from each other, without brokers."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.support.faults import Faults

from deltasync.base.clock import Durations
from deltasync.base.errors import NotOwner, Owner, StorageFailed
from deltasync.log.log_store import LogOptions, LogStore
from deltasync.log.records import check_log


class ManyLogs:
    """A separate log for each model, in a folder; implements `SharedLogs`.

    Attributes:
        faults: replaces calls of the logs.
        fenced: why this process has lost its logs; None while it has not.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.faults = folder, Faults()
        self.fenced: StorageFailed | None = None
        self._open = dict[str, LogStore]()
        self.commits = Durations()
        self.accepted_risks: list[str] = []

    def open(self, model: str, _owner: Owner | None = None) -> LogStore:
        log = self._open[model] = self.faults.open_log(LogOptions(directory=self._folder / model))
        log.shared = True
        check_log(log)
        return log

    def give_up(self, model: str) -> None:
        self._open.pop(model).close()

    def close_log(self, model: str, *, written: bool) -> None:
        if model in self._open:
            self.give_up(model)

    def lost(self, _model: str) -> StorageFailed | None:
        return self.fenced

    def delete(self, model: str) -> None:
        shutil.rmtree(self._folder / model)

    def known_models(self) -> list[str]:
        return sorted(each.name for each in self._folder.glob("*"))

    def of(self, model: str) -> LogStore:
        if model not in self._open:
            raise not_owner()
        return self._open[model]

    def each(self) -> Sequence[LogStore]:
        return list(self._open.values())

    @property
    def refusing(self) -> bool:
        return any(log.refusing for log in self._open.values())

    def close(self) -> None:
        for model in list(self._open):
            self.give_up(model)


def not_owner() -> NotOwner:
    return NotOwner("another process has it", owner=Owner("other", "other:7000", "http://other:8080"))
