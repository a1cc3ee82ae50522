"""Deletes of rows that operators have asked for, until a sealed cut carries them."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from deltasync.base.errors import Contradiction, InvalidInput, NotFound
from deltasync.base.events import EventKind, Events
from deltasync.base.words import are, counted
from deltasync.core.rows import DeleteRequest, Ids, distinct
from deltasync.core.tables import ID_TYPE, TableSpec
from deltasync.log.log_store import LogStore
from deltasync.log.records import pack_json, reading, unpack_json

# Of a model's newest ones: they are kept in memory.
_MOST_IDS = 1_000_000
# Of one request, and of all of a model together: they are kept in memory.
MOST_IDS = 100_000
_MOST_PENDING_IDS = 1_000_000
# Of those that are handed to a rank at once; the others follow when these are done.
_HANDED_IDS = 131_072


class PendingDeletes:
    """The requests of one model that are not done.

    Attributes:
        requests: by number, in ascending order.
        done: requests that were met.
    """

    def __init__(self, log: LogStore, model: str, events: Events) -> None:
        self._log = log
        self._model = model
        self._events = events
        self.requests: dict[int, DeleteRequest] = {}
        self.done = DoneDeletes(log, model)

    def recover(self) -> None:
        """Take up what is written down.

        Raises:
            StorageFailed: a record is damaged.
        """
        for number, record in self._log.items(self._record_name("")).items():
            with reading(self._record_name(number)):
                found = unpack_json(record)
                ids = np.array(found["ids"], ID_TYPE)
                self.requests[int(number)] = DeleteRequest(int(number), found["table"], ids)
        self.requests = dict(sorted(self.requests.items()))
        self.done.recover()

    async def ask(self, table: str, ids: Sequence[int], tables: Sequence[TableSpec], by: str) -> DeleteRequest:
        """Write down a request.

        Args:
            table: the table's name.
            ids: global row ids, in any order.
            tables: those of the model.
            by: who asks.

        Raises:
            NotFound: the model has no table of that name.
            InvalidInput: no ids or too many, an id outside of the table, or a table that is none of embeddings.
            Contradiction: too many are pending.
        """
        rows = _checked(self._model, _find(self._model, table, tables), ids)
        self._check_room(len(rows))
        return await self._ask(table, rows, f"{are(len(rows), 'row')} to be deleted", by)

    async def ask_again(self, done: DeleteRequest, rows: Ids, version: int, by: str) -> None:
        """Write down that rows of a request that is done, those that are still deleted, are to be deleted again: a
        run goes on from `version`, which was before. Until then the one that is done is written down.

        Raises:
            StorageFailed: it could not be written down, and is to be asked for again.
        """
        with self.done.replaced(done.number):
            if len(rows):
                found = f"{are(len(rows), 'row')} to be deleted again"
                text = f"{found}: a run goes on from version {version}, which has them"
                await self._ask(done.table, rows, text, by)

    async def _ask(self, table: str, rows: Ids, text: str, by: str) -> DeleteRequest:
        number = max(time.time_ns(), *(number + 1 for number in self.requests), 0)
        request = self.requests[number] = DeleteRequest(number, table, rows)
        try:
            record = pack_json({"table": table, "ids": rows.tolist()})
            await asyncio.wrap_future(self._log.put(self._record_name(number), record))
        except Exception:  # Not who asks being gone: what the log was given comes back after a restart.
            self.requests.pop(number, None)
            raise
        self._events.emit(EventKind.DELETE_REQUESTED, text, model=self._model, table=table, request=number, by=by)
        return request

    def handed(self, tables: Sequence[TableSpec]) -> list[DeleteRequest]:
        """The oldest of those that concern some tables, as many as are handed to a rank at once."""
        found: list[DeleteRequest] = []
        if not self.requests:  # Mostly, and this is asked with every cut.
            return found
        count, names = 0, {table.name for table in tables if table.kind.ranked}
        for request in self.requests.values():
            if request.table not in names:
                continue
            count += len(request.ids)
            if found and count > _HANDED_IDS:
                break
            found.append(request)
        return found

    def finish(self, numbers: Iterable[int], version: int) -> None:
        """Forget requests that the sealed cut `version` carries, without waiting for the disk.

        Where that fails they are handed out again after a restart, and deleted once more.
        """
        for number in sorted(self.requests.keys() & set(numbers)):
            request = self.requests.pop(number)
            self.done.note(request, version).add_done_callback(partial(self._report, number))
            forgotten = asyncio.wrap_future(self._log.put(self._record_name(number), None))
            forgotten.add_done_callback(partial(self._report, number))
            text = f"{are(len(request.ids), 'row')} deleted"
            self._events.emit(
                EventKind.ROWS_DELETED,
                text,
                model=self._model,
                table=request.table,
                request=number,
                version=version,
            )

    def forget(self, table: str) -> None:
        """Forget the requests of a table that is no more, without waiting for the disk."""
        for number in [each.number for each in self.requests.values() if each.table == table]:
            del self.requests[number]
            forgotten = asyncio.wrap_future(self._log.put(self._record_name(number), None))
            forgotten.add_done_callback(partial(self._report, number))
        self.done.forget(table)

    def _check_room(self, rows: int) -> None:
        pending = sum(len(request.ids) for request in self.requests.values())
        if pending + rows > _MOST_PENDING_IDS:
            raise Contradiction(
                f"{counted(pending, 'row')} of model {self._model!r} wait to be deleted, {rows} more would be "
                f"over {_MOST_PENDING_IDS}: is its trainer publishing?"
            )

    def _record_name(self, number: object) -> str:
        return f"delete/{self._model}/{number}"

    def _report(self, number: int, forgotten: asyncio.Future[None]) -> None:
        if isinstance(error := forgotten.exception(), Exception):
            text = (
                "what becomes of a delete that is done could not be written; it may be done again after a restart"
            )
            self._events.emit(EventKind.FAILED, text, error, model=self._model, request=number)


class DoneDeletes:
    """Those of one model, as many as are kept. Used in the event loop."""

    def __init__(self, log: LogStore, model: str) -> None:
        self._log, self._model = log, model
        # By number, in the order in which they were done; and the version that each was done with.
        self._requests: dict[int, tuple[DeleteRequest, int]] = {}

    def __contains__(self, number: int) -> bool:
        """Whether the request of that number is kept."""
        return number in self._requests

    def recover(self) -> None:
        """Take up what is written down.

        Raises:
            StorageFailed: a record is damaged.
        """
        found = list[tuple[DeleteRequest, int]]()
        for number, record in self._log.items(self._record_name("")).items():
            with reading(self._record_name(number)):
                content = unpack_json(record)
                request = DeleteRequest(int(number), content["table"], np.array(content["ids"], ID_TYPE))
                found.append((request, content["version"]))
        self._requests = {each[0].number: each for each in sorted(found, key=lambda each: each[1])}

    def note(self, request: DeleteRequest, version: int) -> "asyncio.Future[None]":
        """Note that the sealed cut `version` has carried a request; on disk once what is returned is done."""
        self._requests[request.number] = request, version
        ids = sum(len(each.ids) for each, _ in self._requests.values())
        while ids > _MOST_IDS:
            oldest = next(iter(self._requests))
            ids -= len(self._requests[oldest][0].ids)
            self.drop(oldest)
        record = {"table": request.table, "ids": request.ids.tolist(), "version": version}
        return asyncio.wrap_future(self._log.put(self._record_name(request.number), pack_json(record)))

    def after(self, version: int) -> list[DeleteRequest]:
        """Those that later versions have carried."""
        return [request for request, carried in self._requests.values() if carried > version]

    @contextmanager
    def replaced(self, number: int) -> Iterator[None]:
        """Keep a request no longer once the block has put another one in its place; meanwhile nobody finds it."""
        kept = self._requests.pop(number)
        try:
            yield
        except BaseException:  # Also where who asks has gone.
            self._requests[number] = kept
            raise
        self.drop(number)

    def drop(self, number: int) -> None:
        """Keep a request no longer, without waiting for the disk: after a restart it may be there again."""
        self._requests.pop(number, None)
        self._log.put(self._record_name(number), None)

    def forget(self, table: str) -> None:
        """Keep those of a table no longer, which is no more."""
        for number in [number for number, (each, _) in self._requests.items() if each.table == table]:
            self.drop(number)

    def _record_name(self, number: object) -> str:
        return f"deleted/{self._model}/{number}"


def _find(model: str, table: str, tables: Sequence[TableSpec]) -> TableSpec:
    for spec in tables:
        if spec.name == table:
            return spec
    names = ", ".join(sorted(spec.name for spec in tables if spec.kind.ranked))
    raise NotFound(f"model {model!r} has no table {table!r}; its embedding tables: {names or 'none yet'}")


def _checked(model: str, table: TableSpec, ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    if not table.kind.ranked:
        raise InvalidInput(
            f"table {table.name!r} of model {model!r} is of kind {table.kind.value!r}: only rows of embeddings "
            "can be deleted"
        )
    if not 1 <= len(ids) <= MOST_IDS:
        raise InvalidInput(f"{len(ids)} ids: name 1 to {MOST_IDS} rows in a request")
    for wrong in (min(ids), max(ids)):
        if not 0 <= wrong < table.rows:
            raise InvalidInput(
                f"row {wrong} is outside of table {table.name!r} of model {model!r}, which has rows 0 to "
                f"{table.rows - 1}"
            )
    return distinct(np.array(ids, ID_TYPE))
