"""Seals the complete cuts of a model one by one, and creates the tables of their run."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from deltasync.access.limits import Limits
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
from deltasync.core.tables import TableSpec
from deltasync.cuts.admission import Run
from deltasync.cuts.cut import Cut
from deltasync.cuts.deletes import PendingDeletes
from deltasync.cuts.norm_guard import NormGuard
from deltasync.log.log_store import LogUnavailable
from deltasync.log.volume import VolumeFailed
from deltasync.model.applied_tables import changes
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

    async def seal(self, cut: Cut, announced: "AnnouncedTables") -> Position:
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

    async def _sealed(self, cut: Cut, announced: "AnnouncedTables", watch: StopWatch) -> Position:
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
        self.model.seals.append(seal)
        self.model.recent.add(CutTimes(seal, watch.lapped_ns, watch.seconds))
        # Before anything that could fail, because the cut is part of the history now.
        self._applying = asyncio.create_task(self._apply(seal, rows, begun))
        self.model.tables.published |= {name: table.rows for name, table in cut.tables.items()}
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
                self.model.failure = ""
                self.model.recent.note_applied(seal.version)
                return
            await first_of(self._ending.wait(), seconds=pause)
            if self._ending.is_set():
                return


class AnnouncedTables:
    """The tables that the ranks of a run announce, while a rank is connected or a cut is under way. Used in the
    event loop.
    """

    def __init__(self, model: Model, limits: Limits) -> None:
        self._model = model
        self._limits = limits
        self._run = ""
        self._tables: Mapping[str, TableSpec] = {}
        self._made: tuple[Mapping[str, TableSpec], int] | None = None  # The tables, and their last change.
        self._bytes_to_be = 0  # Bytes of the model's tables while some are being created.

    async def look_for_room(self, tables: Sequence[TableSpec]) -> None:
        """Check that there is room for tables before ranks send all rows. Reserves nothing.

        Raises:
            LimitReached: the limits do not allow their bytes.
            StorageFailed: the volume has no room for them.
        """
        if added := self._added_bytes(tables):
            await asyncio.to_thread(self._model.memory.check, added, f"tables of model {self._model.name!r}")

    def check(self, run: Run, tables: Sequence[TableSpec]) -> Mapping[str, TableSpec]:
        """Check a rank's tables against those of the model and of the other ranks of its run.

        Returns:
            The resulting tables by name; pass them to `add` once the rank is admitted.

        Raises:
            Contradiction: a table differs.
            LimitReached: there would be too many tables.
        """
        model, others = self._model, self._tables if run.id == self._run else {}
        again = [table for table in tables if table.name in others]
        first = {table.name: table for table in tables if table.name not in others}
        changed = [
            *changes(model.name, others, again, later_run=False),
            *changes(model.name, model.tables.published_specs, first.values(), later_run=self._is_later(run)),
        ]
        names = {each.spec.name for each in model.tables} | others.keys() | first.keys()
        self._limits.check("tables_per_model", len(names))
        return first | {table.name: table for table in changed}

    def add(self, run: Run, tables: Mapping[str, TableSpec]) -> None:
        """Add the tables of an admitted rank that `check` returned."""
        self._tables = {**(self._tables if run.id == self._run else {}), **tables}
        self._run = run.id

    def forget(self) -> None:
        """Forget all tables after the last rank has left."""
        self._run, self._tables = "", {}

    async def make(self, cut: Cut) -> None:
        """Create the tables of a complete cut before it is sealed.

        Raises:
            Contradiction: a table has changed since its ranks were admitted.
            LimitReached: the limits do not allow their bytes.
            StorageFailed: there is no room; nothing has changed.
        """
        if self._made == (cut.tables, self._model.tables.changes):
            return
        tables = list(cut.tables.values())
        self._bytes_to_be = self._model.tables.nbytes + self._added_bytes(tables)
        try:
            await self._model.tables.add(tables, later_run=self._is_later(cut.run))
        finally:
            self._bytes_to_be = 0
        self._made = cut.tables, self._model.tables.changes

    @property
    def table_bytes(self) -> int:
        """Bytes of the model's tables, including those that are being created."""
        return max(self._model.tables.nbytes, self._bytes_to_be)

    def _added_bytes(self, tables: Sequence[TableSpec]) -> int:
        """Check the limits; return the number of additional bytes."""
        if added := self._model.tables.added_bytes(tables):
            self._limits.check("bytes_per_model", self._model.tables.nbytes + added)
            self._limits.check_more("bytes_in_all", added)
        return added

    def _is_later(self, run: Run) -> bool:
        """Whether it is another run than the last that published, so that tables may have grown."""
        newest = self._model.seals.newest
        return newest is None or newest.run != run.id


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
