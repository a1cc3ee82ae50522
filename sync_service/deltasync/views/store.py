"""Where a view is kept: files of its tables in a folder, and what they are in the log."""

import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltasync.core.delivery import Delivery
from deltasync.core.errors import StorageFailed
from deltasync.core.mode import Mode
from deltasync.core.value_types import ValueType
from deltasync.feeds.release import Head
from deltasync.storage.log import Log
from deltasync.storage.mapped_table import MappedTable
from deltasync.views.statistics import Account
from deltasync.views.table import ViewTable


@dataclass(frozen=True)
class StoredTable:
    """A table of a view, and the folder of its files."""

    table: ViewTable
    folder: str


@dataclass(frozen=True, kw_only=True)
class ViewRecord:
    """What the log says of a view as of its last flush.

    Attributes:
        history: the id of the view.
        model_history: the model's.
        forked: the version at which the view began.
        flushed: the release the files are at, or after.
        seen: the version up to which rows that changed are known to be dirty.
    """

    history: str
    model_history: str
    forked: int
    flushed: int
    seen: int


class ViewStore:
    """The files and records of one view. Everything blocks."""

    def __init__(self, log: Log, consumer: str, directory: Path) -> None:
        self._log = log
        self._directory = directory
        self.name = f"view/{consumer}"
        self._last_release = f"release/{consumer}"

    def make(self, source: MappedTable, delivery: Delivery) -> StoredTable:
        """Make a table's files, all zero.

        Raises:
            StorageFailed: there is no room.
        """
        folder = uuid.uuid4().hex
        try:
            (self._directory / folder).mkdir(parents=True)
            return StoredTable(ViewTable(source, delivery, self._directory / folder, new=True), folder)
        except OSError as error:
            raise StorageFailed(f"{self._directory / folder} cannot be made: {error.strerror}") from error

    def open(
        self, tables: Iterable[dict[str, Any]], sources: Mapping[str, MappedTable]
    ) -> tuple[StoredTable, ...]:
        """The tables that were written down.

        Raises:
            StorageFailed: a file is missing or damaged.
        """
        return tuple(self._open(sources[each["table"]], each) for each in tables)

    def write(self, record: ViewRecord, kept: Iterable[StoredTable]) -> None:
        """Write down what the files are, once they are on disk, and drop what the log no longer needs to hold.

        Raises:
            StorageFailed: the log could not be written.
        """
        tables = [_described(each) for each in kept]
        self._log.put_meta(self.name, {**vars(record), "tables": tables}).result()
        self._log.truncate(self.name, record.flushed, 0).result()

    def write_release(self, head: Head, account: Account) -> None:
        """Write down what the newest release is; before that, no replica may be given it.

        Raises:
            StorageFailed: the log could not be written.
        """
        self._log.put_meta(self._last_release, {"head": vars(head), "account": vars(account)}).result()

    def last_release(self) -> tuple[Head, Account] | None:
        """What was written down of the newest release."""
        meta = self._log.meta(self._last_release).get("")
        return (Head(**meta["head"]), Account(**meta["account"])) if meta else None

    def records(self, after: int) -> Iterator[tuple[int, int, memoryview]]:
        """Release, slot and payload of every record of the releases after `after`.

        Raises:
            StorageFailed: a record is damaged.
        """
        return self._log.records_after(self.name, after)

    def remove_unused(self, kept: Iterable[StoredTable]) -> None:
        """Remove the files of tables that are not among these."""
        used = {each.folder for each in kept}
        for folder in self._directory.iterdir() if self._directory.exists() else ():
            if folder.name not in used:
                shutil.rmtree(folder, ignore_errors=True)  # Or at the next change.

    def discard(self) -> None:
        """Remove everything there is of the view."""
        self._log.put_meta(self.name, None).result()
        self._log.put_meta(self._last_release, None).result()
        self._log.truncate(self.name, 2**63, 0).result()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _open(self, source: MappedTable, meta: dict[str, Any]) -> StoredTable:
        delivery = Delivery(source.spec, ValueType(meta["value_type"]), Mode(meta["mode"]))
        return StoredTable(
            ViewTable(source, delivery, self._directory / meta["folder"], new=False), meta["folder"]
        )


def _described(kept: StoredTable) -> dict[str, Any]:
    delivery = kept.table.delivery
    plain = {"table": delivery.spec.name, "value_type": delivery.value_type.value, "mode": delivery.mode.value}
    return {**plain, "folder": kept.folder}
