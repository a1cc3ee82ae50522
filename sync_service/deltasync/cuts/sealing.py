"""Sealing the complete cuts of a model, one after the other, with the tables that their run announced."""

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
from deltasync.cuts.cut import Cut
from deltasync.cuts.deletes import PendingDeletes
from deltasync.cuts.norm_guard import NormGuard
from deltasync.cuts.runs import Run
from deltasync.log.log_store import LogUnavailable
from deltasync.log.volume import VolumeFailed
from deltasync.model.model import Model
from deltasync.model.releases import FrozenRelease
from deltasync.model.tables import changes


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
        self.refusal: CutRefusal | None = None
        self.rows = self.bytes = 0
        self.model = model
        self.deletes = deletes
        self.events = events
        self._tasks = tasks
        self._consumers = consumers
        self._quarantine: Quarantine | None = None
        self._order = asyncio.Lock()  # Held while a cut is sealed.
        self._ending = asyncio.Event()
        self._applying: asyncio.Task[None] | None = None

    async def seal(self, cut: Cut, announced: "AnnouncedTables") -> Position:
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
        self.refusal = CutRefusal(str(error))
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
        self.model.failure = f"{what}: {error_text(error)}"
        self.events.emit(EventKind.FAILED, what, error, model=self.model.name)

    async def _sealed(self, cut: Cut, announced: "AnnouncedTables", watch: StopWatch) -> Position:
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


class AnnouncedTables:
    """Those of the run that publishes a model: in memory, while a rank is there or a cut under way. Used in the
    event loop.
    """

    def __init__(self, model: Model, limits: Limits) -> None:
        self._model = model
        self._limits = limits
        self._run = ""
        self._tables: Mapping[str, TableSpec] = {}
        self._made: tuple[Mapping[str, TableSpec], int] | None = None  # Which, and after which change.
        self._bytes_to_be = 0  # Of the model's tables, while some are being made.

    async def look_for_room(self, tables: Sequence[TableSpec]) -> None:
        """See whether there would be room for tables now, so that nobody sends all rows in vain. Takes none.

        Raises:
            LimitReached: the limits do not allow their bytes.
            StorageFailed: the volume does not have them.
        """
        if added := self._added_bytes(tables):
            await asyncio.to_thread(self._model.check_room, added)

    def check(self, run: Run, tables: Sequence[TableSpec]) -> Mapping[str, TableSpec]:
        """Check what a rank announces against what the model has, and the other ranks of its run have announced.

        Returns:
            What the tables are to be, by name: to be added once the rank is let in.

        Raises:
            Contradiction: a table is something else there.
            LimitReached: there would be too many.
        """
        model, others = self._model, self._tables if run.id == self._run else {}
        published = {each.spec.name: each.spec for each in model.tables if model.published.get(each.spec.name)}
        again = [table for table in tables if table.name in others]
        first = {table.name: table for table in tables if table.name not in others}
        changed = [
            *changes(model.name, others, again, later_run=False),
            *changes(model.name, published, first.values(), later_run=self._is_later(run)),
        ]
        names = {each.spec.name for each in model.tables} | others.keys() | first.keys()
        self._limits.check("tables_per_model", len(names))
        return first | {table.name: table for table in changed}

    def add(self, run: Run, tables: Mapping[str, TableSpec]) -> None:
        """Note what a rank that was let in has announced, as `check` has returned it."""
        self._tables = {**(self._tables if run.id == self._run else {}), **tables}
        self._run = run.id

    def forget(self) -> None:
        """Forget what was announced: no rank is there any more."""
        self._run, self._tables = "", {}

    async def make(self, cut: Cut) -> None:
        """Have the tables of a complete cut, which is to be sealed.

        Raises:
            Contradiction: one has become something else since its ranks were let in.
            LimitReached: the limits do not allow their bytes.
            StorageFailed: there is no room; nothing was changed.
        """
        if self._made == (cut.tables, self._model.table_changes):
            return
        tables = list(cut.tables.values())
        self._bytes_to_be = self._model.table_bytes + self._added_bytes(tables)
        try:
            await self._model.add_tables(tables, later_run=self._is_later(cut.run))
        finally:
            self._bytes_to_be = 0
        self._made = cut.tables, self._model.table_changes

    @property
    def table_bytes(self) -> int:
        """Bytes of the model's tables, also of those that are being made: others look for room meanwhile."""
        return max(self._model.table_bytes, self._bytes_to_be)

    def _added_bytes(self, tables: Sequence[TableSpec]) -> int:
        """How many bytes more there would be; the limits allow them."""
        if added := self._model.added_bytes(tables):
            self._limits.check("bytes_per_model", self._model.table_bytes + added)
            self._limits.check_more("bytes_in_all", added)
        return added

    def _is_later(self, run: Run) -> bool:
        """Whether it is another run than the one that has published last: tables may have more rows then."""
        newest = self._model.seals.newest
        return newest is None or newest.run != run.id


@dataclass(frozen=True)
class CutRefusal:
    """When a cut was refused, by `steady_ns`, and why."""

    reason: str
    at_ns: int = field(default_factory=steady_ns)


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
