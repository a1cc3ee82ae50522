"""Writes what replicas served when, and reads it."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from deltasync.base.errors import DeltasyncError
from deltasync.base.events import EventKind, Events
from deltasync.consumers.consumer import Consumer, Replica
from deltasync.consumers.registry import ConsumerRegistry, offset_in
from deltasync.consumers.serving_history import (
    REPEAT_SECONDS,
    HistoryLine,
    HistoryPage,
    history_stream,
    pack_line,
    page_of,
    read_lines,
    read_lines_from,
)
from deltasync.core.table_form import Mode
from deltasync.log.log_store import LogStore
from deltasync.model.feed import Feed
from deltasync.service.consumers import Consumers
from deltasync.service.models import Models

_LOOK_SECONDS = 1.0
# How far to look back for the newest line after a start. Without it, replicas prove their version once more.
_START_SECONDS = 3600.0
# Bounds the memory of an answer, whatever the number of replicas.
_PAGE_VERSIONS = 10_000
# Lines that are too old are dropped this often.
_DROP_NS = 60 * 10**9


class Histories:
    """The histories of the consumers of this process. Used in the event loop."""

    def __init__(
        self, models: Models, registry: ConsumerRegistry, consumers: Consumers, keep_seconds: float, events: Events
    ) -> None:
        self._models = models
        self._registry = registry
        self._consumers = consumers
        self._keep_ns = int(keep_seconds * 1e9)
        self._events = events
        self._newest = dict[str, HistoryLine]()  # By consumer.

    async def of(self, name: str, since_seconds: float, last: int, from_unix_ns: int | None = None) -> HistoryPage:
        """A page of a consumer's lines.

        Args:
            name: the consumer.
            since_seconds: how far to look back.
            last: the page begins with the newest `last` lines, and has no more.
            from_unix_ns: begin with the lines from this time on instead; None = do not.

        Raises:
            NotFound: no consumer has that name.
            StorageFailed: the log cannot be read.
        """
        log = self._models.storage.logs.of(self._consumers.get(name).model)

        def read() -> HistoryPage:
            first = _first_of(log, name, since_seconds, last) if from_unix_ns is None else from_unix_ns
            return page_of(read_lines_from(log, name, first), last, _PAGE_VERSIONS)

        return await asyncio.to_thread(read)

    async def run(self) -> None:
        """Write lines, and drop those that are too old, until cancelled. It reports failures and goes on."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self._newest = {name: line for name, line in self._newest.items() if name in self._registry.consumers}
            for consumer in list(self._registry.consumers.values()):
                try:
                    await self._look_at(consumer)
                except DeltasyncError as error:
                    self._report(consumer.name, error)
                await asyncio.sleep(0)  # With many consumers, others get their turn.

    async def _look_at(self, consumer: Consumer) -> None:
        model, name = self._models.get(consumer.model), consumer.name
        if model is None:
            return
        if name not in self._newest:  # The service has started, or has taken the model over.
            self._newest[name] = HistoryLine(unix_ns=0)
            for line in await asyncio.to_thread(_newest_line, model.log, name):
                self._newest[name] = line
        feed, before = self._consumers.feed(consumer), self._newest[name]
        if feed is None or self._registry.consumers.get(name) is not consumer:  # It left meanwhile.
            return
        stream, now_unix_ns = history_stream(name), time.time_ns()
        if set_back := before.unix_ns > now_unix_ns + REPEAT_SECONDS * 1e9:
            # Otherwise followers would wait until the clock reaches the times of these lines again.
            model.log.drop(stream, now_unix_ns)
            before = replace(before, unix_ns=0)
        line = line_of(consumer, feed, before, now_unix_ns)
        same = line.replicas == before.replicas and (line.number, line.follows) == (before.number, before.follows)
        is_due = set_back or (line.replicas and line.unix_ns >= before.unix_ns + REPEAT_SECONDS * 1e9)
        if same and not is_due:
            return
        self._newest[name] = line
        written = asyncio.wrap_future(model.log.append(stream, line.unix_ns, 0, 0, pack_line(line)))
        written.add_done_callback(partial(self._note_written, name))
        if line.unix_ns // _DROP_NS != before.unix_ns // _DROP_NS:
            model.log.truncate(stream, max(0, line.unix_ns - self._keep_ns))

    def _note_written(self, consumer: str, written: "asyncio.Future[None]") -> None:
        if not written.cancelled() and isinstance(error := written.exception(), Exception):
            self._report(consumer, error)

    def _report(self, consumer: str, error: Exception) -> None:
        text = "a line of its history could not be written"
        self._events.emit(EventKind.FAILED, text, error, consumer=consumer)


def _newest_line(log: LogStore, consumer: str) -> Iterable[HistoryLine]:
    return deque(read_lines(log, consumer, _START_SECONDS), 1)


def _first_of(log: LogStore, consumer: str, since_seconds: float, last: int) -> int:
    """The time of the oldest of the newest `last` lines, without decoding lines."""
    since = max(0, time.time_ns() - int(since_seconds * 1e9))
    times = deque((each.number for each in log.read(history_stream(consumer), since)), last)
    return times[0] if times else since


def line_of(consumer: Consumer, feed: Feed, before: HistoryLine, now_unix_ns: int) -> HistoryLine:
    """What the replicas of a consumer have proven now; `before` is the line before."""
    has_rows = consumer.policy.mode is not Mode.IDS
    newest, versions = 0, dict[str, int]()
    for replica in sorted(consumer.fleet, key=lambda each: each.name):
        number = offset_in(feed.history, feed.seal_of, replica.applied)
        earlier = before.replicas.get(replica.name, 0)
        versions[replica.name] = _proven(replica, feed.version_of(number), earlier, has_rows=has_rows)
        newest = max(newest, number if versions[replica.name] else 0)
    follows = consumer.follows.kept if consumer.follows else None
    line = HistoryLine(
        unix_ns=max(now_unix_ns, before.unix_ns + 1),  # Lines are numbered by time, even if a clock is set back.
        number=newest,
        follows=(follows.name or str(follows.version)) if follows else "",
        replicas=versions,
    )
    if (head := feed.head_of(newest)) is None:
        return line
    return replace(
        line,
        version=head.version,
        step=head.step,
        event_time_unix_ns=head.event_time_unix_ns,
        rows=head.rows,
        bytes=head.bytes,
    )


def _proven(replica: Replica, version: int, before: int, *, has_rows: bool) -> int:
    """The version that a replica has proven, 0 = none: it acknowledged `version`, and had proven `before`."""
    if replica.damaged:
        return 0
    if replica.checked or not has_rows:
        return version
    # It connected again, or has not compared a newer release yet.
    return min(before, version)
