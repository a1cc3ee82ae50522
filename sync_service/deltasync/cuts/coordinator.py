"""Does what the machine of a cut decides: for the ranks that publish a model, the log, and the model."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby

from deltasync.access.limits import Limits
from deltasync.base.clock import steady_ns
from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput, ServiceUnavailable
from deltasync.base.events import EventKind, Events, error_text
from deltasync.consumers.consumer import Quarantine
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.cut_times import StopWatch
from deltasync.core.position import Position
from deltasync.core.rows import DeleteRequest
from deltasync.core.seal import Seal
from deltasync.core.tables import TableSpec
from deltasync.cuts import machine
from deltasync.cuts.admission import Opening, Run, may_go_on
from deltasync.cuts.cut import Cut, PartEnd
from deltasync.cuts.deletes import PendingDeletes
from deltasync.cuts.machine import State, next_state
from deltasync.cuts.norm_guard import NormGuard
from deltasync.log.log_store import LogFull, LogUnavailable
from deltasync.log.volume import VolumeFailed
from deltasync.model.applied_tables import changes
from deltasync.model.model import CompleteCut, Model

# A cut is abandoned after all ranks of its run have been away for this long.
FORSAKEN_SECONDS = 60.0


@dataclass
class RankStream:
    """The stream of an admitted rank.

    Attributes:
        process: the name of the rank's process.
        tables: the tables of its run.
        takes_deletes: whether it deletes rows on request.
        since_ns: when it began or, if it is over, ended, by `steady_ns`.
        finished: whether the rank said goodbye.
        left: why it ended; empty while it is open.
    """

    number: int
    rank: int
    process: str
    tables: list[TableSpec]
    takes_deletes: bool
    since_ns: int = field(default_factory=steady_ns)
    ended: bool = False
    finished: bool = False
    left: str = ""


@dataclass
class OpenCut:
    """The cut under way, its number in the machine, and the position that its ranks wait for."""

    cut: Cut
    number: int
    sealed: asyncio.Future[Position]


@dataclass(frozen=True)
class CutRefusal:
    """When a cut was refused, by `steady_ns`, and why."""

    reason: str
    at_ns: int = field(default_factory=steady_ns)


class CutCoordinator:
    """The ranks that publish one model, and the cut that they send. Used in the event loop.

    Attributes:
        streams: number of streams of ranks, admitted or not, while the model has no published version.
        sessions: the newest stream of each rank of the run.
        differing: names of tables whose rows differ between the run's ranks.
        refusal: why the last cut was refused for its content; None if it was not.
        rows: number of rows in cuts sealed since the service started.
        bytes: bytes of these rows.
        whenever_sealed: awaited after each cut, before the ranks get their answer; must not raise. It adds a model
            after its first version; None if there is nothing to do.
        rolling_back: locked while the model is rolled back.
    """

    def __init__(
        self,
        model: Model,
        deletes: PendingDeletes,
        events: Events,
        guard: NormGuard,
        consumers: ConsumerRegistry,
        limits: Limits,
    ) -> None:
        self.model = model
        self.deletes = deletes
        self.events = events
        self.guard = guard
        self.streams = 0
        self.sessions = dict[int, RankStream]()
        self.open_cut: OpenCut | None = None
        self.differing = set[str]()
        self.refusal: CutRefusal | None = None
        self.rows = self.bytes = 0
        self.whenever_sealed: Callable[[], Awaitable[None]] | None = None
        self.rolling_back = asyncio.Lock()
        self._consumers = consumers
        self._limits = limits
        self._numbers = count(1)
        self._state = _state_of(model)
        self._began_ns = steady_ns()  # When the present run took over, or the service started.
        self._made: tuple[Mapping[str, TableSpec], int] | None = None  # Created tables, and their last change.
        self._bytes_to_be = 0  # Bytes of the model's tables while some are being created.
        self._retired: Callable[[], DeltasyncError] | None = None
        self._quarantine: Quarantine | None = None
        self._forsaken_at: float | None = None
        self._order = asyncio.Lock()  # Locked while a cut is sealed and applied.
        self._sealing: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()

    # Ranks.

    @property
    def run(self) -> Run | None:
        """The run that publishes; None before the first one."""
        return self._state.run

    @property
    def run_id(self) -> str:
        """The id of the run that publishes; empty before the first one."""
        return self.run.id if self.run else ""

    @property
    def connected(self) -> list[int]:
        """The connected ranks."""
        return sorted(rank for rank, session in self.sessions.items() if not session.ended)

    def publishing(self, table: str) -> list[int]:
        """The connected ranks that publish a table."""
        return [rank for rank in self.connected if any(each.name == table for each in self.sessions[rank].tables)]

    async def admit(self, opening: Opening) -> RankStream:
        """Admit a rank, whose run may take over from another. Its tables are created with its first cut."""
        number, specs = next(self._numbers), opening.tables
        self._check_goes_on(opening)
        if refused := next_state(self._state, self._joined(opening, number, {})).error:
            raise refused
        if self.model.seals.newest is None:
            fits = machine.first_cut_fits(specs, self.model.store.capacity)
            if not fits.yes:
                self.model.failure = fits.reason
                raise Contradiction(f"model {self.model.name!r}: {fits.reason}")
        await self.guard.learn(self.model, specs)
        if added := self._added_bytes(specs):
            await asyncio.to_thread(self.model.memory.check, added, f"tables of model {self.model.name!r}")
        tables = self._checked_tables(opening.run, specs)
        self._check_goes_on(opening)  # Again: a rollback may have ended meanwhile.
        self._do(self._joined(opening, number, tables))
        stream = RankStream(number, opening.rank, opening.run.process, specs, opening.takes_deletes)
        self.sessions[opening.rank] = stream
        return stream

    def leave(self, stream: RankStream, reason: str) -> None:
        """Record that a rank's stream has ended, and why."""
        stream.ended, stream.since_ns, stream.left = True, steady_ns(), reason
        self._do(machine.RankLeft(stream.number))

    def give_back(self, run: Run) -> None:
        """Let the run before this one publish again, after this one has failed without a sealed cut."""
        self._do(machine.RunFailed(run))

    def waits_for(self, request: DeleteRequest) -> str:
        """Why a request to delete rows is pending, in words."""
        here = [session for session in self.sessions.values() if not session.ended]
        if self.run is None or not here:
            return "no run is publishing; the next run deletes them"
        if not all(session.takes_deletes for session in here):
            return f"the trainer of run {self.run.id} does not support deletes: update it"
        if not any(table.name == request.table and table.kind.ranked for table in here[0].tables):
            text = f"run {self.run.id} publishes no embedding table of that name"
            return f"{text}; the next run with one deletes them"
        return f"run {self.run.id} deletes them with one of its next cuts"

    def refuse(self, error: InvalidInput) -> None:
        """Record that a cut was refused for its content; status shows it until a cut is sealed."""
        self.refusal = CutRefusal(str(error))
        self.events.emit(EventKind.CUT_REFUSED, error=error, model=self.model.name)

    @property
    def quarantine(self) -> str:
        """The versions in quarantine and the reason; empty if there are none."""
        with contextlib.suppress(LogUnavailable, VolumeFailed):  # Then use the last value read.
            self._quarantine = self._consumers.quarantine_of(self.model.name)
        return self._quarantine.description if self._quarantine else ""

    @property
    def table_bytes(self) -> int:
        """Bytes of the model's tables, including those that are being created."""
        return max(self.model.tables.nbytes, self._bytes_to_be)

    # Parts of a cut.

    def receive(self, stream: RankStream, step: int) -> OpenCut | None:
        """Find the cut for a rank's rows after a step, or begin it with the first rows of a later step. None if
        the rank's part is already whole, so that the rows do not count.
        """
        self._check_not_retired()
        skipped = machine.Skip() in self._do(machine.RowsArrived(stream.rank, stream.number, step))
        return None if skipped else self.open_cut

    def close(self, stream: RankStream, end: PartEnd, *, repeated: bool = False) -> "asyncio.Future[Position]":
        """Record that a rank's part is whole, unless it was before; after the last one, the cut is sealed.

        Return its future position, done once replicas can get it.
        """
        cut = self.open_cut
        if not repeated:
            self.differing |= end.differing
            self._do(machine.PartClosed(stream.rank, stream.number, end.step))
        if cut and cut.cut.step == end.step:
            return cut.sealed
        done = asyncio.get_running_loop().create_future()
        done.set_result(self.model.sealed)
        return done

    def check_room(self, current: OpenCut, *, refused: bool = False) -> None:
        """Check that the log can store the rows of a cut that have arrived, now or once checkpoints free space.

        `refused`: it cannot now.
        """
        cut, capacity = current.cut, self.model.store.capacity
        if refused or cut.log_bytes > capacity:
            tables = list(cut.tables.values())
            self._do(machine.LogFull(current.number, cut.step, cut.log_bytes, capacity, tables, refused))

    def note_room(self) -> None:
        """Record that checkpoints have freed as much of the log as possible."""
        self._do(machine.RoomMade())

    def abandon(self, reason: str) -> None:
        """Abandon the cut under way, if any, while its parts arrive."""
        self._do(machine.CutAbandoned(reason))

    def abandon_forsaken(self, now: float) -> None:
        """Abandon the cut under way after all ranks of its run were away for a while; `now` is in seconds."""
        here = self.open_cut is None or bool(self.connected)
        self._forsaken_at = None if here else self._forsaken_at or now
        if self._forsaken_at and now - self._forsaken_at >= FORSAKEN_SECONDS:
            self.abandon("all ranks of its run have left")

    def forget_table(self, table: str) -> None:
        """Forget the requests for a deleted table, and abandon the cut under way if it contains the table."""
        if self.open_cut and table in self.open_cut.cut.tables:
            self.abandon(f"table {table!r} was deleted")
        self.differing.discard(table)
        self.guard.forget(table)
        self.deletes.forget(table)

    # Waiting, and the end.

    async def idle(self) -> None:
        """Wait until no cut is under way."""
        while self.open_cut:
            await asyncio.wait([self.open_cut.sealed])

    async def settled(self) -> None:
        """Wait until the cut that is being sealed is applied. Does not wait for parts that have not arrived."""
        if self._sealing:
            await asyncio.wait([self._sealing])

    @contextlib.asynccontextmanager
    async def between_cuts(self) -> AsyncIterator[None]:
        """Run the block while no cut is being sealed or applied."""
        async with self._order:
            yield

    async def retire(self, refusal: Callable[[], DeltasyncError] | None = None) -> None:
        """Admit no more ranks: they get the error `refusal`, by default that the model was deleted."""
        text = f"model {self.model.name!r} has just been deleted; reconnect"
        self._retired = refusal or partial(ServiceUnavailable, text)
        self.abandon("its model has left this process")
        await self.drain()

    async def drain(self) -> None:
        """Wait until the cut that is being sealed is applied; do not retry failures."""
        self._ending.set()
        await self.settled()

    # What the machine decides.

    def _do(self, event: machine.Event) -> tuple[machine.Action, ...]:
        """Change the state, do what follows, and raise the error if the event is refused."""
        after = next_state(self._state, event)
        self._state = after.state
        for action in after.actions:
            match action:
                case machine.EndStreams(superseded):
                    self.sessions.clear()
                    self.differing.clear()
                    self._began_ns = steady_ns()
                    if superseded:
                        self.events.emit(EventKind.RUN_SUPERSEDED, superseded, model=self.model.name)
                case machine.BeginCut(begun):
                    cut = Cut(begun.version, begun.step, begun.run, dict(self.model.tables.published))
                    self.open_cut = OpenCut(cut, begun.number, asyncio.get_running_loop().create_future())
                case machine.Seal() if self.open_cut:
                    # In a task of its own, which continues if a rank disconnects.
                    self._sealing = asyncio.create_task(self._seal(self.open_cut))
                case machine.Drop(dropped, error) if self.open_cut:
                    answer, self.open_cut = self.open_cut.sealed, None
                    answer.set_exception(error)
                    answer.exception()  # Mark it as retrieved, because perhaps no rank waits for it.
                    self.model.store.drop_cut(dropped.version)
                case machine.Answer() if self.open_cut:
                    answer, self.open_cut = self.open_cut.sealed, None
                    answer.set_result(self.model.sealed)  # No later cut can be sealed yet.
        if isinstance(event, machine.LogFull) and after.error:
            self.report_failed("a cut is too large for the log", after.error)
        if after.error:
            raise after.error
        return after.actions

    async def _seal(self, current: OpenCut) -> None:
        """Bring a complete cut from its last part to the replicas."""
        cut = current.cut
        error: Exception
        try:
            watch = StopWatch(cut.way_to_service(time.time_ns()))
            async with self._order:
                whole = await self._prepare(cut)
                seal = cut.seal(self.model.seals.newest, whole, time.time_ns())
                watch.lap("seal")
                tables, rows = list(cut.tables.values()), cut.rows_in_memory()
                complete = CompleteCut(seal, tables, rows, cut.unwritten, watch)
                durable = partial(self._note_durable, current, seal)
                await self.model.commit(complete, durable, self.report_failed, self._ending)
            if self.whenever_sealed:
                await self.whenever_sealed()
            self._do(machine.CutApplied(current.number))
            return
        except LogFull as full:
            error = full
            try:
                self.check_room(current, refused=True)
            except Contradiction as never:
                error = never
        except DeltasyncError as known:
            error = known
        except Exception as unforeseen:  # noqa: BLE001  # an error of one model must not affect others
            text = f"the cut of step {cut.step} could not be sealed; send it again"
            self.report_failed(text, unforeseen)
            error = ServiceUnavailable(text, detail=f": {error_text(unforeseen)}")
        except asyncio.CancelledError:
            text = f"the cut of step {cut.step} was interrupted; send it again"
            self._do(machine.SealFailed(current.number, ServiceUnavailable(text)))
            raise
        self._do(machine.SealFailed(current.number, error))

    async def _prepare(self, cut: Cut) -> tuple[str, ...]:
        """Create the tables of a complete cut; return the names of those that are complete in it."""
        if cut.unpublished:  # With many shards, this takes long.
            await asyncio.to_thread(cut.check_coverage)
        if self.model.position.number < (newest := self.model.seals.newest_version):
            # The service is shutting down, or the model will be reloaded.
            raise ServiceUnavailable(f"version {newest} is not applied yet; send step {cut.step} again")
        if self._made != (cut.tables, self.model.tables.changes):
            tables = list(cut.tables.values())
            self._bytes_to_be = self.model.tables.nbytes + self._added_bytes(tables)
            try:  # If it fails, nothing has changed.
                await self.model.tables.add(tables, later_run=self._is_later(cut.run))
            finally:
                self._bytes_to_be = 0
            self._made = cut.tables, self.model.tables.changes
        if cut.excess:  # Before any replica can get a row of it.
            self.events.emit(EventKind.CUT_QUARANTINED, cut.excess, model=self.model.name, version=cut.version)
            await self._consumers.hold_back(self.model.name, cut.version, cut.excess)
        return await asyncio.to_thread(cut.whole) if cut.full else ()

    def _note_durable(self, current: OpenCut, seal: Seal) -> None:
        self._do(machine.CutDurable(current.number))
        cut = current.cut
        try:  # Before it is applied: after a crash meanwhile, its deletes would be repeated.
            self.refusal = None
            self.rows += seal.rows
            self.bytes += seal.bytes
            self.deletes.finish(cut.deletes, seal.version)
            self.guard.note(cut.largest_norms, held_back=bool(cut.excess))
            self.events.emit(EventKind.CUT_SEALED, model=self.model.name, version=seal.version, rows=seal.rows)
        except Exception as error:  # noqa: BLE001  # the cut counts all the same
            text = f"version {seal.version} is sealed, but not all of its effects are noted"
            self.events.emit(EventKind.FAILED, text, error, model=self.model.name)

    def report_failed(self, what: str, error: Exception) -> None:
        """Report an error in the model's status and as an event."""
        self.model.failure = f"{what}: {error_text(error)}"
        self.events.emit(EventKind.FAILED, what, error, model=self.model.name)

    # Admission.

    def _check_not_retired(self) -> None:
        if self._retired:
            raise self._retired()

    def _check_goes_on(self, opening: Opening) -> None:
        self._check_not_retired()
        goes_on = may_go_on(
            opening.run,
            opening.claim,
            self.model.history,
            self.model.seals,
            start_over=opening.start_over,
        )
        if not goes_on.yes:
            raise goes_on.error(goes_on.reason)

    def _joined(self, opening: Opening, number: int, tables: Mapping[str, TableSpec]) -> machine.RankJoined:
        sessions, gone = self.sessions.values(), None
        if all(session.ended for session in sessions):
            gone = (steady_ns() - max([self._began_ns, *(session.since_ns for session in sessions)])) / 1e9
        return machine.RankJoined(opening.run, opening.rank, number, tables, time.time_ns(), gone)

    # Tables.

    def _checked_tables(self, run: Run, tables: Sequence[TableSpec]) -> Mapping[str, TableSpec]:
        """Check a rank's tables against those of the model and of the other ranks of its run. By name."""
        model, others = self.model, self._state.tables if run.id == self.run_id else {}
        again = [table for table in tables if table.name in others]
        first = {table.name: table for table in tables if table.name not in others}
        changed = [
            *changes(model.name, others, again, later_run=False),
            *changes(model.name, model.tables.published_specs, first.values(), later_run=self._is_later(run)),
        ]
        names = {each.spec.name for each in model.tables} | others.keys() | first.keys()
        self._limits.check("tables_per_model", len(names))
        return first | {table.name: table for table in changed}

    def _added_bytes(self, tables: Sequence[TableSpec]) -> int:
        """Check the limits; return the number of additional bytes."""
        if added := self.model.tables.added_bytes(tables):
            self._limits.check("bytes_per_model", self.model.tables.nbytes + added)
            self._limits.check_more("bytes_in_all", added)
        return added

    def _is_later(self, run: Run) -> bool:
        """Whether it is another run than the last that published, so that tables may have grown."""
        newest = self.model.seals.newest
        return newest is None or newest.run != run.id


def _state_of(model: Model) -> State:
    """The state of a model's ranks when the service starts: the last run may go on, earlier ones may not."""
    if (newest := model.seals.newest) is None:
        return State()
    runs = [run for run, _ in groupby(seal.run for seal in model.seals)]
    run = Run(newest.run, newest.run_started_unix_ns, newest.world_size, rollback_of=newest.rollback_of)
    sealed = machine.Sealed(newest.version, newest.run, newest.step)
    return State(run, earlier=tuple(runs[:-1])[-machine.EARLIER_RUNS :], newest=sealed)
