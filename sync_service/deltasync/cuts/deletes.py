"""Requests of operators to delete rows, until a sealed cut carries the deletes."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from numpy.typing import ArrayLike

from deltasync.base.errors import Contradiction, InvalidInput, NotFound
from deltasync.base.events import EventKind, Events
from deltasync.base.threads import in_own_thread
from deltasync.base.words import are, counted
from deltasync.core.rows import DeleteRequest, Ids, distinct, row_ids
from deltasync.core.tables import TableSpec
from deltasync.log.log_store import LogStore
from deltasync.log.records import pack_ids, pack_json, reading, unpack_ids, unpack_json

# Maximum number of ids of a model's pending or finished deletes, which stay in memory.
_MOST_PENDING_IDS = 1_000_000
# Maximum number of ids in one request.
MOST_IDS = 100_000


class PendingDeletes:
    """The pending requests of a model.

    Attributes:
        requests: the requests by number, in ascending order.
        done: requests that sealed cuts have carried.
        most_ids: maximum number of ids in all pending requests.
        handed_ids: maximum number of ids that a rank gets at once; the others follow once these are deleted.
    """

    def __init__(self, log: LogStore, model: str, events: Events) -> None:
        self._log = log
        self._model = model
        self._events = events
        self.requests: dict[int, DeleteRequest] = {}
        self.done = DoneDeletes(log, model)
        self.most_ids, self.handed_ids = _MOST_PENDING_IDS, 131_072

    async def recover(self) -> None:
        """Read the requests from the log, in another thread, because they may have millions of ids."""
        recorded = await in_own_thread(_recorded, self._log, self._record_name(""))
        self.requests = {each.number: each for each, _ in recorded}
        await self.done.recover()

    async def ask(
        self, table: str, ids: ArrayLike, tables: Callable[[], Sequence[TableSpec]], by: str
    ) -> DeleteRequest:
        """Write a request for rows of a table to the log. `tables` returns the model's tables at present."""
        spec = _find(self._model, table, tables())
        rows = await asyncio.to_thread(_checked, self._model, spec, ids)
        # Meanwhile the table may have been deleted. A request for it would reach a later table of that name.
        if _find(self._model, table, tables()) != spec:
            raise Contradiction(f"model {self._model!r}: table {table!r} has just changed; try again")
        self._check_room(len(rows))
        return await self._ask(table, rows, f"{counted(len(rows), 'row')} will be deleted", by)

    async def ask_again(self, done: DeleteRequest, rows: Ids, version: int, by: str) -> None:
        """Replace a finished request by a new one for `rows`, because a run continues from `version`, before the
        delete.
        """
        with self.done.replaced(done.number):
            if len(rows):
                rows_will = f"{counted(len(rows), 'row')} will be deleted again"
                text = f"{rows_will}: a run continues from version {version}, which has them"
                await self._ask(done.table, rows, text, by)

    async def _ask(self, table: str, rows: Ids, text: str, by: str) -> DeleteRequest:
        number = max(time.time_ns(), *(number + 1 for number in self.requests), 0)
        request = self.requests[number] = DeleteRequest(number, table, rows)
        try:
            await asyncio.wrap_future(self._log.put(self._record_name(number), _record(request)))
        except Exception:  # But not on cancellation: the log may have the request.
            self.requests.pop(number, None)
            raise
        self._events.emit(EventKind.DELETE_REQUESTED, text, model=self._model, table=table, request=number, by=by)
        return request

    def handed(self, tables: Sequence[TableSpec]) -> list[DeleteRequest]:
        """The oldest requests for some tables, as many as a rank gets at once."""
        oldest: list[DeleteRequest] = []
        if not self.requests:  # The usual case, with every cut.
            return oldest
        count, names = 0, {table.name for table in tables if table.kind.ranked}
        for request in self.requests.values():
            if request.table not in names:
                continue
            count += len(request.ids)
            if oldest and count > self.handed_ids:
                break
            oldest.append(request)
        return oldest

    def finish(self, numbers: Iterable[int], version: int) -> None:
        """Finish requests that the sealed cut `version` carries, without waiting for the disk.

        If the write fails, ranks get them again after a restart, and delete the rows once more.
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
        """Forget the requests of a deleted table, without waiting for the disk."""
        for number in [each.number for each in self.requests.values() if each.table == table]:
            del self.requests[number]
            forgotten = asyncio.wrap_future(self._log.put(self._record_name(number), None))
            forgotten.add_done_callback(partial(self._report, number))
        self.done.forget(table)

    def _check_room(self, rows: int) -> None:
        pending = sum(len(request.ids) for request in self.requests.values())
        if pending + rows > self.most_ids:
            raise Contradiction(
                f"{counted(pending, 'row')} of model {self._model!r} wait to be deleted, and {rows} more would "
                f"exceed the limit of {self.most_ids}: wait until its trainer has published these deletes"
            )

    def _record_name(self, number: object) -> str:
        return f"delete/{self._model}/{number}"

    def _report(self, number: int, forgotten: asyncio.Future[None]) -> None:
        if isinstance(error := forgotten.exception(), Exception):
            text = "a finished delete could not be recorded; a restart may repeat it"
            self._events.emit(EventKind.FAILED, text, error, model=self._model, request=number)


class DoneDeletes:
    """The newest finished deletes of a model, with `most_ids` ids at most. Used in the event loop."""

    def __init__(self, log: LogStore, model: str) -> None:
        self._log, self._model, self.most_ids = log, model, _MOST_PENDING_IDS
        # By number, in the order in which they finished, with the versions that carried them.
        self._requests: dict[int, tuple[DeleteRequest, int]] = {}

    def __contains__(self, number: int) -> bool:
        """Whether the request of that number is among them."""
        return number in self._requests

    async def recover(self) -> None:
        """Read the finished deletes from the log, in another thread."""
        recorded = await in_own_thread(_recorded, self._log, self._record_name(""))
        self._requests = {each[0].number: each for each in recorded}

    def note(self, request: DeleteRequest, version: int) -> "asyncio.Future[None]":
        """Record that the sealed cut `version` has carried a request; the future completes with the write."""
        self._requests[request.number] = request, version
        ids = sum(len(each.ids) for each, _ in self._requests.values())
        while ids > self.most_ids:
            oldest = next(iter(self._requests))
            ids -= len(self._requests[oldest][0].ids)
            self.drop(oldest)
        record = _record(request, version)
        return asyncio.wrap_future(self._log.put(self._record_name(request.number), record))

    def after(self, version: int) -> list[DeleteRequest]:
        """The requests that later versions have carried."""
        return [request for request, carried in self._requests.values() if carried > version]

    @contextmanager
    def replaced(self, number: int) -> Iterator[None]:
        """Drop a request if the block succeeds in replacing it; hide it during the block."""
        request = self._requests.pop(number)
        try:
            yield
        except BaseException:  # Also if the caller is cancelled.
            self._requests[number] = request
            raise
        self.drop(number)

    def drop(self, number: int) -> None:
        """Drop a request without waiting for the disk; it may reappear after a restart."""
        self._requests.pop(number, None)
        self._log.put(self._record_name(number), None)

    def forget(self, table: str) -> None:
        """Drop the requests of a deleted table."""
        for number in [number for number, (each, _) in self._requests.items() if each.table == table]:
            self.drop(number)

    def _record_name(self, number: object) -> str:
        return f"deleted/{self._model}/{number}"


def _record(request: DeleteRequest, version: int = 0) -> bytes:
    """The record of a request, which `version` carried. Ids are bytes: JSON would block the event loop."""
    head = pack_json({"table": request.table, "version": version})
    return b"\n".join((head, pack_ids(request.ids)))


def _recorded(log: LogStore, prefix: str) -> list[tuple[DeleteRequest, int]]:
    """The requests in the log, each with the version that carried it, by version and number. Blocks."""
    requests = list[tuple[DeleteRequest, int]]()
    for number, record in log.items(prefix).items():
        with reading(f"record {prefix}{number}"):
            head, _, ids = record.partition(b"\n")
            content = unpack_json(head)
            request = DeleteRequest(int(number), content["table"], unpack_ids(ids).copy())
            requests.append((request, content["version"]))
    return sorted(requests, key=lambda each: (each[1], each[0].number))


def _find(model: str, table: str, tables: Sequence[TableSpec]) -> TableSpec:
    for spec in tables:
        if spec.name == table:
            return spec
    names = ", ".join(sorted(spec.name for spec in tables if spec.kind.ranked))
    raise NotFound(f"model {model!r} has no table {table!r}; its embedding tables: {names or 'none yet'}")


def _checked(model: str, table: TableSpec, ids: ArrayLike) -> Ids:
    if not table.kind.ranked:
        raise InvalidInput(
            f"table {table.name!r} of model {model!r} is of kind {table.kind.value!r}: only rows of embedding "
            "tables can be deleted"
        )
    rows = row_ids(table.name, ids)
    if not 1 <= len(rows) <= MOST_IDS:
        raise InvalidInput(f"{len(rows)} ids: use 1 to {MOST_IDS} in a request")
    for wrong in (rows.min(), rows.max()):
        if not 0 <= wrong < table.rows:
            raise InvalidInput(
                f"row {wrong} is outside table {table.name!r} of model {model!r}, which has rows 0 to "
                f"{table.rows - 1}"
            )
    return distinct(rows)
