"""Publishing what training changes in a model.

`DeltaSync` belongs to the thread that trains: it marks, decides with the other ranks whether to cut, and gathers
the rows of a cut there. On a GPU that is launched and not waited for: another thread hands the rows to the
publisher once they are in host memory. The publisher sends them from threads of its own, which the training thread
never waits for in `step`. When a cut is sealed, the next `step` takes note.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deltasync.base.arguments import check_type
from deltasync.base.errors import DeltasyncError, NotFound, ResyncRequired, ServiceUnavailable
from deltasync.base.words import are
from deltasync.client import Connection, Position
from deltasync.client.connection import Home
from deltasync.core.rows import DeleteRequest, Ids
from deltasync.core.seal import check_event_time, newest_event_time
from deltasync.trainer.distributed.agreement import Agreement, Consensus
from deltasync.trainer.distributed.ranks import all_ranks, this_rank
from deltasync.trainer.distributed.start import begun_together
from deltasync.trainer.pending_cut import CutUnderWay, PendingCut
from deltasync.trainer.run import TrainingRun
from deltasync.trainer.sync_metrics import Trouble, metrics_of
from deltasync.trainer.sync_options import OnRefusal, SyncOptions, SyncStats
from deltasync.trainer.sync_state import FORMAT, PublishedVersions, SyncState, check_states
from deltasync.trainer.tracking.module_tensors import buffer_digests, unranked_embeddings
from deltasync.trainer.tracking.modules import wrongly_divided
from deltasync.trainer.tracking.options import TrackerOptions, TrackingMode
from deltasync.trainer.tracking.shards import check_deletable, check_ids
from deltasync.trainer.tracking.tracked_model import published_tables
from deltasync.trainer.tracking.tracker import Tracker

logger = logging.getLogger(__name__)


class BufferDifferences:
    """Compares them with the 1st, 2nd, 4th, 8th cut and so on: at first, all are alike.

    Attributes:
        names: the FQNs of those that were found to differ.
    """

    def __init__(self, model: nn.Module, agreement: Agreement, fqns_to_skip: Collection[str]) -> None:
        self.names = set[str]()
        self._model, self._agreement, self._fqns_to_skip = model, agreement, fqns_to_skip
        self._cuts = 0

    def note_cut(self) -> None:
        """Compare them, if it is time to. The log names each once. A collective: all ranks call it."""
        self._cuts += 1
        if self._agreement.world_size == 1 or self._cuts.bit_count() != 1:
            return
        found = self._agreement.differing(buffer_digests(self._model, self._fqns_to_skip))
        new = [name for name in found if name not in self.names]
        self.names.update(new)
        if new and self._agreement.rank == 0:
            logger.warning("buffers differ between ranks; those of rank 0 are published: %s", ", ".join(new))


# An answer takes as long at most, of a service that both ranks reach.
_PATIENCE_SECONDS = 60.0


class Standstill:
    """Whether this rank knows how its cut has ended, and another one has long not. In the thread that trains.

    The service answers a part of a sealed cut again, but not if it has lost that cut meanwhile: it waits for the
    parts of the ranks that have their answer.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since: float | None = None

    @property
    def long(self) -> bool:
        """Whether it has gone on for so long that ranks had better begin anew."""
        return self._since is not None and self._now() - self._since >= _PATIENCE_SECONDS

    def note(self, *, waits: bool) -> None:
        """Note whether this rank has no part under way, and waits for another one."""
        if not waits:
            self._since = None
        elif self._since is None:
            self._since = self._now()


class RowRequests:
    """Which of the requests that the service hands to this rank are met.

    Attributes:
        met: numbers of those that are, of those that it was last handed; the service forgets them with a cut.
    """

    def __init__(self) -> None:
        self.met: set[int] = set()

    def newest(self, handed: Sequence[DeleteRequest]) -> int:
        """The largest number of those that are not met; 0 if all are."""
        self.met &= {request.number for request in handed}
        return max((request.number for request in handed if request.number not in self.met), default=0)

    def meet(self, handed: Sequence[DeleteRequest], upto: int) -> list[DeleteRequest]:
        """Those up to a number that are not met, which are from here on."""
        due = [request for request in handed if request.number <= upto and request.number not in self.met]
        self.met |= {request.number for request in due}
        return due


def mark_held(tracker: Tracker, rows: Mapping[str, Ids]) -> dict[str, Ids]:
    """Have rows published again that this rank holds now, which may have been resharded; by table, these."""
    tracked = {table.name for table in tracker.tables} if rows else set()
    held = {table: ids for table, ids in rows.items() if table in tracked}
    for table, ids in held.items():
        tracker.mark_held(table, torch.from_numpy(ids))
    return held


__all__ = ["DeltaSync", "OnRefusal", "SyncOptions", "SyncStats"]


_CONSUMER = "publisher"
_PEER_POLL_SECONDS = 0.05


class DeltaSync:
    """Keeps a sync service up to date with a model that is being trained. Every rank makes one.

        with DeltaSync(model, SyncOptions(service="localhost:50051", model="clicks")) as sync:
            for ...:
                pipeline.progress(batches)
                sync.step()

    Attributes:
        tracker: knows which rows changed.
        stats: what was published.
    """

    def __init__(self, model: nn.Module, options: SyncOptions) -> None:
        check_type("DeltaSync(model, options)", "model", model, nn.Module)
        check_type("DeltaSync(model, options)", "options", options, SyncOptions)
        self._home = Home(f"DeltaSync of model {options.model!r}")
        with begun_together("DeltaSync", options.of_all_ranks):
            self._tables = published_tables(model, dense=options.dense, fqns_to_skip=options.fqns_to_skip)
        # Copies that all ranks have are published by the first.
        first = this_rank() == 0
        self.tracker = Tracker(
            model,
            TrackerOptions(
                consumers=[_CONSUMER],
                mode=TrackingMode.EMBEDDING_LAST,
                auto_compact=True,
                fqns_to_skip=options.fqns_to_skip,
                dense=options.dense and first,
                id_maps=True,
                replicas=first,
                verify=options.verify,
            ),
            all_ranks(),
        )
        self._agreement = Agreement("DeltaSync", "step")
        self.stats = SyncStats()
        self._options = options
        self._model = model
        self._failure: DeltasyncError | None = None
        self._trouble = Trouble()
        self._differences = BufferDifferences(model, self._agreement, options.fqns_to_skip)
        unranked = unranked_embeddings(model, dense=options.dense, fqns_to_skip=options.fqns_to_skip)
        for sentence in (*wrongly_divided(model), *unranked) if first else ():
            logger.warning("%s", sentence)
        self._run = TrainingRun(options.service, options.model, self._tables, self.tracker, self._agreement)
        self._under_way = CutUnderWay()
        self._versions = PublishedVersions()
        self._requests = RowRequests()
        self._resync = True
        self._refused: ResyncRequired | None = None
        self._standstill = Standstill()
        self._cut_step = self._published_changes = -1
        self._looked = False  # For changes after the last step, in this `flush`.
        self._event_time: int | None = None

    @property
    def connection(self) -> Connection | None:
        """This rank's connection to the service: since when, or why there is none. None before the first cut, and
        between tries where publishing is refused: `trouble` says why.
        """
        return self._run.publisher.connection if self._run.publisher else None

    @property
    def trouble(self) -> str:
        """Why what has changed is not published, as of the last try; empty where nothing has failed."""
        publisher = self._run.publisher
        if self._trouble.reason or not (publisher and self._under_way.pending):
            return self._trouble.reason
        return "" if publisher.connection.connected else publisher.connection.last_error

    def metrics(self) -> dict[str, float]:
        """How publishing goes on this rank, as numbers to log, by name. Takes next to no time."""
        return metrics_of(self.stats, self._trouble, self._run, self.tracker)

    def step(self, event_time_unix_ns: int | None = None) -> None:
        """Note that an optimizer step is complete; publish every `publish_every` of them.

        Args:
            event_time_unix_ns: the time of the newest event that this rank has trained on in it, nanoseconds since
                1970; None where that is not known. A cut carries the newest there was up to its step, on any rank.

        Raises:
            InvalidInput: the event time is no whole number from 1 on.
            DeltasyncError: publishing was refused, or is impossible, on this rank or another, and the options have
                it raised; otherwise it is `trouble`, and tried again at a later step. Or another rank has closed
                its DeltaSync.
            ServiceUnavailable: this process was forked since.
        """
        self._home.check()
        started = time.perf_counter()
        check_event_time(event_time_unix_ns)
        self._event_time = newest_event_time((self._event_time, event_time_unix_ns))
        self.tracker.step()
        self._agreement.note(self.tracker.steps)
        self._note_arrival()
        if self.tracker.steps % self._options.publish_every == 0:
            before = self._under_way.pending
            self._cut(time.time_ns())
            self.stats.absorbed += self._under_way.pending is before
        if self.tracker.on_gpu and (self.tracker.steps + 1) % self._options.publish_every == 0:
            self.tracker.count_ahead(_CONSUMER)
        self.stats.step_seconds += time.perf_counter() - started

    def flush(self, timeout_seconds: float | None = None) -> Position:
        """Publish everything that changed, after the last `step` too, and wait until it is sealed. Called by all
        ranks together, between backwards.

        Args:
            timeout_seconds: how long to wait for the service at most; None = for ever.

        Returns:
            The position that holds the model as it is now.

        Raises:
            DeltasyncError: publishing was refused, or is impossible, or the service did not seal the cut in time,
                on this rank or another. Nothing is lost: the next cut has it.
            ServiceUnavailable: this process was forked since.
        """
        self._home.check()
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._looked = False
        while not self._cut(time.time_ns(), self._wait(deadline), flush=True):
            pass
        return self._run.position

    def mark_all(self) -> None:
        """Note that rows were changed from outside, say by a load: the next cut publishes all of them."""
        self.tracker.mark_all()

    def delete(self, table: str, ids: torch.Tensor) -> None:
        """Delete rows here (`Tracker.delete`), and with the next cut everywhere. Between steps.

        All ranks call it with the same ids after the same step; each takes the rows that it holds. Where a table
        is sharded by rows alone, it is enough that those ranks call it that hold some of them.

        Args:
            table: its FQN.
            ids: global row ids, [n] of any integer type.

        Raises:
            NotFound: the model has no such table.
            InvalidInput: an id is none of the table's, or it is none of embeddings.
        """
        spec = next((spec for spec in self._tables if spec.name == table), None)
        if spec is None:
            raise NotFound(f"no table {table!r}; there are: {', '.join(each.name for each in self._tables)}")
        check_deletable(spec)
        check_ids(spec, ids)
        if self.tracker.holds(table):
            self.tracker.delete(table, ids)

    def close(self, timeout_seconds: float | None = None) -> Position:
        """Flush, tell the service that this rank has finished, and close the connection. Do nothing where it is
        closed, or this process was forked since.

        Raises:
            DeltasyncError: as `flush`; the connection is closed then, too.
        """
        try:
            done = self._agreement.closed or self._home.left
            position = self._run.position if done else self.flush(timeout_seconds)
            self._run.finish()
            return position
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the connection at once: cuts that are not sealed may be lost, and the service reports this rank as
        lost. Nothing is published after it. In a process that was forked since, do nothing.
        """
        if self._home.left:
            return
        self._under_way.close()
        self._run.disconnect()
        self._agreement.close()

    def __enter__(self) -> "DeltaSync":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        # After an error the ranks may no longer be in step, and a flush could wait for ever.
        self.abort() if error or self._home.left else self.close()

    def state_dict(self) -> dict[str, Any]:
        """What this rank adds to a checkpoint, so that a run from there need not publish every row anew."""
        return {
            "format": FORMAT,
            "rank": self._agreement.rank,
            "world_size": self._agreement.world_size,
            "tracker": self.tracker.state_dict(),
            **SyncState(self._run.position, self._versions, self._event_time).save(),
        }

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Go on from a checkpoint, whose weights the model has by now. Between steps, by all ranks together.

        Args:
            saved: the states of all ranks that saved it, whatever their number and their sharding.

        Raises:
            InvalidInput: some are missing, of another checkpoint, or of a newer format, on this rank or another.
        """
        with begun_together("DeltaSync.load_state_dict"):
            check_states(saved)
        self.tracker.load_state_dict([state["tracker"] for state in saved])
        state = SyncState.of_all(saved)
        self._give_up()
        self._run.go_on_from(state.position)
        self._versions, self._event_time = state.versions, state.event_time_unix_ns
        self._requests, self._failure, self._refused = RowRequests(), None, None
        self._cut_step = self._published_changes = -1
        if cursor := self._versions.cursor_at(state.position):
            self.tracker.resync(_CONSUMER, cursor)
        self._resync, self.stats.published_step = state.position.number == 0, self.tracker.steps
        self._trouble.try_again()

    def _wait(self, deadline: float) -> DeltasyncError | None:
        """Wait a moment for the pending cut, then let the ranks agree again; the error if it is too late."""
        self._note_arrival(wait=True)
        left = deadline - time.monotonic()
        if self._under_way.ends_within(max(0.0, min(_PEER_POLL_SECONDS, left))) or left > 0:
            return None
        why = self.trouble or "it has not answered yet"
        return ServiceUnavailable(
            f"{self._options.service} did not seal the cut of step {self._under_way.step} in time: {why}"
        )

    def _cut(self, step_end_unix_ns: int, late: DeltasyncError | None = None, *, flush: bool = False) -> bool:
        """Publish a cut if all ranks are ready for one; whether all of them had nothing to publish."""
        failure, self._failure = self._failure or self._settle(), None
        if flush and not self._looked and self._under_way.pending is None:
            self._looked = True  # Once is enough: this thread changes nothing until `flush` returns.
            if self._published_changes == self.tracker.changes and failure is None:
                try:
                    self.tracker.find_changes(_CONSUMER)
                except DeltasyncError as error:  # The others learn of it as the ranks agree.
                    failure = error
        agreed = self._agree(failure, late, flush=flush)
        if agreed.failed:
            self._stop(failure or DeltasyncError("another rank cannot publish: its log says why"), flush=flush)
            return False
        if agreed.late:
            raise late or ServiceUnavailable("another rank waits no longer: its log says why")
        ready = agreed.ready or agreed.refused
        # Where something was refused, each rank has a pause of its own.
        self._standstill.note(waits=not (self._under_way.pending or ready or self._trouble.reason))
        if agreed.refused:
            self._go_back()
        if ready and (agreed.unpublished or agreed.deletes):
            self._meet_requests(agreed.deletes)
            if agreed.again:  # Marks from outside, or another try: each cut needs its own step, on all ranks.
                self.tracker.step()
            self._publish(step_end_unix_ns, full=agreed.resync or self._resync)
        return ready and not agreed.unpublished and not agreed.deletes

    def _agree(self, failure: Exception | None, late: DeltasyncError | None, *, flush: bool) -> Consensus:
        # A cut that is not full leaves what free rows of a map were.
        resync = self._resync or self.tracker.offers_all(_CONSUMER)
        return self._agreement.reach(
            ready=self._under_way.pending is None and (flush or self._trouble.over),
            resync=resync,
            unpublished=resync or self._published_changes != self.tracker.changes,
            failed=failure is not None,
            deletes=self._requests.newest(self._asked),
            refused=self._refused is not None or self._standstill.long,
            late=late is not None,
            again=self._cut_step == self.tracker.steps,
        )

    def _stop(self, error: Exception, *, flush: bool) -> None:
        """Publish nothing for a while, on no rank: parts would wait for each other. No cursor has moved."""
        self._give_up()
        self._trouble.note(error)
        self.stats.refusals += 1
        if flush or self._options.verify or self._options.on_refusal is OnRefusal.RAISE:
            raise error

    def _give_up(self) -> None:
        """Close the connection, with what is under way."""
        self._run.disconnect()
        self._under_way.drop()

    def _go_back(self) -> None:
        """The service does not hold what a rank builds on, or answers one no more: go on from the newest version
        of ours that it has, with what has changed since, or with every row.
        """
        self._give_up()
        refused, self._refused = self._refused, None
        lowest = self._agreement.lowest(self._goes_on_from(refused))
        if cursor := self._versions.cursor_at(lowest):
            self.tracker.resync(_CONSUMER, cursor)
        lost = not cursor or self.tracker.offers_all(_CONSUMER)
        self._resync = self._agreement.any_of(lost)
        if self._resync:
            logger.warning("every row is published again: %s", refused or "another rank's log says why")
        else:
            self._run.position = Position(self._run.position.history, lowest.number, lowest.seal)
            logger.warning("what came after version %d is lost, or an answer: it is sent again", lowest.number)

    def _goes_on_from(self, refused: ResyncRequired | None) -> Position:
        """The newest version that this rank can go on from; none where it is not known."""
        if refused is None:
            return self._run.position
        # Whoever has claimed just that has nothing better to say.
        return refused.head if refused.head and refused.head != self._run.position else Position()

    @property
    def _asked(self) -> Sequence[DeleteRequest]:
        return self._run.publisher.deletes if self._run.publisher else ()

    def _meet_requests(self, upto: int) -> None:
        for request in self._requests.meet(self._asked, upto):
            self.delete(request.table, torch.from_numpy(request.ids))
            logger.info("table %r: %s deleted on request", request.table, are(len(request.ids), "row"))

    def _settle(self) -> Exception | None:
        """Take note of the pending cut's end, if it has come; the error, if it failed for good."""
        if (ended := self._under_way.take_ended()) is None:
            return None
        error = ended.sealed.exception()
        if isinstance(error, ResyncRequired):
            self._note_refusal(error)
            return None
        if isinstance(error, Exception):
            return error
        self._note_sealed(ended, ended.sealed.result())
        return None

    def _note_refusal(self, error: ResyncRequired) -> None:
        if error.changed is None:
            self._refused = error  # What becomes of it, all ranks find out together.
            return
        self._cut_step = -1  # Also where this rank has none: where no rank has sent its part, the step stays.
        rows = sum(map(len, mark_held(self.tracker, dict(error.changed)).values()))
        logger.info("%s published again, since others came after what this run goes on from", are(rows, "row"))

    def _note_sealed(self, ended: PendingCut, position: Position) -> None:
        self.tracker.acknowledge(ended.token)
        self._run.position = position
        self._versions.add(position, ended.token.cursor)
        self._published_changes = ended.changes
        self._trouble.end()
        self.stats.add(position, ended.part, ended.watch.seconds)

    def _publish(self, step_end_unix_ns: int, *, full: bool) -> None:
        self._cut_step = self.tracker.steps
        if full:
            self.tracker.resync(_CONSUMER)
            self._resync = False
        if self._options.dense:
            self._differences.note_cut()
        try:
            self._begin(step_end_unix_ns, full=full)
        except DeltasyncError as error:  # The others learn of it when the ranks agree next.
            self._failure = error

    def _begin(self, step_end_unix_ns: int, *, full: bool) -> None:
        publisher = self._run.connect()  # First: what all ranks do together comes before what may fail on one.
        read = self.tracker.begin_delta(_CONSUMER)
        what = {
            "step": self.tracker.steps,
            "step_end_unix_ns": step_end_unix_ns,
            "full": full,
            "deletes": sorted(self._requests.met),
            "event_time_unix_ns": self._event_time,
            "differing": sorted(self._differences.names) if self._agreement.rank == 0 else (),
        }
        self._under_way.begin(publisher, read, self.tracker.changes, what)

    def _note_arrival(self, *, wait: bool = False) -> None:
        self._failure = self._under_way.arrive(wait=wait) or self._failure
