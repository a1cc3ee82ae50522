"""The records of one view in the log of its model."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from deltasync.core.errors import StorageFailed
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.tables import Shard, TableSpec
from deltasync.feeds.frozen_release import Head
from deltasync.storage.log_store import LAST_NUMBER, LogStore
from deltasync.storage.records import name_of, pack_json, pack_rows, reading, unpack_json, unpack_rows
from deltasync.views.history import KEPT_HEADS
from deltasync.views.records import head_of_record, heads_stream, releases_stream, view_name

# Ids of one record.
_PIECE_IDS = 1 << 16
# Records handed to the log that are not on disk yet: others write to it as well.
_UNWRITTEN_RECORDS = 16
# Records of ids are records of rows without values: the table does not matter.
_IDS = Shard.whole(TableSpec("ids", 1, 1))


class ViewLog:
    """The records of a view. Every method blocks, except for `note`; any thread."""

    def __init__(self, log: LogStore, consumer: str) -> None:
        self._log = log
        self._name, self._heads, self._ids = view_name(consumer), heads_stream(consumer), releases_stream(consumer)

    def view(self) -> Mapping[str, Any] | None:
        """The record of the view; None if there is none.

        Raises:
            StorageFailed: it is damaged.
        """
        if (record := self._log.items(self._name).get("")) is None:
            return None
        with reading(f"record {self._name}"):
            found = unpack_json(record)
            return {name: found[name] for name in ("history", "model_history")}

    def write(self, head: Mapping[str, Any], ids: Sequence[Ids], view: Mapping[str, Any] | None) -> None:
        """Write a release down; doing it again after an error writes the same.

        Args:
            head: the record of its head.
            ids: the rows that it took, by slot.
            view: the record of the view that begins with the release.

        Raises:
            StorageFailed: the log refused some of it: there is no such release.
        """
        number, written = head["number"], list[Future[None]]()
        if view:
            written.append(self._log.put(self._name, pack_json(view)))
        for slot, some in enumerate(ids):
            for index, start in enumerate(range(0, len(some), _PIECE_IDS)):
                piece = some[start : start + _PIECE_IDS]
                rows = RowBatch(_IDS, piece, np.empty((len(piece), 0), np.float32))
                written.append(
                    self._log.append(self._ids, number, slot, index, *pack_rows(slot, rows), patient=True)
                )
                if len(written) >= _UNWRITTEN_RECORDS:
                    written[-_UNWRITTEN_RECORDS].exception()  # The head is refused, too, if this was.
        self._log.append(self._heads, number, 0, 0, pack_json(head), after=written).result()

    def note(self, head: Mapping[str, Any]) -> None:
        """Write a head again that says more. Nobody waits for it: if it is refused, a restart knows less."""
        self._log.append(self._heads, head["number"], 0, 0, pack_json(head), patient=True)

    def heads(self, first: int = 0, last: int = LAST_NUMBER) -> Iterator[dict[str, Any]]:
        """The records of heads with numbers from `first` to `last`, oldest first.

        Raises:
            StorageFailed: one is damaged.
        """
        for each in self._log.read(self._heads, first, last):
            with reading(name_of(self._heads, each.number)):
                yield unpack_json(each.payload)

    def heads_before(self, newest: Mapping[str, Any]) -> list[Head]:
        """The heads of releases before the newest one, oldest first, back to where the seals no longer chain.

        Raises:
            StorageFailed: one is damaged.
        """
        heads, seal = deque[Head](), newest["after"]
        for record in reversed(list(self.heads(last=newest["number"] - 1))):
            if not seal or record["seal"] != seal:
                break
            heads.appendleft(head_of_record(record))
            seal = record["after"]
        return list(heads)

    def ids(self, head: Mapping[str, Any]) -> list[Ids]:
        """The rows ([n], ascending, by slot) that a release took.

        Raises:
            StorageFailed: some are damaged, or missing.
        """
        number, rows = head["number"], head["rows"]
        found: list[list[Ids]] = [[] for _ in rows]
        missing = list(rows)
        for each in self._log.read(self._ids, number, number) if any(rows) else ():
            # What there is beyond that is of a release of this number that was never finished.
            if each.part < len(rows) and missing[each.part] > 0:
                with reading(name_of(self._ids, number, each.part, each.index)):
                    found[each.part].append(unpack_rows(each.payload, lambda _: [_IDS] * len(rows)).ids)
                missing[each.part] -= len(found[each.part][-1])
        if any(missing):
            raise StorageFailed(f"the log does not have the rows that release {number} took")
        return [np.concatenate([np.zeros(0, np.int64), *some]) for some in found]

    def cut(self, number: int, newest: int) -> None:
        """Drop what the log has up to release `number`, which checkpoints have; the newest one is `newest`.

        Raises:
            StorageFailed: the log could not be written; nothing was lost.
        """
        self._log.truncate(self._ids, number).result()
        self._log.truncate(self._heads, max(0, min(number, newest - KEPT_HEADS))).result()

    def discard(self) -> None:
        """Remove all records.

        Raises:
            StorageFailed: the log could not be written.
        """
        self._log.put(self._name, None).result()
        self._log.truncate(self._heads, LAST_NUMBER).result()
        self._log.truncate(self._ids, LAST_NUMBER).result()
