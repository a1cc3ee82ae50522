"""Taking cuts from the ranks of a run: who may publish, in which order, and when a cut is complete."""

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
from deltasync.cuts.cut import Cut
from deltasync.cuts.runs import Run, may_join, may_publish
from deltasync.cuts.sealing import AnnouncedTables, CutSealer
from deltasync.log.log_store import LogFull

_MIB = 1 << 20
# A cut that a log refuses as full, though room was made for it so often, has none.
MOST_TRIES = 3
# A cut is given up once no rank of its run has been there for so long.
_FORSAKEN_SECONDS = 60.0
# So many runs are known to have been taken over.
_EARLIER_RUNS = 1_000


class CutCoordinator:
    """The ranks that publish one model.

    Attributes:
        streams: how many there are of ranks, let in or not, of a model of which nothing is published.
        whenever_sealed: awaited after each cut that is sealed, before its ranks are told; raises nothing. Adds a
            model whose first version this is; None if nothing waits for that.
    """

    def __init__(self, sealer: CutSealer, tasks: asyncio.TaskGroup, limits: Limits) -> None:
        self.sealer = sealer
        self.streams = 0
        self.whenever_sealed: Callable[[], Awaitable[None]] | None = None
        self.announced = AnnouncedTables(sealer.model, limits)
        self.model = sealer.model
        self.deletes = sealer.deletes
        self.events = sealer.events
        self._tasks = tasks
        self._refusal: Callable[[], DeltasyncError] | None = None
        newest = self.model.seals.newest
        self.run = Run(newest.run, newest.run_started_unix_ns, newest.world_size) if newest else None
        self._began_ns = steady_ns()
        # By id, and also those of before the service started: none of them may come back.
        before = [run for run, _ in groupby(seal.run for seal in self.model.seals)][:-1]
        self._earlier = deque(before, maxlen=_EARLIER_RUNS)
        self.sessions: dict[int, RankSession] = {}  # By rank: only the newest session of a rank publishes.
        self.open_cut: OpenCut | None = None
        self.differing = set[str]()  # Names of tables of which the run's ranks have different rows.
        self._tries = Tries()
        self._forsaken_at: float | None = None
        self._sealing: asyncio.Task[None] | None = None

    async def admit(self, run: Run, specs: list[TableSpec]) -> None:
        """Let a run in, which may take over from another. Its tables are made with its first cut.

        Raises:
            NotPermitted: the run is another identity's.
            Contradiction: the run, its size or a table differs from what the service holds, or from what others of
                its ranks announce; or the log has no room for all rows of a model of which nothing is published.
            LimitReached: the limits do not allow the tables.
            StorageFailed: there is no room for a table.
        """
        self._check(run)
        self._check_first_cut(specs)
        await self.sealer.guard.learn(self.model, specs)
        await self.announced.look_for_room(specs)
        tables = self.announced.check(run, specs)
        self._take_over(run)
        self.announced.add(run, tables)

    def cut_of(self, run: Run, step: int) -> "OpenCut":
        """The cut after `step`; a cut of an earlier step that was never finished is abandoned.

        Raises:
            Contradiction: the cut under way is of a later step.
            Superseded: a cut is just being sealed.
            ServiceUnavailable: the model was deleted, or is not here any more.
        """
        self._check_there()
        current = self.open_cut
        if current and current.cut.complete:
            raise Superseded(f"part of step {step}, but step {current.cut.step} is just being sealed")
        if current and step == current.cut.step:
            return current
        if current and step < current.cut.step:
            text = f"part of step {step}, but the cut of step {current.cut.step} is under way"
            raise Contradiction(f"{text}: publish what both have changed as the part of that one")
        self.abandon(f"abandoned for the cut of step {step}")
        cut = Cut(self.model.seals.newest_version + 1, step, run, dict(self.model.published))
        self.open_cut = OpenCut(cut, asyncio.get_running_loop().create_future())
        return self.open_cut

    def abandon(self, reason: str) -> None:
        """Give up the cut under way, if any; nothing is lost, since no rank's cursor has moved."""
        if self.open_cut and not self.open_cut.cut.complete:
            self._give_up(self.open_cut, Superseded(f"cut of step {self.open_cut.cut.step}: {reason}"))

    def note_left(self) -> None:
        """Note that a rank has left: what nobody publishes any more is not announced."""
        if self.open_cut is None and all(session.ended for session in self.sessions.values()):
            self.announced.forget()

    def abandon_forsaken(self, now: float) -> None:
        """Give up the cut under way where none of its run's ranks has been there for long.

        Args:
            now: seconds, by a clock that only goes on.
        """
        here = self.open_cut is None or any(not session.ended for session in self.sessions.values())
        self._forsaken_at = None if here else self._forsaken_at or now
        if self._forsaken_at and now - self._forsaken_at >= _FORSAKEN_SECONDS:
            self.abandon("all ranks of its run have gone")

    def check_room(self, current: "OpenCut", full: LogFull | None = None) -> None:
        """Check that the log can ever take what has arrived of a cut, which may be too `full` for it now.

        Raises:
            Contradiction: it cannot; the cut is given up, and nobody need try again.
        """
        cut, capacity = current.cut, self.model.store.capacity
        tries = self._tries.count(cut.step, cut.log_bytes, capacity) if full else 0
        decision = cut_fits(cut.step, cut.log_bytes, capacity, cut.tables.values(), tries)
        if not decision.yes:
            error = Contradiction(decision.reason)
            self.sealer.say_failed("a cut is too large for the log", error)
            self._give_up(current, error)
            raise error

    def note_room(self) -> None:
        """Note that the log has as much room as can be made."""
        self._tries.note_room()

    def seal_when_complete(self) -> None:
        """Begin to seal the cut under way once its last part is closed."""
        if self.open_cut and self.open_cut.cut.complete:
            # In a task of its own: a rank that disconnects now must not stop it half way.
            self._sealing = self._tasks.create_task(self._seal(self.open_cut))

    def waits_for(self, request: DeleteRequest) -> str:
        """What a request to delete rows waits for, in words."""
        here = [session for session in self.sessions.values() if not session.ended]
        if self.run is None or not here:
            return "no run is publishing: the next one is asked"
        if not all(session.takes_deletes for session in here):
            return f"the trainer of run {self.run.id} does not know of deletes: update it"
        if not any(table.name == request.table and table.kind.ranked for table in here[0].tables):
            return f"run {self.run.id} publishes no embedding table of that name: the next run that does is asked"
        return f"run {self.run.id} is asked, and deletes them with one of its next cuts"

    @property
    def connected(self) -> list[int]:
        """The ranks that are there."""
        return sorted(rank for rank, session in self.sessions.items() if not session.ended)

    def publishing(self, table: str) -> list[int]:
        """The ranks that are there and publish a table."""
        return [rank for rank in self.connected if any(each.name == table for each in self.sessions[rank].tables)]

    @property
    def run_id(self) -> str:
        """The id of the run that publishes; empty before the first one."""
        return self.run.id if self.run else ""

    def forget_table(self, table: str) -> None:
        """Forget what is asked of a table, and a cut under way of ranks that have gone and published it."""
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
        """Wait until what is being sealed is, and what was sealed is applied. Of another run's cut that nobody
        completes any more nothing is waited for.
        """
        if self._sealing:
            await asyncio.wait([self._sealing])
        await self.sealer.applied()

    async def retire(self, refusal: Callable[[], DeltasyncError] | None = None) -> None:
        """Let nobody in any more: the model is deleted; or gone, and this is what ranks are told."""
        text = f"model {self.model.name!r} has just been deleted; reconnect"
        self._refusal = refusal or partial(ServiceUnavailable, text)
        self.abandon("its model is not here any more")
        await self.drain()

    async def drain(self) -> None:
        """Wait until what is being sealed and applied is done; what fails is not tried again."""
        self.sealer.end()
        if self._sealing:
            await self._sealing  # Which begins to apply.
        await self.sealer.applied()

    def _check_first_cut(self, specs: list[TableSpec]) -> None:
        if self.model.seals.newest is None:
            decision = first_cut_fits(specs, self.model.store.capacity)
            if not decision.yes:
                self.model.failure = decision.reason
                raise Contradiction(f"model {self.model.name!r}: {decision.reason}")

    def _give_up(self, current: "OpenCut", error: Exception) -> None:
        """Have a cut fail, of which the log is to have nothing any more."""
        _fail(current, error)
        if current.cut.version > self.model.seals.newest_version:
            self.model.store.drop_cut(current.cut.version)
        if self.open_cut is current:
            self.open_cut = None
        self.note_left()

    def _check_there(self) -> None:
        if self._refusal:
            raise self._refusal()

    def _check(self, run: Run) -> Decision:
        self._check_there()
        joins = may_join(run, self.run)
        if not joins.yes:
            raise NotPermitted(joins.reason)
        gone, earlier = self._gone_seconds, self._earlier
        decision = may_publish(run, self.run, time.time_ns(), gone_seconds=gone, earlier=earlier)
        if decision.yes:
            return decision
        error = ServiceUnavailable if decision.later else Contradiction
        if self.run is None or run.id == self.run.id:
            raise error(decision.reason)
        raise error("another run publishes this model", detail=f": {decision.reason}")

    @property
    def _gone_seconds(self) -> float | None:
        """For how long no rank of the run has been there, as far as that is known; None while one is."""
        sessions = self.sessions.values()
        if any(not session.ended for session in sessions):
            return None
        return (steady_ns() - max([self._began_ns, *(session.since_ns for session in sessions)])) / 1e9

    def _take_over(self, run: Run) -> None:
        decision = self._check(run)
        if self.run is None or run.id != self.run.id:
            if self.run:
                self._earlier.append(self.run.id)
                self.events.emit(EventKind.RUN_SUPERSEDED, decision.reason, model=self.model.name)
            self.abandon(decision.reason)
            self.sessions.clear()
            self.differing.clear()
            self._began_ns = steady_ns()
        self.run = run

    async def _seal(self, current: "OpenCut") -> None:
        try:
            position = await self.sealer.seal(current.cut, self.announced)
        except LogFull as error:
            with contextlib.suppress(Contradiction):  # Which is told to those that wait, instead.
                self.check_room(current, error)
            self._give_up(current, error)
        except DeltasyncError as error:
            self._give_up(current, error)
        except Exception as error:  # noqa: BLE001  # one model's trouble is its own
            step = current.cut.step
            self.sealer.say_failed(f"the cut of step {step} could not be sealed, and is to be sent again", error)
            text = f"the cut of step {step} could not be sealed, and is to be sent again"
            _fail(current, ServiceUnavailable(text, detail=f": {error_text(error)}"))
        else:
            self.model.failure = ""
            if self.whenever_sealed:
                await self.whenever_sealed()
            current.sealed.set_result(position)
        finally:
            self.open_cut = None
            self.note_left()


class Tries:
    """How often the full log has refused one cut, though room was made for it each time."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._tries = 0
        self._room = False

    def note_room(self) -> None:
        """Note that the log has as much room as can be made."""
        self._room = True

    def count(self, step: int, log_bytes: int, capacity: int) -> int:
        """Count one of the cut of a step, of which so many bytes have arrived: how many there were of it.

        A small one is refused for what others have in the log, and will find room.
        """
        large = log_bytes > capacity // 4
        self._tries = self._tries + 1 if self._room and step == self._step and large else 0
        self._step, self._room = step, False
        return self._tries


def whole_bytes(tables: Iterable[TableSpec]) -> int:
    """What all rows of some tables take in the log, bytes: ids, values and digests."""
    return sum(table.rows * (table.row_bytes + DIGEST_TYPE.itemsize) for table in tables)


def first_cut_fits(tables: Iterable[TableSpec], capacity: int) -> Decision:
    """Whether the first cut of a model, which has every row of its tables, fits a log.

    Args:
        tables: of the model.
        capacity: bytes of rows that the log takes.
    """
    needed = whole_bytes(tables)
    if needed <= capacity:
        return Decision(True, f"every row takes {needed} bytes of a log that has room for {capacity}")
    return Decision(False, f"every row of its tables takes {needed} bytes in the log, {_room(capacity, needed)}")


def cut_fits(step: int, log_bytes: int, capacity: int, tables: Iterable[TableSpec], tries: int = 0) -> Decision:
    """Whether a cut that is arriving fits a log.

    Args:
        step: of the cut.
        log_bytes: what has arrived of it takes in the log, or more with what the log adds.
        capacity: bytes of rows that the log takes.
        tables: of its run, of which it may have every row.
        tries: how often the log was too full for it since room was made for all that can be.
    """
    if log_bytes <= capacity and tries < MOST_TRIES:
        return Decision(True, f"{log_bytes} bytes of a log that has room for {capacity}")
    said = f"what has arrived of the cut of step {step} takes {log_bytes} bytes in the log"
    return Decision(False, f"{said}, {_room(capacity, max(log_bytes, whole_bytes(tables)))}")


def enough(needed: int) -> int:
    """A value of `--log-max-bytes` with which a cut of so many bytes, in chunks that are not small, has room."""
    return -(-(needed * 6 // 5 + _MIB) // _MIB) * _MIB


def _room(capacity: int, needed: int) -> str:
    return (
        f"which has room for {capacity}: restart the service with --log-max-bytes {enough(needed)} or more, if "
        "its volume has room for that beside the tables"
    )


class RankSession(Protocol):
    """The stream of a rank, as far as others look at it.

    Attributes:
        tables: what its run publishes.
        process: which process it is, as it says itself.
        takes_deletes: whether it meets requests to delete rows.
        ended: the stream is over; a newer one has not begun.
        finished: the rank has said that it publishes nothing more.
        since_ns: when it began, or ended if it has, by `steady_ns`.
        left: why it has ended; empty if it has not.
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
    """The cut under way, and what its ranks wait for."""

    cut: Cut
    sealed: asyncio.Future[Position]


def _fail(open_cut: OpenCut, error: Exception) -> None:
    if not open_cut.sealed.done():
        open_cut.sealed.set_exception(error)
        open_cut.sealed.exception()  # Marks it as seen: perhaps no rank is waiting any more.
