"""A service in the test's event loop, without sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from tests.support.faults import Faults
from tests.support.log import log_of
from tests.support.wire import TABLES, part, publish_open, random_rows

from deltasync.api.process import sources_of
from deltasync.api.publish import add
from deltasync.base.clock import Moment
from deltasync.base.events import Event
from deltasync.core.position import Position
from deltasync.core.tables import Shard
from deltasync.cuts.messages import check_close, check_open
from deltasync.cuts.session import PublishSession, open_session
from deltasync.service.backup import Backup, Backups
from deltasync.service.fsck import Checked, check_service
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service
from deltasync.status.process import ProcessState, Sources
from deltasync.views.view import View
from deltasync.wire.row_messages import ReceivedRows, read_request

Scenario = Callable[[Service], Coroutine[Any, Any, None]]


class SetClock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self._ns, self._ahead_ns = 10**18, 0

    def __call__(self) -> Moment:
        return Moment(self._ns + self._ahead_ns, self._ns)

    def wait(self, seconds: float) -> None:
        self._ns += int(seconds * 1e9)

    def set_ahead(self, seconds: float) -> None:
        """Set the wall clock so far ahead of the right time."""
        self._ahead_ns = int(seconds * 1e9)


@asynccontextmanager
async def opened(
    data_dir: Path,
    listener: Callable[[Event], None] | None = None,
    clock: Callable[[], Moment] = Moment.now,
    faults: Faults | None = None,
    **settings: Any,
) -> AsyncIterator[Service]:
    """A service after recovery. `listener` gets all events from the start."""
    faults = faults or Faults()
    async with asyncio.TaskGroup() as tasks:
        options = ServiceOptions(**{"data_dir": data_dir, "look_seconds": 0.001, **settings})
        service = Service(options, tasks, clock=clock, **faults.collaborators)
        _faults[service] = faults
        if listener:
            service.events.listen(listener)
        try:
            await service.recovery.all()
        except BaseException:
            log_of(service).close()
            service._lock.close()
            raise
        try:
            yield service
        finally:
            await service.drain()


_faults = WeakKeyDictionary[Service, Faults]()


def faults_of(service: Service) -> Faults:
    """The calls of a service's log and places."""
    return _faults[service]


def run(data_dir: Path, scenario: Scenario, **settings: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), opened(data_dir, **settings) as service:
            await scenario(service)

    asyncio.run(main())


def view_of(service: Service, consumer: str) -> View:
    """The view of a consumer."""
    view = service.views.get(service.registry.get(consumer))
    assert view
    return view


def sources(service: Service) -> Sources:
    """What the status code reads from a service."""
    return sources_of(service, ProcessState(draining=service.draining))


async def join(service: Service, **fields: Any) -> PublishSession:
    opening = check_open(publish_open(**fields).open)
    return await open_session(await service.publishing.open(opening.model), opening)


async def publish(service: Service, step: int = 1, **fields: Any) -> PublishSession:
    """Join as a rank, and publish all rows of its tables, drawn with the step as seed. Returns when applied."""
    tables = list(fields.pop("tables", TABLES))
    shards = fields.pop("shards", [Shard.whole(table) for table in tables])
    session, rows = await join(service, tables=tables, shards=shards, **fields), random_rows(step, tables)
    await send(session, part(step, [(slot, range(len(some)), some) for slot, some in enumerate(rows)], full=True))
    await session.coordinator.settled()
    return session


async def send(session: PublishSession, requests: list[Any]) -> Position | None:
    position = None
    for request in requests:
        received = read_request(request.SerializeToString())
        if isinstance(received, ReceivedRows):
            position = await add(session, received) or position
        else:
            position = await session.close(check_close(received.close, session.tables))
    return position


def backups(service: Service) -> Backups:
    options, events = service.options, service.events
    return Backups(service.models, service.checkpoints, options.data_dir, events, service.draining)


def back_up(data_dir: Path, url: Path) -> Backup:
    """Back up a data directory that no service uses."""

    async def main() -> Backup:
        async with asyncio.timeout(60), opened(data_dir) as service:
            return await backups(service).make(str(url), "a test")

    try:
        return asyncio.run(main())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group


async def check(service: Service) -> list[Checked]:
    """Read and check everything that a service stores."""
    return await check_service(service.models, service.views, service.events, "who asks")
