"""Deletes that operators have asked for, and that sealed cuts have carried.

A run that goes back before one of them has the rows still, and is asked for it again.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from deltasync.core.delete_request import DeleteRequest
from deltasync.core.tables import ID_TYPE
from deltasync.storage.log_store import LogStore
from deltasync.storage.records import pack_json, reading, unpack_json

# Of a model's newest ones: they are kept in memory.
_MOST_IDS = 1_000_000


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
