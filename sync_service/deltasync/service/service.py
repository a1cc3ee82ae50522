"""A service: its models and consumers, and their housekeeping."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from deltasync.access.limits import Limits
from deltasync.base.clock import Moment
from deltasync.base.events import EventCounts, EventKind, EventLog, Events, RecentEvents
from deltasync.base.process import FreedMemory
from deltasync.base.threads import in_own_thread, name_threads
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.store import check_formats
from deltasync.cluster.bucket import Member
from deltasync.cluster.owners import JoiningProcess, Owners
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.log.data_directory import CHECKPOINTS, lock_data_directory
from deltasync.log.lmdb_store import LmdbStore, read_format
from deltasync.log.log_store import EmbeddedLogs, LogOptions, Logs, LogStore
from deltasync.log.records import check_format_record, check_log, check_not_missing
from deltasync.service.checkpoints import Checkpoints
from deltasync.service.consumers import Consumers
from deltasync.service.following import Following
from deltasync.service.hosting import Hosting, SharedLogs
from deltasync.service.kept_versions import Versions
from deltasync.service.models import Models, OpenPlace, Publishing, Storage
from deltasync.service.operators import ConsumerPauses, Removals
from deltasync.service.options import ServiceOptions
from deltasync.service.recoveries import Recoveries, Reloading, models_to_recover
from deltasync.service.serving_history import Histories
from deltasync.service.volumes import Volumes
from deltasync.views.registry import ViewRegistry

# Freed memory to reuse for the next messages. The rest, for example after a flood, goes back to the system.
_FREED_BYTES = 512 << 20


class Service:
    """The parts of a service. Created and used in one event loop. Without `logs` it opens its own log.

    `clock` tells times and durations of rollouts; `open_log` and `open_place` open its log and its checkpoints.
    """

    def __init__(
        self,
        options: ServiceOptions,
        tasks: asyncio.TaskGroup,
        logs: Logs | None = None,
        clock: Callable[[], Moment] = Moment.now,
        open_log: Callable[[LogOptions], LogStore] = LmdbStore,
        open_place: OpenPlace = Place,
    ) -> None:
        self.options = options
        self.draining = asyncio.Event()
        self.limits = Limits(options.limits)
        self.event_counts, self.recent_events = EventCounts(), RecentEvents()
        self.events = Events()
        with contextlib.ExitStack() as undo:
            self._lock = undo.enter_context(lock_data_directory(options.data_dir))
            self.logs = undo.enter_context(contextlib.closing(logs or _embedded_log(options, open_log)))
            self.limits.count("log_queue_bytes", self._log_queue_bytes)
            self.volumes = Volumes(self.logs, options.data_dir / CHECKPOINTS, self.events)
            # `volumes` listens first, to log the failure of a volume before its consequences.
            for listener in (self.volumes.hear, EventLog(keep=self.recent_events.add), self.event_counts):
                self.events.listen(listener)
            storage = Storage(options, self.logs, open_place, shared=logs is not None)
            recorded = [models_to_recover(log, storage.checkpoints_of) for log in self.logs.each()]
            self.registry = ConsumerRegistry(
                self.logs, options.replica_retention_seconds, self.events, self.limits
            )
            undo.pop_all()
        self.views = ViewRegistry(tasks, self.events, options.releases)
        owners = JoiningProcess(Member("", "", "")) if storage.shared else Owners(Member("", "", ""))
        self.models = Models(storage, owners, self.registry, self.views, self.limits, self.volumes)
        for records in recorded:
            self.models.recovering |= records
        self.publishing = Publishing(self.models, self.registry, self.limits, self.events, options.norm_limit)
        self.consumers = Consumers(self.models, self.registry, self.views, self.events)
        self.recovery = Recoveries(
            self.models, self.publishing, self.registry, self.views, self.events, self.draining
        )
        self.reloading = Reloading(self.models, self.recovery, self.events, self.draining, tasks)
        self.checkpoints = Checkpoints(self.models, self.registry, self.views, options, self.events, self.draining)
        self.histories = Histories(
            self.models, self.registry, self.consumers, options.history_seconds, self.events, clock
        )
        self.versions = Versions(self.models, self.registry, self.checkpoints, options, self.events, clock)
        self.following = Following(
            self.models,
            self.registry,
            self.consumers,
            self.views,
            self.histories,
            self.events,
            clock,
            options.look_seconds,
        )
        self.removals = Removals(self.models, self.registry, self.events, options.deletion_seconds)
        self.pauses = ConsumerPauses(self.models, self.registry, self.views, self.events)

    def hosting(self, logs: SharedLogs) -> Hosting:
        """Create the `Host` that takes over and gives up models on shared logs."""
        return Hosting(
            logs, self.models, self.registry, self.recovery, self.reloading, self.checkpoints, self.events
        )

    def join(self, owners: Owners) -> None:
        """Join a cluster: `owners` decides which models this process owns."""
        self.models.owners, self.recent_events.process = owners, owners.me.name

    async def run(self) -> None:
        """Do the housekeeping until cancelled."""
        freed = FreedMemory(_FREED_BYTES)

        async def keep() -> None:
            await self._keep(freed)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.repeat(keep))
            tasks.create_task(self.repeat(self.volumes.look_after))
            tasks.create_task(self.reloading.run())
            tasks.create_task(self.histories.run())
            tasks.create_task(self.following.run())

    async def wait_idle(self, seconds: float) -> None:
        """Wait until no cut is under way, but no longer than `seconds`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(each.idle() for each in self.models.publishers())), seconds)

    async def drain(self) -> None:
        """Finish all work and write it to disk."""
        self.registry.write_offsets()  # First, before later steps can fail.
        await self.reloading.end()
        await self.publishing.drain()
        await self.views.drain()
        for name, model in list(self.models.items()):
            if coordinator := self.models.coordinators.get(name):
                await coordinator.drain()
            await model.stop()
        await in_own_thread(self.logs.close)
        self._lock.close()

    async def repeat(self, chore: Callable[[], Awaitable[None]]) -> None:
        """Do a chore again and again, until cancelled. Report its errors as events."""
        while True:
            await asyncio.sleep(self.options.housekeeping_seconds)
            try:
                await chore()
            except Exception as error:  # noqa: BLE001  # a failed chore must not end the service
                self.events.emit(EventKind.FAILED, "housekeeping failed and will be retried", error)

    async def _keep(self, freed: FreedMemory) -> None:
        name_threads()
        for log in self.logs.each():
            log.queue.limit(self.limits.options.log_queue_bytes)  # A reload may have changed the limit.
        await in_own_thread(freed.give_back)
        self.registry.forget_the_gone()
        for coordinator in self.models.publishers():
            coordinator.abandon_forsaken(time.monotonic())
        await self.publishing.look_after()
        if not self.volumes.trouble:
            await self.consumers.configure_again()

    def _log_queue_bytes(self) -> int:
        return sum(log.queue.bytes for log in self.logs.each())


def _embedded_log(options: ServiceOptions, open_log: Callable[[LogOptions], LogStore]) -> Logs:
    directory, checkpoints = options.data_dir / "log", options.data_dir / CHECKPOINTS
    # Before the log is opened: a start that is refused must leave everything as it is.
    check_formats(Place(str(checkpoints), deadline_seconds=None))
    if (record := read_format(directory)) is not None:
        check_format_record(record)
    else:
        check_not_missing(checkpoints)
    log = open_log(LogOptions(directory=directory, max_bytes=options.log_max_bytes))
    log.queue.limit(options.limits.log_queue_bytes)
    try:
        check_log(log)
    except BaseException:
        log.close()
        raise
    return EmbeddedLogs(log)
