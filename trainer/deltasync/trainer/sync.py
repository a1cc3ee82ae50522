"""Publish the changes of a model during training.

`DeltaSync` runs in the training thread: it marks rows, agrees with the other ranks on cuts, and gathers the rows
of a cut. On a GPU it only launches the gathering; another thread passes the rows to the publisher when they are in
host memory. The publisher sends them from its own threads, and `step` never waits for them. The next `step` after
a cut is sealed records that.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deltasync.base.arguments import check_type
from deltasync.base.errors import DeltasyncError, NotFound, ResyncRequired, RunRefused, ServiceUnavailable
from deltasync.base.events import error_text
from deltasync.base.waiting import backoff
from deltasync.base.words import are
from deltasync.client import Connection, Part, Position, Publisher
from deltasync.client.connection import ForkGuard
from deltasync.core.rows import DeleteRequest
from deltasync.core.seal import check_event_time, newest_event_time
from deltasync.trainer.distributed.agreement import Agreement, Consensus
from deltasync.trainer.distributed.ranks import all_ranks, begun_together, this_rank
from deltasync.trainer.run import CONSUMER, StallDetector, SyncState, TrainingRun, check_states
from deltasync.trainer.sync_options import OnRefusal, SyncOptions, SyncStats
from deltasync.trainer.tracking.delta import Delta
from deltasync.trainer.tracking.module_tensors import buffer_digests, unranked_embeddings
from deltasync.trainer.tracking.modules import wrongly_divided
from deltasync.trainer.tracking.shards import check_deletable, check_ids
from deltasync.trainer.tracking.tracked_model import TrackerOptions, TrackingMode, published_tables
from deltasync.trainer.tracking.tracker import Tracker

__all__ = ["DeltaSync", "OnRefusal", "SyncOptions", "SyncStats"]

logger = logging.getLogger(__name__)

_PEER_POLL_SECONDS = 0.05


class DeltaSync:
    """Publishes the changes of a model in training to a sync service. Every rank constructs one.

        with DeltaSync(model, SyncOptions(service="localhost:50051", model="clicks")) as sync:
            for ...:
                pipeline.progress(batches)
                sync.step()

    Attributes:
        tracker: the tracker of changed rows.
        stats: statistics of publishing.
    """

    def __init__(self, model: nn.Module, options: SyncOptions) -> None:
        check_type("DeltaSync(model, options)", "model", model, nn.Module)
        check_type("DeltaSync(model, options)", "options", options, SyncOptions)
        self._fork_guard = ForkGuard(f"DeltaSync of model {options.model!r}")
        with begun_together("DeltaSync", options.of_all_ranks):
            self._tables = published_tables(model, dense=options.dense, fqns_to_skip=options.fqns_to_skip)
        # The first rank publishes parameters and buffers that all ranks have.
        first = this_rank() == 0
        self.tracker = Tracker(
            model,
            TrackerOptions(
                consumers=[CONSUMER],
                mode=TrackingMode.EMBEDDING_LAST,
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
        self._publish_failure = PublishFailure()
        self._differences = BufferDifferences(model, self._agreement, options.fqns_to_skip)
        unranked = unranked_embeddings(model, dense=options.dense, fqns_to_skip=options.fqns_to_skip)
        for sentence in (*wrongly_divided(model), *unranked) if first else ():
            logger.warning("%s", sentence)
        self._run = TrainingRun(options, self._tables, self.tracker, self._agreement)
        self._under_way: CutUnderWay | None = None
        self._requests = RowRequests()
        self._resync = True
        self._refused: ResyncRequired | None = None
        self._stall = StallDetector()
        self._cut_step = self._published_changes = -1
        self._searched = False  # Whether this `flush` has looked for changes after the last step.
        self._event_time: int | None = None

    @property
    def connection(self) -> Connection | None:
        """This rank's connection to the service; None before the first cut and after a refusal (see `trouble`)."""
        return self._run.publisher.connection if self._run.publisher else None

    @property
    def trouble(self) -> str:
        """The error of the last attempt to publish; empty if it succeeded."""
        publisher = self._run.publisher
        if self._publish_failure.reason or not (publisher and self._under_way):
            return self._publish_failure.reason
        return "" if publisher.connection.connected else publisher.connection.last_error

    def metrics(self) -> dict[str, float]:
        """Metrics of publishing on this rank, by name. Cheap: reads no rows and does not wait."""
        stats, connection = self.stats, self.connection
        connected = connection is not None and connection.connected
        unpublished = self.tracker.steps - stats.published_step
        since_cut = time.time() - stats.cuts[-1][2] / 1e9 if unpublished and stats.cuts else 0.0
        return {
            "version": self._run.position.number,
            "cuts": stats.sealed,
            "rows": stats.rows,
            "bytes": stats.bytes,
            "absorbed": stats.absorbed,
            "publish_seconds": stats.publish_seconds,
            "unpublished_steps": unpublished,
            "unpublished_seconds": max(0.0, since_cut),
            "refusals": stats.refusals,
            "refused_seconds": self._publish_failure.seconds,
            "connected": float(connected),
            "connections": self._run.connections,
            "failed_attempts": connection.attempts if connection else 0,
            "disconnected_seconds": connection.seconds if connection and not connected else 0.0,
            "step_seconds": stats.step_seconds,
            "tracking_seconds": self.tracker.cost.seconds,
        }

    def step(self, event_time_unix_ns: int | None = None) -> None:
        """Record a complete optimizer step, and publish after every `publish_every` steps.

        Args:
            event_time_unix_ns: the time of the newest event that this rank has trained on in this step,
                nanoseconds since 1970; None if unknown. A cut has the newest time of all ranks.

        Raises:
            InvalidInput: the event time is not a positive whole number.
            RunRefused: the service refuses this run for good: the model was rolled back, another trainer has taken
                over, or tables have another form than in the service. Raised on all ranks.
            DeltasyncError: publishing was refused or is impossible on some rank, and `on_refusal` is RAISE. With
                CONTINUE, the error becomes `trouble` and a later step tries again. Also raised if another rank is
                at another step, or has closed its DeltaSync.
            ServiceUnavailable: this is a forked process.
        """
        self._fork_guard.check()
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
            self.tracker.count_ahead(CONSUMER)
        self.stats.step_seconds += time.perf_counter() - started

    def flush(self, timeout_seconds: float | None = None) -> Position:
        """Publish all changes, including those after the last `step`, and wait until they are sealed.

        All ranks call it together, between backwards.

        Args:
            timeout_seconds: how long to wait for the service; None = no limit.

        Returns:
            The position of the current state of the model.

        Raises:
            DeltasyncError: on some rank, publishing was refused or is impossible, or the service did not seal the
                cut in time. No changes are lost: the next cut has them.
            ServiceUnavailable: this is a forked process.
        """
        self._fork_guard.check()
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._searched = False
        while not self._cut(time.time_ns(), self._wait(deadline), flush=True):
            pass
        return self._run.position

    def mark_all(self) -> None:
        """Publish all rows with the next cut, for example after loading weights."""
        self.tracker.mark_all()

    def delete(self, table: str, ids: torch.Tensor) -> None:
        """Delete rows in this model (`Tracker.delete`), and with the next cut in the service and all replicas.

        Call it between steps. All ranks call it with the same ids after the same step, and each deletes the rows
        of its shards. For a table that is only sharded by rows, ranks without any of the rows need not call it.

        Args:
            table: the table's FQN.
            ids: global row ids, [n] of any integer type.

        Raises:
            NotFound: the model has no such table.
            InvalidInput: an id is outside the table, or the table is not an embedding table.
        """
        spec = next((spec for spec in self._tables if spec.name == table), None)
        if spec is None:
            raise NotFound(f"no table {table!r}; there are: {', '.join(each.name for each in self._tables)}")
        check_deletable(spec)
        check_ids(spec, ids)
        with suppress(NotFound):  # This rank has no rows of the table.
            self.tracker.delete(table, ids)

    def close(self, timeout_seconds: float | None = None) -> Position:
        """Flush, sign off from the service, and close the connection.

        Does nothing if this is closed already, or in a forked process.

        Raises:
            DeltasyncError: see `flush`; the connection is closed in any case.
        """
        try:
            done = self._agreement.closed or self._fork_guard.left
            position = self._run.position if done else self.flush(timeout_seconds)
            self._run.finish()
            return position
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the connection at once and stop publishing.

        Cuts that are not sealed may be lost, and the service reports this rank as lost. Does nothing in a forked
        process.
        """
        if self._fork_guard.left:
            return
        self._run.disconnect()
        self._agreement.close()

    def __enter__(self) -> "DeltaSync":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        # After an error the ranks may be at different steps, and a flush could wait forever.
        self.abort() if error or self._fork_guard.left else self.close()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state for a checkpoint. A run that loads it only publishes later changes."""
        tracker = self.tracker.state_dict()
        state = SyncState(self._run.position, self._run.versions, self._event_time)
        return state.save(tracker, self._agreement.rank, self._agreement.world_size)

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Continue from a checkpoint whose weights the model has already loaded.

        All ranks call it together, between steps.

        Args:
            saved: the states of all ranks that saved the checkpoint; their number and sharding may differ.

        Raises:
            InvalidInput: on some rank, states are missing, belong to another checkpoint or have a newer format.
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
            self.tracker.resync(CONSUMER, cursor)
        self._resync = state.position.number == 0
        self.stats.published_step = self.tracker.steps
        self._publish_failure.reset_backoff()

    def _wait(self, deadline: float) -> DeltasyncError | None:
        """Wait briefly for the current cut; returns an error after the deadline."""
        self._note_arrival(wait=True)
        left = deadline - time.monotonic()
        cut = self._under_way
        if cut is None or cut.answer(max(0.0, min(_PEER_POLL_SECONDS, left))) or left > 0:
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
            self._searched = True  # Once is enough, because this thread changes no rows until `flush` returns.
            if self._published_changes == self.tracker.changes and failure is None:
                try:
                    if self.tracker.get_delta_ids(CONSUMER).rows:  # For example after a backward without a step.
                        self._published_changes = -1
                except DeltasyncError as error:  # `_agree` reports it to the other ranks.
                    failure = error
        agreed = self._agree(failure, late, flush=flush)
        if agreed.failed:
            self._stop(failure, raises=flush or agreed.over)
            return False
        if agreed.late:
            raise late or ServiceUnavailable("the timeout of another rank has expired: see its log")
        ready = agreed.refused or not agreed.busy
        # After a refusal, each rank pauses separately.
        self._stall.update(waits=not (self._under_way or ready or self._publish_failure.reason))
        if agreed.refused:
            self._go_back()
        if ready and (agreed.unpublished or agreed.deletes):
            for request in self._requests.meet(self._asked, agreed.deletes):
                self.delete(request.table, torch.from_numpy(request.ids))
                logger.info("table %r: %s deleted on request", request.table, are(len(request.ids), "row"))
            if agreed.again:  # A new attempt, or marks without a step: each cut needs its own step on all ranks.
                self.tracker.step()
            self._publish(step_end_unix_ns, full=agreed.resync or self._resync)
        return ready and not agreed.unpublished and not agreed.deletes

    def _settle(self) -> Exception | None:
        """Process the service's answer to the current cut; returns an error if the cut failed for good."""
        cut = self._under_way
        if cut is None or (answer := cut.answer()) is None:
            return None
        self._under_way = None
        error = answer.exception()
        if isinstance(error, ResyncRequired):
            self._note_refusal(error)
            return None
        if isinstance(error, Exception):
            return error
        position = answer.result()
        self.tracker.acknowledge(cut.delta)
        self._run.position = position
        self._run.versions.add(position, cut.delta.cursor)
        self._published_changes = cut.changes
        self._publish_failure.clear()
        self.stats.add(position, cut.part, cut.seconds)
        return None

    def _note_refusal(self, error: ResyncRequired) -> None:
        if error.changed is None:
            self._refused = error  # All ranks handle it together, in `_go_back`.
            return
        # Even if no row belongs to this rank: if no rank has sent its part, the same step can be cut again.
        self._cut_step = -1
        tracked = {table.name for table in self.tracker.tables}
        rows = {table: ids for table, ids in dict(error.changed).items() if table in tracked}
        for table, ids in rows.items():
            self.tracker.offer_again(table, torch.from_numpy(ids))
        count = sum(map(len, rows.values()))
        logger.info(
            "%s published again: the service has newer changes than the version that this run continues",
            are(count, "row"),
        )

    def _agree(self, failure: Exception | None, late: DeltasyncError | None, *, flush: bool) -> Consensus:
        # Only a full cut replaces the old entries of free rows in a map.
        resync = self._resync or self.tracker.offers_all(CONSUMER)
        state = Consensus(
            busy=self._under_way is not None or not (flush or self._publish_failure.allows_attempt),
            resync=resync,
            unpublished=resync or self._published_changes != self.tracker.changes,
            failed=failure is not None,
            refused=self._refused is not None or self._stall.stalled,
            late=late is not None,
            again=self._cut_step == self.tracker.steps,
            over=isinstance(failure, RunRefused),
            deletes=self._requests.newest(self._asked),
        )
        return self._agreement.reach(self.tracker.steps, state)

    @property
    def _asked(self) -> Sequence[DeleteRequest]:
        return self._run.publisher.deletes if self._run.publisher else ()

    def _publish(self, step_end_unix_ns: int, *, full: bool) -> None:
        self._cut_step = self.tracker.steps
        if full:
            self.tracker.resync(CONSUMER)
            self._resync = False
        if self._options.dense:
            self._differences.note_cut()
        try:
            # `connect` first: all ranks take part in it, and later calls may fail on a single rank.
            publisher = self._run.connect()
            delta = self.tracker.begin_delta(CONSUMER)
            part = Part(
                step=self.tracker.steps,
                step_end_unix_ns=step_end_unix_ns,
                full=full,
                deletes=sorted(self._requests.met),
                event_time_unix_ns=self._event_time,
                differing=sorted(self._differences.names) if self._agreement.rank == 0 else (),
            )
            self._under_way = CutUnderWay(publisher, delta, part, self.tracker.changes)
        except DeltasyncError as error:  # `_agree` reports it to the other ranks.
            self._failure = error

    def _stop(self, failure: Exception | None, *, raises: bool) -> None:
        """Pause publishing on all ranks, because parts wait for each other. No cursor has moved.

        `failure` is the error of this rank, None if only others have one. With `raises`, raise the errors of all.
        """
        self._give_up()
        self._publish_failure.record(failure or DeltasyncError("another rank cannot publish: see its log"))
        self.stats.refusals += 1
        if raises or self._options.verify or self._options.on_refusal is OnRefusal.RAISE:
            with begun_together("a cut of DeltaSync"):
                if failure:
                    raise failure

    def _give_up(self) -> None:
        """Close the connection and drop the current cut."""
        self._run.disconnect()
        if self._under_way:
            self._under_way.note_arrival(wait=True)  # Its thread may read the rows until then.
        self._under_way = None

    def _go_back(self) -> None:
        """Publish again from the newest version of this run that the service still has, or else all rows."""
        self._give_up()
        refused, self._refused = self._refused, None
        newest = self._run.position
        if refused:
            # If the service names the position that it refuses, no older one will do: publish all rows.
            newest = refused.head if refused.head and refused.head != newest else Position()
        lowest = self._agreement.lowest(newest)
        cursor = self._run.versions.cursor_at(lowest)
        if cursor:
            self.tracker.resync(CONSUMER, cursor)
        self._resync = self._agreement.any_of(not cursor or self.tracker.offers_all(CONSUMER))
        if self._resync:
            logger.warning("every row is published again: %s", refused or "see the log of another rank")
        else:
            self._run.position = Position(self._run.position.history, lowest.number, lowest.seal)
            logger.warning(
                "the service lacks cuts after version %d, or its answers were lost: the changes are sent again",
                lowest.number,
            )


class CutUnderWay:
    """This rank's part of a cut."""

    def __init__(self, publisher: Publisher, delta: Delta, part: Part, changes: int) -> None:
        """Publish a delta, read at `Tracker.changes`. While it comes from a GPU, a thread waits for its rows."""
        self.delta, self.part, self.changes = delta, part, changes  # The part has no rows until they arrive.
        self._publisher = publisher
        self._started = self._ended = 0.0
        self._arrival: Future[Future[Position]] | None = None
        self._sealed: Future[Position] | None = None
        if delta.arrived:
            self._sealed = self._publish()
        else:
            arrivals = ThreadPoolExecutor(1, "deltasync-arrivals")
            self._arrival = arrivals.submit(self._publish)
            arrivals.shutdown(wait=False)

    def note_arrival(self, *, wait: bool = False) -> DeltasyncError | None:
        """Check whether the publisher has the rows, or wait until it has. Returns the error if it refused them."""
        if self._arrival and (wait or self._arrival.done()):
            arrival, self._arrival = self._arrival, None
            try:
                self._sealed = arrival.result()
            except DeltasyncError as error:
                return error
        return None

    def answer(self, seconds: float = 0) -> "Future[Position] | None":
        """The service's answer: the position of the sealed cut, or an error. None if it takes more `seconds`."""
        if self._sealed and seconds:
            wait_for([self._sealed], seconds)
        return self._sealed if self._sealed and self._sealed.done() else None

    @property
    def seconds(self) -> float:
        """Time from the rows in host memory to the service's answer, or until now if it has not answered."""
        return (self._ended or time.perf_counter()) - self._started

    def _publish(self) -> "Future[Position]":
        self.part = replace(self.part, rows=self.delta.result.rows, made_unix_ns=time.time_ns())
        self._started = time.perf_counter()
        sealed = self._publisher.publish(self.part)
        sealed.add_done_callback(self._note_end)
        return sealed

    def _note_end(self, _sealed: object) -> None:
        self._ended = time.perf_counter()


# A refusal rarely goes away without a change, and each attempt sends all changed rows.
_LONGEST_PAUSE_SECONDS = 300.0


class PublishFailure:
    """The last error of publishing, and when to try again. For the training thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.reason = ""  # Empty if there was no error since the last sealed cut.
        self._now, self._since = now, 0.0
        self.reset_backoff()

    @property
    def allows_attempt(self) -> bool:
        """Whether to try to publish now: there is no error, or the pause after it is over."""
        return not self.reason or self._now() >= self._due

    @property
    def seconds(self) -> float:
        """Time since the first error; 0 if there is none."""
        return self._now() - self._since if self.reason else 0.0

    def record(self, error: Exception) -> None:
        """Record an error. A repeated reason is logged once."""
        if (reason := error_text(error)) != self.reason:
            logger.error("nothing is published for now: %s", reason)
        self._since = self._since if self.reason else self._now()
        self.reason = reason
        self._due = self._now() + next(self._pauses)

    def reset_backoff(self) -> None:
        """Try again at once, because the next attempt publishes other rows."""
        self._pauses, self._due = backoff(_LONGEST_PAUSE_SECONDS), 0.0

    def clear(self) -> None:
        """Record a sealed cut."""
        if self.reason:
            logger.warning("publishing continues after: %s", self.reason)
            self.reason = ""
            self.reset_backoff()


class BufferDifferences:
    """Finds buffers that differ between ranks (FQNs: `names`), at the 1st, 2nd, 4th, 8th cut and so on."""

    def __init__(self, model: nn.Module, agreement: Agreement, fqns_to_skip: Collection[str]) -> None:
        self.names = set[str]()
        self._model, self._agreement, self._fqns_to_skip = model, agreement, fqns_to_skip
        self._cuts = 0

    def note_cut(self) -> None:
        """Compare the buffers at certain cuts, and log new differences. A collective of all ranks."""
        self._cuts += 1
        if self._agreement.world_size == 1 or self._cuts.bit_count() != 1:
            return
        differing = self._agreement.differing(buffer_digests(self._model, self._fqns_to_skip))
        new = [name for name in differing if name not in self.names]
        self.names.update(new)
        if new and self._agreement.rank == 0:
            logger.warning("buffers differ between ranks; rank 0 publishes its own: %s", ", ".join(new))


class RowRequests:
    """The service's delete requests, and their progress on this rank."""

    def __init__(self) -> None:
        # Numbers of the completed requests in the service's last list. After a cut, the service drops them.
        self.met: set[int] = set()

    def newest(self, requests: Sequence[DeleteRequest]) -> int:
        """The largest number of a request that is still to do; 0 if there is none."""
        self.met &= {request.number for request in requests}
        return max((request.number for request in requests if request.number not in self.met), default=0)

    def meet(self, requests: Sequence[DeleteRequest], upto: int) -> list[DeleteRequest]:
        """Mark the remaining requests up to a number as met, and return them."""
        due = [request for request in requests if request.number <= upto and request.number not in self.met]
        self.met |= {request.number for request in due}
        return due
