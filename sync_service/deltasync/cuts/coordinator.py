"""Receives cuts from the ranks of a run: decides which run publishes and when a cut is complete."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Protocol

from deltasync.access.limits import Limits
from deltasync.base.clock import steady_ns
from deltasync.base.decision import Decision
from deltasync.base.errors import Contradiction, DeltasyncError, NotPermitted, ServiceUnavailable, Superseded
from deltasync.base.events import EventKind, error_text
from deltasync.core.position import Position
from deltasync.core.rows import DeleteRequest
from deltasync.core.tables import DIGEST_TYPE, TableSpec
from deltasync.cuts.admission import Run, may_go_on, may_join, may_publish
from deltasync.cuts.announced_tables import AnnouncedTables
from deltasync.cuts.cut import Cut
from deltasync.cuts.sealing import CutSealer
from deltasync.log.log_store import LogFull

_MIB = 1 << 20
# A cut does not fit if the full log refuses it this number of times, each time after checkpoints freed space.
MOST_TRIES = 3
# A cut is abandoned after all ranks of its run have been away for this long.
_FORSAKEN_SECONDS = 60.0
# Number of earlier runs to remember.
_EARLIER_RUNS = 1_000


class CutCoordinator:
    """The ranks that publish one model.

    Attributes:
        streams: number of streams of ranks, admitted or not, while the model has no published version.
        whenever_sealed: awaited after each sealed cut, before the ranks get their answer; must not raise. It adds
            a model after its first version; None if there is nothing to do.
        rolling_back: locked while the model is rolled back. Until that ends, the trainer may try again.
    """

    def __init__(self, sealer: CutSealer, limits: Limits) -> None:
        self.sealer = sealer
        self.streams = 0
        self.whenever_sealed: Callable[[], Awaitable[None]] | None = None
        self.rolling_back = asyncio.Lock()
        self.announced = AnnouncedTables(sealer.model, limits)
        self.model = sealer.model
        self.deletes = sealer.deletes
        self.events = sealer.events
        self._refusal: Callable[[], DeltasyncError] | None = None
        newest = self.model.seals.newest
        self.run = Run(newest.run, newest.run_started_unix_ns, newest.world_size) if newest else None
        self._began_ns = steady_ns()
        # Ids of earlier runs, including those before the service started. None of them may return.
        before = [run for run, _ in groupby(seal.run for seal in self.model.seals)][:-1]
        self._earlier = deque(before, maxlen=_EARLIER_RUNS)
        self.sessions: dict[int, RankSession] = {}  # By rank: only the newest session of a rank publishes.
        self.open_cut: OpenCut | None = None
        self.differing = set[str]()  # Names of tables whose rows differ between the run's ranks.
        self._tries = Tries()
        self._forsaken_at: float | None = None
        self._sealing: asyncio.Task[None] | None = None

    async def admit(self, run: Run, specs: list[TableSpec], claim: Position, *, start_over: bool = False) -> None:
        """Admit a run, which may take over from another. Its tables are created with its first cut.

        Args:
            run: the run.
            specs: its tables.
            claim: the position whose rows it has.
            start_over: see `may_go_on`.

        Raises:
            NotPermitted: the run belongs to another identity.
            RunRefused: the run is over, goes on from a version that was rolled back, or has another size or other
                tables than the service or its other ranks.
            Contradiction: the clocks contradict the order of the runs, or the log has no room for all rows of a
                new model.
            LimitReached: the limits do not allow the tables.
            StorageFailed: there is no room for a table.
        """
        self._check(run, claim, start_over)
        self._check_first_cut(specs)
        await self.sealer.guard.learn(self.model, specs)
        await self.announced.look_for_room(specs)
        tables = self.announced.check(run, specs)
        self._take_over(run, self._check(run, claim, start_over))  # Again: a rollback may have ended meanwhile.
        self.announced.add(run, tables)

    def cut_of(self, run: Run, step: int) -> "OpenCut":
        """Get or begin the cut after `step`; abandon an unfinished cut of an earlier step.

        Raises:
            Contradiction: the cut under way is of a later step.
            Superseded: a cut is being sealed.
            ServiceUnavailable: the model was deleted, or has left this process.
        """
        self._check_there()
        current = self.open_cut
        if current and current.cut.complete:
            raise Superseded(f"part of step {step} while the cut of step {current.cut.step} is being sealed")
        if current and step == current.cut.step:
            return current
        if current and step < current.cut.step:
            text = f"part of step {step} while the cut of step {current.cut.step} is under way"
            raise Contradiction(f"{text}: publish the changes of both steps in the later one")
        self.abandon(f"abandoned for the cut of step {step}")
        cut = Cut(self.model.seals.newest_version + 1, step, run, dict(self.model.tables.published))
        self.open_cut = OpenCut(cut, asyncio.get_running_loop().create_future())
        return self.open_cut

    def abandon(self, reason: str) -> None:
        """Abandon the cut under way, if any. Nothing is lost, because no rank's cursor has moved."""
        if self.open_cut and not self.open_cut.cut.complete:
            self._give_up(self.open_cut, Superseded(f"cut of step {self.open_cut.cut.step}: {reason}"))

    def note_left(self) -> None:
        """Record that a rank has left; after the last one, drop the tables of their run."""
        if self.open_cut is None and all(session.ended for session in self.sessions.values()):
            self.announced.forget()

    def abandon_forsaken(self, now: float) -> None:
        """Abandon the cut under way after all ranks of its run were away for a while.

        Args:
            now: seconds by a monotonic clock.
        """
        here = self.open_cut is None or any(not session.ended for session in self.sessions.values())
        self._forsaken_at = None if here else self._forsaken_at or now
        if self._forsaken_at and now - self._forsaken_at >= _FORSAKEN_SECONDS:
            self.abandon("all ranks of its run have left")

    def check_room(self, current: "OpenCut", full: LogFull | None = None) -> None:
        """Check that the log can store the rows of a cut that have arrived, now or once checkpoints free space.

        `full` is the error if it cannot now.

        Raises:
            Contradiction: it never can. The cut is abandoned, and a retry is useless.
        """
        cut, capacity = current.cut, self.model.store.capacity
        tries = self._tries.count(cut.step, cut.log_bytes, capacity) if full else 0
        decision = cut_fits(cut.step, cut.log_bytes, capacity, cut.tables.values(), tries)
        if not decision.yes:
            error = Contradiction(decision.reason)
            self.sealer.report_failed("a cut is too large for the log", error)
            self._give_up(current, error)
            raise error

    def note_room(self) -> None:
        """Record that checkpoints have freed as much of the log as possible."""
        self._tries.note_room()

    def seal_when_complete(self) -> None:
        """Begin to seal the cut under way once its last part is closed."""
        if self.open_cut and self.open_cut.cut.complete:
            # In a separate task, which continues if a rank disconnects.
            self._sealing = asyncio.create_task(self._seal(self.open_cut))

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

    @property
    def connected(self) -> list[int]:
        """The connected ranks."""
        return sorted(rank for rank, session in self.sessions.items() if not session.ended)

    def publishing(self, table: str) -> list[int]:
        """The connected ranks that publish a table."""
        return [rank for rank in self.connected if any(each.name == table for each in self.sessions[rank].tables)]

    @property
    def run_id(self) -> str:
        """The id of the run that publishes; empty before the first one."""
        return self.run.id if self.run else ""

    def forget_table(self, table: str) -> None:
        """Forget the requests for a table, and abandon the cut under way if it contains the table."""
        if self.open_cut and table in self.open_cut.cut.tables:
            self.abandon(f"table {table!r} was deleted")
        self.differing.discard(table)
        self.sealer.guard.forget(table)
        self.deletes.forget(table)

    async def idle(self) -> None:
        """Wait until no cut is under way."""
        while self.open_cut:
            await asyncio.wait([self.open_cut.sealed])

    async def settled(self) -> None:
        """Wait until the cut that is being sealed is applied. Does not wait for parts that have not arrived."""
        if self._sealing:
            await asyncio.wait([self._sealing])
        await self.sealer.applied()

    async def retire(self, refusal: Callable[[], DeltasyncError] | None = None) -> None:
        """Admit no more ranks: they get the error `refusal`, by default that the model was deleted."""
        text = f"model {self.model.name!r} has just been deleted; reconnect"
        self._refusal = refusal or partial(ServiceUnavailable, text)
        self.abandon("its model has left this process")
        await self.drain()

    async def drain(self) -> None:
        """Wait until the cut that is being sealed is applied; do not retry failures."""
        self.sealer.end()
        if self._sealing:
            await self._sealing  # It also begins to apply the cut.
        await self.sealer.applied()

    def _check_first_cut(self, specs: list[TableSpec]) -> None:
        if self.model.seals.newest is None:
            decision = first_cut_fits(specs, self.model.store.capacity)
            if not decision.yes:
                self.model.failure = decision.reason
                raise Contradiction(f"model {self.model.name!r}: {decision.reason}")

    def _give_up(self, current: "OpenCut", error: Exception) -> None:
        """Fail a cut, and remove it from the log, unless it is sealed or a later cut has its version by now."""
        if self.open_cut is current and current.cut.version <= self.model.seals.newest_version:
            return  # Its ranks are about to be told that it is sealed.
        _fail(current, error)
        if self.open_cut is current:
            self.model.store.drop_cut(current.cut.version)
            self.open_cut = None
        self.note_left()

    def _check_there(self) -> None:
        if self._refusal:
            raise self._refusal()

    def _check(self, run: Run, claim: Position, start_over: bool) -> Decision:
        self._check_there()
        goes_on = may_go_on(run, claim, self.model.history, self.model.seals, start_over=start_over)
        if not goes_on.yes:
            raise goes_on.error(goes_on.reason)
        joins = may_join(run, self.run)
        if not joins.yes:
            raise NotPermitted(joins.reason)
        gone, earlier = self._gone_seconds, self._earlier
        rolling_back = self.rolling_back.locked()
        decision = may_publish(
            run, self.run, time.time_ns(), gone_seconds=gone, earlier=earlier, rolling_back=rolling_back
        )
        if decision.yes:
            return decision
        if self.run is None or run.id == self.run.id:
            raise decision.error(decision.reason)
        raise decision.error("another run publishes this model", detail=f": {decision.reason}")

    @property
    def _gone_seconds(self) -> float | None:
        """Seconds since the last rank of the run left, or since the start; None while one is connected."""
        sessions = self.sessions.values()
        if any(not session.ended for session in sessions):
            return None
        return (steady_ns() - max([self._began_ns, *(session.since_ns for session in sessions)])) / 1e9

    def _take_over(self, run: Run, decision: Decision) -> None:
        if self.run is None or run.id != self.run.id:
            if self.run:
                self._earlier.append(self.run.id)
                self.events.emit(EventKind.RUN_SUPERSEDED, decision.reason, model=self.model.name)
            self.abandon(decision.reason)
            self.sessions.clear()
            self.differing.clear()
            self._began_ns = steady_ns()
        self.run = run

    def give_back(self, run: Run, before: Run | None) -> None:
        """Let the run before this one publish again, after this one has failed without a sealed cut."""
        newest, current = self.model.seals.newest, self.open_cut
        sealing = current is not None and current.cut.complete
        if self.run == run and not sealing and (newest is None or newest.run != run.id):
            self.abandon(f"run {run.id} has failed")
            self.run = before
            self.sessions.clear()
            if before and before.id in self._earlier:
                self._earlier.remove(before.id)

    async def _seal(self, current: "OpenCut") -> None:
        try:
            position = await self.sealer.seal(current.cut, self.announced)
        except LogFull as error:
            with contextlib.suppress(Contradiction):  # Its waiters get that error instead.
                self.check_room(current, error)
            self._give_up(current, error)
        except DeltasyncError as error:
            self._give_up(current, error)
        except Exception as error:  # noqa: BLE001  # an error of one model must not affect others
            step = current.cut.step
            text = f"the cut of step {step} could not be sealed; send it again"
            self.sealer.report_failed(text, error)
            _fail(current, ServiceUnavailable(text, detail=f": {error_text(error)}"))
        else:
            self.model.failure = ""
            if self.whenever_sealed:
                await self.whenever_sealed()
            await self.sealer.applied()  # Clients that learn of the version may ask for it at once.
            current.sealed.set_result(position)
        finally:
            self.open_cut = None
            self.note_left()


class Tries:
    """Counts the refusals of a cut by a full log, each after checkpoints freed space."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._tries = 0
        self._room = False

    def note_room(self) -> None:
        """Record that checkpoints have freed as much of the log as possible."""
        self._room = True

    def count(self, step: int, log_bytes: int, capacity: int) -> int:
        """Count an attempt to store the cut of a step with `log_bytes` so far; return the number of attempts.

        A small cut does not count: other data filled the log, and the cut will fit later.
        """
        large = log_bytes > capacity // 4
        self._tries = self._tries + 1 if self._room and step == self._step and large else 0
        self._step, self._room = step, False
        return self._tries


def whole_bytes(tables: Iterable[TableSpec]) -> int:
    """Bytes in the log of all rows of some tables: ids, values and digests."""
    return sum(table.rows * (table.row_bytes + DIGEST_TYPE.itemsize) for table in tables)


def first_cut_fits(tables: Iterable[TableSpec], capacity: int) -> Decision:
    """Whether the first cut of a model, with every row of its tables, fits into a log.

    Args:
        tables: the tables of the model.
        capacity: bytes of rows that fit into the log.
    """
    needed = whole_bytes(tables)
    if needed <= capacity:
        return Decision(True, f"all rows need {needed} bytes of a log that has room for {capacity}")
    return Decision(False, f"all rows of its tables need {needed} bytes in the log, {_room(capacity, needed)}")


def cut_fits(step: int, log_bytes: int, capacity: int, tables: Iterable[TableSpec], tries: int = 0) -> Decision:
    """Whether a cut that is arriving fits into a log.

    Args:
        step: step of the cut.
        log_bytes: bytes in the log of the rows that arrived, with the log's overhead.
        capacity: bytes of rows that fit into the log.
        tables: tables of its run; the cut may contain every row of them.
        tries: number of times that the log was full although checkpoints had freed space.
    """
    if log_bytes <= capacity and tries < MOST_TRIES:
        return Decision(True, f"{log_bytes} bytes of a log that has room for {capacity}")
    text = f"the cut of step {step} already needs {log_bytes} bytes in the log"
    return Decision(False, f"{text}, {_room(capacity, max(log_bytes, whole_bytes(tables)))}")


def enough(needed: int) -> int:
    """A value of `--log-max-bytes` with room for a cut of `needed` bytes in chunks of normal size."""
    return -(-(needed * 6 // 5 + _MIB) // _MIB) * _MIB


def _room(capacity: int, needed: int) -> str:
    return (
        f"which has room for {capacity}: restart the service with --log-max-bytes {enough(needed)} or more, and "
        "check that its volume has room for that and the tables"
    )


class RankSession(Protocol):
    """The stream of a rank.

    Attributes:
        tables: the tables of its run.
        process: the name of its process.
        takes_deletes: whether it deletes rows on request.
        ended: whether the stream is over.
        finished: whether the rank said goodbye.
        since_ns: when it began or, if it is over, ended, by `steady_ns`.
        left: why it ended; empty while it is open.
    """

    tables: list[TableSpec]
    process: str
    takes_deletes: bool
    ended: bool
    finished: bool
    since_ns: int
    left: str


@dataclass
class OpenCut:
    """The cut under way, and the position that its ranks wait for."""

    cut: Cut
    sealed: asyncio.Future[Position]


def _fail(open_cut: OpenCut, error: Exception) -> None:
    if not open_cut.sealed.done():
        open_cut.sealed.set_exception(error)
        open_cut.sealed.exception()  # Mark it as retrieved, because perhaps no rank waits for it.
