"""Publishing what training changes in a model.

`DeltaSync` belongs to the thread that trains: it marks rows, decides with the other ranks whether to cut, and
gathers the rows of a cut. On a GPU it launches that and does not wait: another thread hands the rows to the
publisher once they are in host memory. The publisher sends them from threads of its own, which `step` never waits
for. When a cut is sealed, the next `step` takes note.
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
from deltasync.client import Connection, Part, Position
from deltasync.client.connection import Home
from deltasync.core.rows import DeleteRequest
from deltasync.core.seal import check_event_time, newest_event_time
from deltasync.trainer.cut_under_way import CutUnderWay
from deltasync.trainer.distributed.agreement import Agreement, Consensus
from deltasync.trainer.distributed.ranks import all_ranks, this_rank
from deltasync.trainer.distributed.start import begun_together
from deltasync.trainer.run import TrainingRun
from deltasync.trainer.sync_metrics import Trouble, metrics_of
from deltasync.trainer.sync_options import OnRefusal, SyncOptions, SyncStats
from deltasync.trainer.sync_state import FORMAT, SyncState, check_states
from deltasync.trainer.tracking.module_tensors import buffer_digests, unranked_embeddings
from deltasync.trainer.tracking.modules import wrongly_divided
from deltasync.trainer.tracking.options import TrackerOptions, TrackingMode
from deltasync.trainer.tracking.shards import check_deletable, check_ids
from deltasync.trainer.tracking.tracked_model import published_tables
from deltasync.trainer.tracking.tracker import Tracker

__all__ = ["DeltaSync", "OnRefusal", "SyncOptions", "SyncStats"]

logger = logging.getLogger(__name__)

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
        # The first rank publishes the copies that all ranks have.
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
        self._under_way: CutUnderWay | None = None
        self._requests = RowRequests()
        self._resync = True
        self._refused: ResyncRequired | None = None
        self._standstill = Standstill()
        self._cut_step = self._published_changes = -1
        self._searched = False  # For changes after the last step, in this `flush`.
        self._event_time: int | None = None

    @property
    def connection(self) -> Connection | None:
        """This rank's connection to the service, with its age or why it is down. None before the first cut, and
        between tries after publishing was refused: `trouble` says why.
        """
        return self._run.publisher.connection if self._run.publisher else None

    @property
    def trouble(self) -> str:
        """Why changes are not published, as of the last try; empty if nothing has failed."""
        publisher = self._run.publisher
        if self._trouble.reason or not (publisher and self._under_way):
            return self._trouble.reason
        return "" if publisher.connection.connected else publisher.connection.last_error

    def metrics(self) -> dict[str, float]:
        """Numbers to log, by name: how publishing goes on this rank. Takes next to no time."""
        return metrics_of(self.stats, self._trouble, self._run, self.tracker)

    def step(self, event_time_unix_ns: int | None = None) -> None:
        """Note that an optimizer step is complete; publish after every `publish_every` steps.

        Args:
            event_time_unix_ns: the time of the newest event that this rank has trained on in this step,
                nanoseconds since 1970; None if unknown. A cut carries the newest time up to its step, of any rank.

        Raises:
            InvalidInput: the event time is not a whole number from 1 on.
            DeltasyncError: publishing was refused, or is impossible, on this rank or another, and `on_refusal` is
                RAISE; otherwise the error becomes `trouble`, and a later step tries again. Or another rank has
                closed its DeltaSync.
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
            before = self._under_way
            self._cut(time.time_ns())
            self.stats.absorbed += self._under_way is before
        if self.tracker.on_gpu and (self.tracker.steps + 1) % self._options.publish_every == 0:
            self.tracker.count_ahead(_CONSUMER)
        self.stats.step_seconds += time.perf_counter() - started

    def flush(self, timeout_seconds: float | None = None) -> Position:
        """Publish all changes, including those after the last `step`, and wait until they are sealed.

        All ranks call it together, between backwards.

        Args:
            timeout_seconds: how long to wait for the service at most; None = for ever.

        Returns:
            The position that has the model as it is now.

        Raises:
            DeltasyncError: publishing was refused, or is impossible, or the service did not seal the cut in time,
                on this rank or another. Nothing is lost: the next cut has the changes.
            ServiceUnavailable: this process was forked since.
        """
        self._home.check()
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._searched = False
        while not self._cut(time.time_ns(), self._wait(deadline), flush=True):
            pass
        return self._run.position

    def mark_all(self) -> None:
        """Publish all rows with the next cut: something else than training, say a load, has changed them."""
        self.tracker.mark_all()

    def delete(self, table: str, ids: torch.Tensor) -> None:
        """Delete rows here (`Tracker.delete`), and with the next cut everywhere. Between steps.

        All ranks call it with the same ids after the same step; each deletes the rows of its shards. If a table is
        sharded by rows alone, only the ranks with some of the rows need to call it.

        Args:
            table: the table's FQN.
            ids: global row ids, [n] of any integer type.

        Raises:
            NotFound: the model has no such table.
            InvalidInput: the table has no row of one of the ids, or is not an embedding table.
        """
        spec = next((spec for spec in self._tables if spec.name == table), None)
        if spec is None:
            raise NotFound(f"no table {table!r}; there are: {', '.join(each.name for each in self._tables)}")
        check_deletable(spec)
        check_ids(spec, ids)
        if self.tracker.holds(table):
            self.tracker.delete(table, ids)

    def close(self, timeout_seconds: float | None = None) -> Position:
        """Flush, tell the service that this rank has finished, and close the connection.

        Does nothing if this is closed already, or in a process that was forked since.

        Raises:
            DeltasyncError: as `flush`; the connection is closed nevertheless.
        """
        try:
            done = self._agreement.closed or self._home.left
            position = self._run.position if done else self.flush(timeout_seconds)
            self._run.finish()
            return position
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the connection at once, and publish nothing any more.

        Cuts that are not sealed may be lost, and the service reports this rank as lost. Does nothing in a process
        that was forked since.
        """
        if self._home.left:
            return
        self._run.disconnect()
        self._agreement.close()

    def __enter__(self) -> "DeltaSync":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        # After an error the ranks may no longer be in step, and a flush could wait for ever.
        self.abort() if error or self._home.left else self.close()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs of this rank, for a run from there to publish only later changes."""
        return {
            "format": FORMAT,
            "rank": self._agreement.rank,
            "world_size": self._agreement.world_size,
            "tracker": self.tracker.state_dict(),
            **SyncState(self._run.position, self._run.versions, self._event_time).save(),
        }

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Go on from a checkpoint whose weights the model has already loaded.

        All ranks call it together, between steps.

        Args:
            saved: the states of all ranks that saved the checkpoint; their number and sharding may differ.

        Raises:
            InvalidInput: states are missing, of another checkpoint, or of a newer format, on this rank or another.
        """
        with begun_together("DeltaSync.load_state_dict"):
            check_states(saved)
        self.tracker.load_state_dict([state["tracker"] for state in saved])
        state = SyncState.of_all(saved)
        self._give_up()
        self._run.go_on_from(state.position, state.versions)
        self._event_time = state.event_time_unix_ns
        self._requests = RowRequests()
        self._failure = self._refused = None
        self._cut_step = self._published_changes = -1
        if cursor := state.versions.cursor_at(state.position):
            self.tracker.resync(_CONSUMER, cursor)
        self._resync = state.position.number == 0
        self.stats.published_step = self.tracker.steps
        self._trouble.try_again()

    def _wait(self, deadline: float) -> DeltasyncError | None:
        """Wait a moment for the cut under way, then let the ranks agree again; the error if it is too late."""
        self._note_arrival(wait=True)
        left = deadline - time.monotonic()
        cut = self._under_way
        if cut is None or cut.ends_within(max(0.0, min(_PEER_POLL_SECONDS, left))) or left > 0:
            return None
        why = self.trouble or "it has not answered yet"
        return ServiceUnavailable(
            f"{self._options.service} did not seal the cut of step {cut.part.step} in time: {why}"
        )

    def _note_arrival(self, *, wait: bool = False) -> None:
        if self._under_way and (error := self._under_way.note_arrival(wait=wait)):
            self._failure = error
            self._under_way = None

    def _cut(self, step_end_unix_ns: int, late: DeltasyncError | None = None, *, flush: bool = False) -> bool:
        """Publish a cut if all ranks are ready for one; return whether no rank had anything to publish."""
        failure = self._failure or self._settle()
        self._failure = None
        if flush and not self._searched and self._under_way is None:
            self._searched = True  # Once is enough: this thread changes nothing until `flush` returns.
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
        # After a refusal, each rank has a pause of its own.
        self._standstill.note(waits=not (self._under_way or ready or self._trouble.reason))
        if agreed.refused:
            self._go_back()
        if ready and (agreed.unpublished or agreed.deletes):
            for request in self._requests.meet(self._asked, agreed.deletes):
                self.delete(request.table, torch.from_numpy(request.ids))
                logger.info("table %r: %s deleted on request", request.table, are(len(request.ids), "row"))
            if agreed.again:  # Marks from outside, or another try: each cut needs its own step, on all ranks.
                self.tracker.step()
            self._publish(step_end_unix_ns, full=agreed.resync or self._resync)
        return ready and not agreed.unpublished and not agreed.deletes

    def _settle(self) -> Exception | None:
        """Take note of the service's answer to the cut under way; the error, if the cut failed for good."""
        cut = self._under_way
        if cut is None or (answer := cut.answer) is None:
            return None
        self._under_way = None
        error = answer.exception()
        if isinstance(error, ResyncRequired):
            self._note_refusal(error)
            return None
        if isinstance(error, Exception):
            return error
        position = answer.result()
        self.tracker.acknowledge(cut.token)
        self._run.note_sealed(position, cut.token.cursor)
        self._published_changes = cut.changes
        self._trouble.end()
        self.stats.add(position, cut.part, cut.seconds)
        return None

    def _note_refusal(self, error: ResyncRequired) -> None:
        if error.changed is None:
            self._refused = error  # All ranks decide together what to do about it.
            return
        self._cut_step = -1  # Also where this rank has none: where no rank has sent its part, the step stays.
        tracked = {table.name for table in self.tracker.tables}
        rows = {table: ids for table, ids in dict(error.changed).items() if table in tracked}
        for table, ids in rows.items():
            self.tracker.mark_held(table, torch.from_numpy(ids))
        count = sum(map(len, rows.values()))
        logger.info("%s published again, since others came after what this run goes on from", are(count, "row"))

    def _agree(self, failure: Exception | None, late: DeltasyncError | None, *, flush: bool) -> Consensus:
        # A cut that is not full leaves what free rows of a map were.
        resync = self._resync or self.tracker.offers_all(_CONSUMER)
        return self._agreement.reach(
            ready=self._under_way is None and (flush or self._trouble.over),
            resync=resync,
            unpublished=resync or self._published_changes != self.tracker.changes,
            failed=failure is not None,
            deletes=self._requests.newest(self._asked),
            refused=self._refused is not None or self._standstill.long,
            late=late is not None,
            again=self._cut_step == self.tracker.steps,
        )

    @property
    def _asked(self) -> Sequence[DeleteRequest]:
        return self._run.publisher.deletes if self._run.publisher else ()

    def _publish(self, step_end_unix_ns: int, *, full: bool) -> None:
        self._cut_step = self.tracker.steps
        if full:
            self.tracker.resync(_CONSUMER)
            self._resync = False
        if self._options.dense:
            self._differences.note_cut()
        try:
            # First: what all ranks do together comes before what may fail on one.
            publisher = self._run.connect()
            delta = self.tracker.begin_delta(_CONSUMER)
            part = Part(
                step=self.tracker.steps,
                step_end_unix_ns=step_end_unix_ns,
                full=full,
                deletes=sorted(self._requests.met),
                event_time_unix_ns=self._event_time,
                differing=sorted(self._differences.names) if self._agreement.rank == 0 else (),
            )
            self._under_way = CutUnderWay(publisher, delta, part, self.tracker.changes)
        except DeltasyncError as error:  # The others learn of it when the ranks agree next.
            self._failure = error

    def _stop(self, error: Exception, *, flush: bool) -> None:
        """Publish nothing for a while, on no rank: parts would wait for each other. No cursor has moved."""
        self._give_up()
        self._trouble.note(error)
        self.stats.refusals += 1
        if flush or self._options.verify or self._options.on_refusal is OnRefusal.RAISE:
            raise error

    def _give_up(self) -> None:
        """Close the connection, and drop the cut under way."""
        self._run.disconnect()
        if self._under_way:
            self._under_way.note_arrival(wait=True)  # Its thread may read the rows until then.
        self._under_way = None

    def _go_back(self) -> None:
        """Go on from the newest of our versions that the service has, with the changes since, or with every row.

        The service lacks what a rank builds on, or no longer answers one.
        """
        self._give_up()
        refused, self._refused = self._refused, None
        newest = self._run.position
        if refused:
            # A service that names the very position which it refuses has nothing better to offer.
            newest = refused.head if refused.head and refused.head != newest else Position()
        lowest = self._agreement.lowest(newest)
        cursor = self._run.versions.cursor_at(lowest)
        if cursor:
            self.tracker.resync(_CONSUMER, cursor)
        self._resync = self._agreement.any_of(not cursor or self.tracker.offers_all(_CONSUMER))
        if self._resync:
            logger.warning("every row is published again: %s", refused or "another rank's log says why")
        else:
            self._run.position = Position(self._run.position.history, lowest.number, lowest.seal)
            logger.warning("what came after version %d is lost, or an answer: it is sent again", lowest.number)


class BufferDifferences:
    """Finds buffers that differ between ranks, at the 1st, 2nd, 4th, 8th cut and so on: at first, all are alike.

    Attributes:
        names: FQNs of the buffers that differ.
    """

    def __init__(self, model: nn.Module, agreement: Agreement, fqns_to_skip: Collection[str]) -> None:
        self.names = set[str]()
        self._model, self._agreement, self._fqns_to_skip = model, agreement, fqns_to_skip
        self._cuts = 0

    def note_cut(self) -> None:
        """Compare the buffers if this cut is due for it, and log new differences. A collective of all ranks."""
        self._cuts += 1
        if self._agreement.world_size == 1 or self._cuts.bit_count() != 1:
            return
        differing = self._agreement.differing(buffer_digests(self._model, self._fqns_to_skip))
        new = [name for name in differing if name not in self.names]
        self.names.update(new)
        if new and self._agreement.rank == 0:
            logger.warning("buffers differ between ranks; those of rank 0 are published: %s", ", ".join(new))


# A service that both ranks reach answers within this time.
_PATIENCE_SECONDS = 60.0


class Standstill:
    """Detects that another rank waits for a cut which this rank has finished. In the thread that trains.

    The service answers a part of a sealed cut again, but not if it has lost that cut meanwhile: then it waits for
    the parts of the ranks that have their answer.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since: float | None = None

    @property
    def long(self) -> bool:
        """Whether it has lasted so long that the ranks should begin anew."""
        return self._since is not None and self._now() - self._since >= _PATIENCE_SECONDS

    def note(self, *, waits: bool) -> None:
        """Note whether this rank has no part under way and waits for another rank."""
        if not waits:
            self._since = None
        elif self._since is None:
            self._since = self._now()


class RowRequests:
    """The service's requests to delete rows, and which of them this rank has met.

    Attributes:
        met: numbers of the requests in the service's last list that are met. With a cut, the service forgets them.
    """

    def __init__(self) -> None:
        self.met: set[int] = set()

    def newest(self, handed: Sequence[DeleteRequest]) -> int:
        """The largest number of an unmet request; 0 if all are met."""
        self.met &= {request.number for request in handed}
        return max((request.number for request in handed if request.number not in self.met), default=0)

    def meet(self, handed: Sequence[DeleteRequest], upto: int) -> list[DeleteRequest]:
        """Mark the unmet requests up to a number as met, and return them."""
        due = [request for request in handed if request.number <= upto and request.number not in self.met]
        self.met |= {request.number for request in due}
        return due
