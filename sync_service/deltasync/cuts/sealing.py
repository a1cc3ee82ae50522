"""Seals the complete cuts of a model one by one, and creates the tables of their run."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from deltasync.base.clock import steady_ns
from deltasync.base.errors import InvalidInput, ServiceUnavailable
from deltasync.base.events import EventKind, Events, error_text
from deltasync.base.waiting import backoff, first_of
from deltasync.consumers.pause import Quarantine
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.cut_times import CutTimes, StopWatch, way_to_service
from deltasync.core.position import Position
from deltasync.core.rows import RowBatch
from deltasync.core.seal import Seal, newest_event_time
from deltasync.cuts.announced_tables import AnnouncedTables
from deltasync.cuts.cut import Cut
from deltasync.cuts.deletes import PendingDeletes
from deltasync.cuts.norm_guard import NormGuard
from deltasync.log.log_store import LogUnavailable
from deltasync.log.volume import VolumeFailed
from deltasync.model.model import Model
from deltasync.model.releases import FrozenRelease


class CutSealer:
    """Seals the cuts of a model, and applies each before it seals the next one.

    Attributes:
        model: the model.
        deletes: the deletes of its rows that operators requested.
        events: receives its events.
        guard: checks the norms of rows.
        refusal: why the last cut was refused for its content; None if it was not.
        rows: number of rows in cuts sealed since the service started.
        bytes: bytes of these rows.
    """

    def __init__(
        self,
        model: Model,
        deletes: PendingDeletes,
        events: Events,
        guard: NormGuard,
        consumers: ConsumerRegistry,
    ) -> None:
        self.guard = guard
        self.refusal: CutRefusal | None = None
        self.rows = self.bytes = 0
        self.model = model
        self.deletes = deletes
        self.events = events
        self._consumers = consumers
        self._quarantine: Quarantine | None = None
        self._order = asyncio.Lock()  # Locked while a cut is sealed.
        self._ending = asyncio.Event()
        self._applying: asyncio.Task[None] | None = None

    async def seal(self, cut: Cut, announced: AnnouncedTables) -> Position:
        """Create the new tables of a complete cut, make the cut the next version durably, and begin to apply it.

        Raises:
            Contradiction: its parts do not cover whole tables, or a table differs from the model's.
            LimitReached: the limits do not allow its tables.
            StorageFailed: the log refused it, or there is no room for its tables.
            ServiceUnavailable: an earlier version is not applied, because the service is shutting down.
        """
        watch = StopWatch(way_to_service(cut.gather_ns, time.time_ns() - cut.step_end_unix_ns))
        async with self._order:
            return await self._sealed(cut, announced, watch)

    @property
    def quarantine(self) -> str:
        """The versions in quarantine and the reason; empty if there are none."""
        with contextlib.suppress(LogUnavailable, VolumeFailed):  # Then use the last value read.
            self._quarantine = self._consumers.quarantine_of(self.model.name)
        return self._quarantine.words if self._quarantine else ""

    def note_refusal(self, error: InvalidInput) -> None:
        """Record that a cut was refused for its content; status shows it until a cut is sealed."""
        self.refusal = CutRefusal(str(error))
        self.events.emit(EventKind.CUT_REFUSED, error=error, model=self.model.name)

    @contextlib.asynccontextmanager
    async def between_cuts(self) -> AsyncIterator[None]:
        """Run the block while no cut is being sealed or applied."""
        async with self._order:
            await self.applied()
            yield

    async def applied(self) -> None:
        """Wait until all sealed cuts are applied."""
        if self._applying:
            await asyncio.wait([self._applying])

    def end(self) -> None:
        """Stop retries at the end of the service."""
        self._ending.set()

    def report_failed(self, what: str, error: Exception) -> None:
        """Report an error in the model's status and as an event."""
        self.model.failure = f"{what}: {error_text(error)}"
        self.events.emit(EventKind.FAILED, what, error, model=self.model.name)

    async def _sealed(self, cut: Cut, announced: AnnouncedTables, watch: StopWatch) -> Position:
        if cut.unpublished:  # With many shards, this takes long.
            await asyncio.to_thread(cut.check_coverage)
        await self.applied()
        if self.model.position.number < (newest := self.model.seals.newest_version):
            # The service is shutting down, or the model will be reloaded.
            raise ServiceUnavailable(f"version {newest} is not applied yet; send step {cut.step} again")
        await announced.make(cut)
        if cut.excess:
            await self._hold_back(cut)  # Before any replica can get a row of it.
        whole = await asyncio.to_thread(cut.whole) if cut.full else ()
        seal = _seal_of(cut, self.model.seals.newest, whole)
        watch.lap("seal")
        sealed, rows = self.model.store.seal(seal, cut.unwritten), cut.rows_in_memory()
        durable = asyncio.wrap_future(sealed)
        # After `seal`, so that the model has the seal before its rows.
        begun = self.model.apply_after(sealed, seal, rows)
        await durable
        watch.lap("log")
        self.model.note_sealed(CutTimes(seal, watch.lapped_ns, watch.seconds), cut.tables.values())
        # Before anything that could fail, because the cut is part of the history now.
        self._applying = asyncio.create_task(self._apply(seal, rows, begun))
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
        """Apply a sealed cut, with retries, because all later cuts build on it."""
        for pause in backoff():
            try:
                await self.model.apply_cut(seal, rows, begun)
            except Exception as error:  # noqa: BLE001  # an error of one model must not affect others
                begun = None
                self.report_failed(f"version {seal.version} could not be applied; the service retries", error)
            else:
                return
            await first_of(self._ending.wait(), seconds=pause)
            if self._ending.is_set():
                return


@dataclass(frozen=True)
class CutRefusal:
    """When a cut was refused, by `steady_ns`, and why."""

    reason: str
    at_ns: int = field(default_factory=steady_ns)


def _seal_of(cut: Cut, before: Seal | None, whole: tuple[str, ...]) -> Seal:
    # The newest training event of a run never moves back.
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
