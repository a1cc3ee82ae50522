"""Writes what replicas served when, and reads it."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import xxhash

from deltasync.base.clock import Moment
from deltasync.base.errors import DeltasyncError
from deltasync.base.events import EventKind, Events
from deltasync.base.threads import in_own_thread
from deltasync.consumers.consumer import Consumer, Replica
from deltasync.consumers.follow import (
    REPEAT_SECONDS,
    HistoryLine,
    HistoryPage,
    history_stream,
    pack_line,
    page_of,
    read_lines,
)
from deltasync.consumers.registry import ConsumerRegistry, offset_in
from deltasync.core.table_form import Mode
from deltasync.log.log_store import LogStore
from deltasync.model.feed import Feed
from deltasync.model.model import Model
from deltasync.service.consumers import Consumers
from deltasync.service.models import Models

_LOOK_SECONDS = 1.0
_REPEAT_NS = int(REPEAT_SECONDS * 1e9)
# A process that was suspended has not seen anything, so that a look counts for no longer than this.
LONGEST_LOOK_NS = 5 * 10**9
# Bounds the memory of an answer, whatever the number of replicas.
_PAGE_VERSIONS = 10_000


@dataclass
class _Watched:
    """What the service knows of a consumer's history.

    Attributes:
        consumer: the consumer.
        written: the newest line in the log.
        present: what the last look found, with the time until then.
        looked: when that was.
        recorded: seals that lines have as held by the present replicas.
    """

    consumer: Consumer
    written: HistoryLine
    present: HistoryLine
    looked: Moment
    recorded: set[int] = field(default_factory=set)


class Histories:
    """The histories of the consumers of this process. Used in the event loop."""

    def __init__(
        self,
        models: Models,
        registry: ConsumerRegistry,
        consumers: Consumers,
        keep_seconds: float,
        events: Events,
        clock: Callable[[], Moment] = Moment.now,
    ) -> None:
        self._models = models
        self._registry = registry
        self._consumers = consumers
        self.keep_seconds = keep_seconds
        self._events = events
        self._clock = clock
        self._watched = dict[str, _Watched]()  # By consumer.

    async def of(self, name: str, since_seconds: float, last: int, from_ns: int | None = None) -> HistoryPage:
        """At most `last` lines of a consumer: the newest of those since then, or those from `from_ns` on."""
        log = self._models.storage.logs.of(self._consumers.get(name).model)
        watched = self._watched.get(name)
        now_ns = watched.present.watched_ns if watched else log.newest(history_stream(name))

        def read() -> HistoryPage:
            first = from_ns
            if first is None:
                first = _first_of(log, name, now_ns - int(since_seconds * 1e9), last)
            return page_of(read_lines(log, name, first), last, _PAGE_VERSIONS)

        return await in_own_thread(read)

    async def until_now(self, name: str, seconds: float) -> list[HistoryLine]:
        """The lines of a consumer of the last seconds, oldest first, and what is so now as the last one.

        Empty until the service has looked at the consumer.
        """
        if (watched := self._watched.get(name)) is None:
            return []
        log, newest = self._models.storage.logs.of(self._consumers.get(name).model), [watched.written]
        if watched.present.watched_ns > watched.written.watched_ns:
            newest.append(watched.present)
        first_ns = newest[-1].watched_ns - int(seconds * 1e9) - _REPEAT_NS
        lines = await in_own_thread(lambda: list(read_lines(log, name, first_ns)))
        return [*(each for each in lines if each.watched_ns < newest[0].watched_ns), *newest]

    async def run(self) -> None:
        """Write lines, and drop those that are too old, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Look at all consumers once. It reports failures."""
        registered = self._registry.consumers
        self._watched = {
            name: each for name, each in self._watched.items() if registered.get(name) is each.consumer
        }
        for consumer in list(registered.values()):
            try:
                if model := self._models.get(consumer.model):
                    await self._look_at(consumer, model)
            except DeltasyncError as error:
                self._report(consumer.name, error)
            await asyncio.sleep(0)  # With many consumers, others get their turn.

    async def _look_at(self, consumer: Consumer, model: Model) -> None:
        name = consumer.name
        if (watched := self._watched.get(name)) is None:  # The service has started, or has taken the model over.
            newest = await in_own_thread(_newest_line, model.log, name)
            watched = _Watched(consumer, newest, newest, self._clock())
        feed, before, now = self._consumers.feed(consumer), watched.present, self._clock()
        if feed is None or self._registry.consumers.get(name) is not consumer:  # It left meanwhile.
            return
        seen_ns = min(max(1, now.after_ns(watched.looked)), LONGEST_LOOK_NS)
        written, stream = watched.written, history_stream(name)
        line = line_of(consumer, feed, before, now.unix_ns, before.watched_ns + seen_ns)
        processes = _processes(consumer)
        line = replace(
            line,
            fleet=tuple(sorted(processes)),
            held=_held(consumer, feed, line, watched, processes),
            after_ns=written.watched_ns,
        )
        watched.present, watched.looked = line, now
        self._watched[name] = watched
        is_due = line.replicas and line.watched_ns >= written.watched_ns + _REPEAT_NS
        if not is_due and not _says_more(line, written):
            return
        watched.written = line
        appended = asyncio.wrap_future(model.log.append(stream, line.watched_ns, 0, 0, pack_line(line)))
        appended.add_done_callback(partial(self._record_written, name))
        if line.watched_ns // _REPEAT_NS != written.watched_ns // _REPEAT_NS:
            model.log.truncate(stream, max(0, line.watched_ns - int(self.keep_seconds * 1e9)))

    def _record_written(self, consumer: str, written: "asyncio.Future[None]") -> None:
        if not written.cancelled() and isinstance(error := written.exception(), Exception):
            self._report(consumer, error)

    def _report(self, consumer: str, error: Exception) -> None:
        text = "a line of its history could not be written"
        self._events.emit(EventKind.FAILED, text, error, consumer=consumer)


def _first_of(log: LogStore, consumer: str, since_ns: int, last: int) -> int:
    """The time of the oldest of the newest `last` lines, without decoding lines."""
    times = deque((each.number for each in log.read(history_stream(consumer), max(0, since_ns))), last)
    return times[0] if times else since_ns


def _newest_line(log: LogStore, consumer: str) -> HistoryLine:
    lines = read_lines(log, consumer, log.newest(history_stream(consumer)))
    return next(lines, HistoryLine(unix_ns=0))


def line_of(consumer: Consumer, feed: Feed, before: HistoryLine, now_unix_ns: int, watched_ns: int) -> HistoryLine:
    """What each replica of a consumer has proven now; `before` is the line before."""
    newest, versions = 0, dict[str, int]()
    for replica in sorted(consumer.fleet, key=lambda each: each.name):
        number = offset_in(feed.history, feed.seal_of, replica.applied)
        earlier = before.replicas.get(replica.name, 0)
        versions[replica.name] = _proven(consumer, replica, feed.version_of(number), earlier)
        newest = max(newest, number if versions[replica.name] else 0)
    follows = consumer.follows.kept if consumer.follows else None
    line = HistoryLine(
        unix_ns=now_unix_ns,
        watched_ns=watched_ns,
        number=newest,
        follows=(follows.name or str(follows.version)) if follows else "",
        replicas=versions,
        objections=consumer.objection.withdrawn if consumer.objection else 0,
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


def _proven(consumer: Consumer, replica: Replica, version: int, before: int) -> int:
    """The version that a replica has proven, 0 = none: it acknowledged `version`, and had proven `before`."""
    if replica.damaged:
        return 0
    if _proves_now(consumer, replica):
        return version
    # It connected again, or has not compared a newer release yet.
    return min(before, version)


def _proves_now(consumer: Consumer, replica: Replica) -> bool:
    return replica.checked or consumer.policy.mode is Mode.IDS


def _processes(consumer: Consumer) -> set[str]:
    """Short ids of the processes of the connected replicas."""
    # Without the id of a process, each connection counts as another one.
    names = (f"{each.name}/{each.instance or each.since_ns}" for each in consumer.connected)
    return {xxhash.xxh32_hexdigest(each.encode()) for each in names}


def _held(
    consumer: Consumer, feed: Feed, line: HistoryLine, watched: _Watched, processes: set[str]
) -> tuple[int, ...]:
    """The seals of versions that every connected replica holds exactly, or has held since the line before."""
    connected, withdrawn = consumer.connected, line.objections != watched.present.objections
    before = set(watched.present.fleet)
    if before - processes or withdrawn:  # What they held before the loss of one counts no more.
        for each in connected:
            each.held.clear()
    if before != processes or withdrawn:
        watched.recorded = set()
    seals = {version: feed.seals.checksum_of(version) for version in set(line.replicas.values())}
    for each in connected:
        if _proves_now(consumer, each) and not each.damaged:
            each.note_held(seals[line.replicas[each.name]])
    ever = set(connected[0].held) if connected else set[int]()
    held = ever - (watched.recorded - set(seals.values()))
    for each in connected:
        held = {seal for seal in held if seal in each.held}
    watched.recorded = watched.recorded & ever | held
    return tuple(sorted(held))


def _says_more(line: HistoryLine, written: HistoryLine) -> bool:
    """Whether a line has anything but a later time that the newest line in the log has not."""
    if not set(written.held).issuperset(line.held):
        return True
    return replace(line, unix_ns=0, watched_ns=0, after_ns=0, held=()) != replace(
        written, unix_ns=0, watched_ns=0, after_ns=0, held=()
    )
