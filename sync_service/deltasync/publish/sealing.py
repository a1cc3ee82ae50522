"""Sealing the complete cuts of a model, one after the other."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future

from deltasync.consumers.quarantine import Quarantine
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.backoff import backoff
from deltasync.core.cut_times import CutTimes, StopWatch, way_to_service
from deltasync.core.errors import InvalidInput, ServiceUnavailable
from deltasync.core.event_time import newest_event_time
from deltasync.core.events import EventKind, Events, described
from deltasync.core.position import Position
from deltasync.core.rows import RowBatch
from deltasync.core.seal import Seal
from deltasync.core.signals import first_of
from deltasync.feeds.frozen_release import FrozenRelease
from deltasync.feeds.model import Model
from deltasync.publish.announced import AnnouncedTables
from deltasync.publish.cut import Cut
from deltasync.publish.norm_guard import NormGuard
from deltasync.publish.pending_deletes import PendingDeletes
from deltasync.publish.refusal import Refusal
from deltasync.storage.log_store import LogUnavailable
from deltasync.storage.volume import VolumeFailed


class CutSealer:
    """Seals cuts, and has each applied before the next one is sealed.

    Attributes:
        model: of which.
        deletes: what operators want deleted of it.
        events: where what happens is told.
        guard: knows how large the norms of a table's rows are.
        refusal: of the last cut, if it was refused for what is in it.
        rows: of the cuts sealed since the service started.
        bytes: of these.
    """

    def __init__(
        self,
        model: Model,
        deletes: PendingDeletes,
        tasks: asyncio.TaskGroup,
        events: Events,
        guard: NormGuard,
        consumers: ConsumerRegistry,
    ) -> None:
        self.guard = guard
        self.refusal: Refusal | None = None
        self.rows = self.bytes = 0
        self.model, self.deletes, self.events = model, deletes, events
        self._tasks = tasks
        self._consumers = consumers
        self._quarantine: Quarantine | None = None
        self._order = asyncio.Lock()  # Held while a cut is sealed.
        self._ending = asyncio.Event()
        self._applying: asyncio.Task[None] | None = None

    async def seal(self, cut: Cut, announced: AnnouncedTables) -> Position:
        """Make a complete cut the next version, durably, and before that the tables that it is the first to have;
        it is applied after that.

        Raises:
            Contradiction: its parts do not make up whole tables, or one is something else.
            LimitReached: the limits do not allow its tables.
            StorageFailed: the log cannot take it, or there is no room for its tables.
            ServiceUnavailable: an earlier version is not applied, since the service ends.
        """
        watch = StopWatch(way_to_service(cut.gather_ns, time.time_ns() - cut.step_end_unix_ns))
        async with self._order:
            return await self._sealed(cut, announced, watch)

    @property
    def quarantine(self) -> str:
        """Which versions are kept from consumers, and why; empty if none are."""
        with contextlib.suppress(LogUnavailable, VolumeFailed):  # What the log said when it could be read.
            self._quarantine = self._consumers.quarantine_of(self.model.name)
        return self._quarantine.words if self._quarantine else ""

    def note_refusal(self, error: InvalidInput) -> None:
        """Note that a cut was refused for what is in it; until one is sealed, status says so."""
        self.refusal = Refusal(str(error))
        self.events.emit(EventKind.CUT_REFUSED, error=error, model=self.model.name)

    @contextlib.asynccontextmanager
    async def between_cuts(self) -> AsyncIterator[None]:
        """While no cut is sealed, and none is applied."""
        async with self._order:
            await self.applied()
            yield

    async def applied(self) -> None:
        """Wait until what was sealed is applied."""
        if self._applying:
            await asyncio.wait([self._applying])

    def end(self) -> None:
        """Try nothing again that fails to be applied: the service ends."""
        self._ending.set()

    def say_failed(self, what: str, error: Exception) -> None:
        """Have an error known to whoever looks at the model."""
        self.model.failure = f"{what}: {described(error)}"
        self.events.emit(EventKind.FAILED, what, error, model=self.model.name)

    async def _sealed(self, cut: Cut, announced: AnnouncedTables, watch: StopWatch) -> Position:
        if cut.unpublished:  # Of many shards, it takes long.
            await asyncio.to_thread(cut.check_coverage)
        await self.applied()
        if self.model.position.number < (newest := self.model.seals.newest_version):
            # The service ends, or the model is about to be reloaded.
            raise ServiceUnavailable(f"version {newest} is not applied yet; send step {cut.step} again")
        await announced.make(cut)
        if cut.excess:
            await self._hold_back(cut)  # Before anybody can be given a row of it.
        whole = await asyncio.to_thread(cut.whole) if cut.full else ()
        seal = _seal_of(cut, self.model.seals.newest, whole)
        watch.lap("seal")
        sealed, rows = self.model.store.seal(seal, cut.unwritten), cut.rows_in_memory()
        durable = asyncio.wrap_future(sealed)
        # After it: the seal is known here before its rows are.
        begun = self.model.apply_after(sealed, seal, rows)
        await durable
        watch.lap("log")
        self.model.seals.append(seal)
        self.model.recent.add(CutTimes(seal, watch.lapped_ns, watch.seconds))
        # Before anything that could fail: from here on it is part of the history.
        self._applying = self._tasks.create_task(self._apply(seal, rows, begun))
        self.model.published |= {name: table.rows for name, table in cut.tables.items()}
        self.guard.note(cut.largest_norms, held_back=bool(cut.excess))
        self.refusal = None
        self.rows += seal.rows
        self.bytes += seal.bytes
        self.deletes.finish(cut.deletes, seal.version)
        self.events.emit(EventKind.CUT_SEALED, model=self.model.name, version=seal.version, rows=seal.rows)
        return Position(self.model.history, seal.version, seal.checksum)

    async def _hold_back(self, cut: Cut) -> None:
        self.events.emit(EventKind.CUT_QUARANTINED, cut.excess, model=self.model.name, version=cut.version)
        await self._consumers.hold_back(self.model.name, cut.version, cut.excess)

    async def _apply(
        self, seal: Seal, rows: list[RowBatch] | None, begun: "Future[FrozenRelease | None] | None"
    ) -> None:
        """Apply a sealed cut: again and again if need be, since all later ones build on it."""
        for pause in backoff():
            try:
                await self.model.apply_cut(seal, rows, begun)
            except Exception as error:  # noqa: BLE001  # one model's trouble is its own
                begun = None
                self.say_failed(f"version {seal.version} could not be applied, which is tried again", error)
            else:
                self.model.failure = ""
                self.model.recent.note_applied(seal.version)
                return
            await first_of(self._ending.wait(), seconds=pause)
            if self._ending.is_set():
                return


def _seal_of(cut: Cut, before: Seal | None, whole: tuple[str, ...]) -> Seal:
    # A run learns from no event less than it had learnt from.
    earlier = before.event_time_unix_ns if before and before.run == cut.run.id else None
    return Seal(
        version=cut.version,
        step=cut.step,
        run=cut.run.id,
        run_started_unix_ns=cut.run.started_unix_ns,
        world_size=cut.run.world_size,
        rows=cut.rows,
        bytes=cut.bytes,
        log_bytes=cut.log_bytes,
        step_end_unix_ns=cut.step_end_unix_ns,
        sealed_unix_ns=time.time_ns(),
        resync=cut.must_be_full,
        whole=whole,
        event_time_unix_ns=newest_event_time((cut.event_time_unix_ns, earlier)),
    ).after(before)
