"""Taking cuts from the ranks of a run: who may publish, in which order, and when a cut is sealed."""

import asyncio
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from deltasync.core.backoff import backoff
from deltasync.core.delete_request import DeleteRequest
from deltasync.core.errors import Contradiction, DeltasyncError, ServiceUnavailable, Superseded
from deltasync.core.event_time import newest_event_time
from deltasync.core.events import EventKind, Events, described
from deltasync.core.position import Decision, Position
from deltasync.core.rows import RowBatch
from deltasync.core.seal import Seal
from deltasync.core.signals import first_of
from deltasync.core.tables import TableSpec
from deltasync.feeds.frozen_release import FrozenRelease
from deltasync.feeds.model import Model
from deltasync.publish.cut import Cut
from deltasync.publish.pending_deletes import PendingDeletes
from deltasync.publish.runs import Run, may_publish


class RankSession(Protocol):
    """The stream of a rank, as far as others look at it.

    Attributes:
        tables: what its run publishes.
        takes_deletes: whether it meets requests to delete rows.
        ended: the stream is over; a newer one has not begun.
    """

    tables: list[TableSpec]
    takes_deletes: bool
    ended: bool


@dataclass
class OpenCut:
    """The cut under way, and what its ranks wait for."""

    cut: Cut
    sealed: asyncio.Future[Position]


class CutCoordinator:
    """The ranks that publish one model."""

    def __init__(self, model: Model, deletes: PendingDeletes, tasks: asyncio.TaskGroup, events: Events) -> None:
        self.model = model
        self.deletes = deletes
        self.events = events
        self._tasks = tasks
        self._ending = asyncio.Event()
        self.run = _run_of(model.seals.newest)
        self.sessions: dict[int, RankSession] = {}  # By rank: only the newest session of a rank publishes.
        self.open_cut: OpenCut | None = None
        self.differing = set[str]()  # Names of tables of which the run's ranks have different rows.
        self.rows = self.bytes = 0  # Of the cuts sealed since the service started.
        self._applying: asyncio.Task[None] | None = None
        self._sealing: asyncio.Task[None] | None = None

    async def admit(self, run: Run, specs: list[TableSpec]) -> None:
        """Let a run in, which may take over from another, and have its tables.

        Raises:
            Contradiction: the run, its size or a table differs from what the service holds.
            StorageFailed: there is no room for a table.
        """
        self._check(run)
        await self.model.add_tables(specs, later_run=self.run is None or self.run.id != run.id)
        self._take_over(run)

    def cut_of(self, run: Run, step: int) -> OpenCut:
        """The cut after `step`; a cut of an earlier step that was never finished is abandoned.

        Raises:
            Contradiction: the cut under way is of a later step.
            Superseded: a cut is just being sealed.
        """
        current = self.open_cut
        if current and current.cut.complete:
            raise Superseded(f"part of step {step}, but step {current.cut.step} is just being sealed")
        if current and step == current.cut.step:
            return current
        if current and step < current.cut.step:
            raise Contradiction(f"part of step {step}, but the cut of step {current.cut.step} is under way")
        self.abandon(f"abandoned for the cut of step {step}")
        cut = Cut(self.model.seals.newest_version + 1, step, run, dict(self.model.published))
        self.open_cut = OpenCut(cut, asyncio.get_running_loop().create_future())
        return self.open_cut

    def abandon(self, reason: str) -> None:
        """Give up the cut under way, if any; nothing is lost, since no rank's cursor has moved."""
        if self.open_cut and not self.open_cut.cut.complete:
            _fail(self.open_cut, Superseded(f"cut of step {self.open_cut.cut.step}: {reason}"))
            self.open_cut = None

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

    async def idle(self) -> None:
        """Wait until no cut is under way."""
        while self.open_cut:
            await asyncio.wait([self.open_cut.sealed])

    async def drain(self) -> None:
        """Wait until what is being sealed and applied is done; what fails is not tried again."""
        self._ending.set()
        if self._sealing:
            await self._sealing  # Which begins to apply.
        if self._applying:
            await self._applying

    def _check(self, run: Run) -> Decision:
        decision = may_publish(run, self.run, time.time_ns())
        if not decision.yes:
            raise Contradiction(decision.reason)
        return decision

    def _take_over(self, run: Run) -> None:
        decision = self._check(run)
        if self.run is None or run.id != self.run.id:
            self.abandon(decision.reason)
            self.sessions.clear()
            self.differing.clear()
        self.run = run

    async def _seal(self, current: OpenCut) -> None:
        try:
            position = await self._sealed(current.cut)
        except DeltasyncError as error:
            _fail(current, error)
        except Exception as error:  # noqa: BLE001  # one model's trouble is its own
            step = current.cut.step
            self._report(f"the cut of step {step} could not be sealed, and is to be sent again", error)
            _fail(current, ServiceUnavailable(self.model.failure))
        else:
            self.model.failure = ""
            current.sealed.set_result(position)
        finally:
            self.open_cut = None

    async def _sealed(self, cut: Cut) -> Position:
        cut.check_coverage()
        if self._applying:
            await self._applying
        if self.model.position.number < (newest := self.model.seals.newest_version):
            # The service ends. A flush at the later version would cut the log of rows that are only there.
            raise ServiceUnavailable(f"version {newest} is not applied yet; send step {cut.step} again")
        seal = _seal_of(cut, self.model.seals.newest)
        sealed, rows = self.model.store.seal(seal, cut.unwritten), cut.rows_in_memory()
        durable = asyncio.wrap_future(sealed)
        begun = self.model.apply_after(sealed, seal, rows)  # After it: the seal is known here before its rows are.
        await durable
        self.model.seals.append(seal)
        # Before anything that could fail: from here on it is part of the history.
        self._applying = self._tasks.create_task(self._apply(seal, rows, begun))
        self.model.published |= {name: table.rows for name, table in cut.tables.items()}
        self.rows += seal.rows
        self.bytes += seal.bytes
        self.deletes.finish(cut.deletes, seal.version)
        self.events.emit(EventKind.CUT_SEALED, model=self.model.name, version=seal.version, rows=seal.rows)
        return Position(self.model.history, seal.version)

    async def _apply(
        self, seal: Seal, rows: list[RowBatch] | None, begun: "Future[FrozenRelease | None] | None"
    ) -> None:
        """Apply a sealed cut: again and again if need be, since all later ones build on it."""
        for pause in backoff():
            try:
                await self.model.apply_cut(seal, rows, begun)
            except Exception as error:  # noqa: BLE001  # one model's trouble is its own
                begun = None
                self._report(f"version {seal.version} could not be applied, which is tried again", error)
            else:
                self.model.failure = ""
                return
            await first_of(self._ending.wait(), seconds=pause)
            if self._ending.is_set():
                return

    def _report(self, what: str, error: Exception) -> None:
        """Have an unforeseen error known to whoever looks at the model."""
        self.model.failure = f"{what}: {described(error)}"
        self.events.emit(EventKind.FAILED, what, error, model=self.model.name)


def _fail(open_cut: OpenCut, error: Exception) -> None:
    if not open_cut.sealed.done():
        open_cut.sealed.set_exception(error)
        open_cut.sealed.exception()  # Marks it as seen: perhaps no rank is waiting any more.


def _seal_of(cut: Cut, before: Seal | None) -> Seal:
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
        whole=cut.whole,
        event_time_unix_ns=newest_event_time((cut.event_time_unix_ns, earlier)),
    )


def _run_of(seal: Seal | None) -> Run | None:
    return Run(seal.run, seal.run_started_unix_ns, seal.world_size) if seal else None
