"""Publishing what training changes in a model.

`DeltaSync` belongs to the thread that trains: it marks, decides with the other ranks whether to cut, and gathers
the rows of a cut there. On a GPU that is launched and not waited for: another thread hands the rows to the
publisher once they are in host memory. The publisher sends them from threads of its own, which the training thread
never waits for in `step`. When a cut is sealed, the next `step` takes note.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Any

import torch
from torch import nn

from deltasync.client import Position, Publisher, PublisherOptions
from deltasync.core.delete_request import DeleteRequest
from deltasync.core.errors import DeltasyncError, InvalidInput, NotFound, ResyncRequired, ServiceUnavailable
from deltasync.core.event_time import check_event_time, newest_event_time
from deltasync.trainer.checks import check_format
from deltasync.trainer.distributed.agreement import Agreement
from deltasync.trainer.pending_cut import PendingCut, published
from deltasync.trainer.row_requests import RowRequests, WantedRows
from deltasync.trainer.sync_options import SyncOptions, SyncStats
from deltasync.trainer.tracking.mean_pooling import wrongly_divided
from deltasync.trainer.tracking.modes import TrackingMode
from deltasync.trainer.tracking.module_tensors import buffer_digests
from deltasync.trainer.tracking.options import TrackerOptions
from deltasync.trainer.tracking.shards import check_deletable, check_ids
from deltasync.trainer.tracking.tracked_model import published_tables
from deltasync.trainer.tracking.tracker import Tracker

__all__ = ["DeltaSync", "SyncOptions", "SyncStats"]

logger = logging.getLogger(__name__)

_CONSUMER = "publisher"
_PEER_POLL_SECONDS = 0.05
# States that name no format are of the first.
_STATE_FORMAT = 1


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
        self._agreement = Agreement()
        # Copies that all ranks have are published by the first.
        first = self._agreement.rank == 0
        self.tracker = Tracker(
            model,
            TrackerOptions(
                consumers=[_CONSUMER],
                mode=TrackingMode.EMBEDDING_LAST,
                auto_compact=True,
                dense=options.dense and first,
                id_maps=True,
                replicas=first,
                verify=options.verify,
            ),
        )
        self.stats = SyncStats()
        self._options = options
        self._model = model
        self._failure: DeltasyncError | None = None
        self._parts = 0
        self._differing = set[str]()
        self._tables = published_tables(model, dense=options.dense)
        for sentence in wrongly_divided(model) if first else ():
            logger.warning("%s", sentence)
        self._publisher: Publisher | None = None
        self._announced = 0
        self._arrivals = ThreadPoolExecutor(1, "deltasync-arrivals")  # On a CPU, no thread is ever started.
        self._launched: Future[PendingCut] | None = None
        self._pending: PendingCut | None = None
        self._position = Position()
        self._requests = RowRequests()
        self._wanted = WantedRows()
        self._resync = True
        self._refused = False
        self._published_step = self._published_changes = -1
        self._event_time: int | None = None

    def step(self, event_time_unix_ns: int | None = None) -> None:
        """Note that an optimizer step is complete; publish every `publish_every` of them.

        Args:
            event_time_unix_ns: the time of the newest event that this rank has trained on in it, nanoseconds since
                1970; None where that is not known. A cut carries the newest there was up to its step, on any rank.

        Raises:
            InvalidInput: the event time is no whole number from 1 on.
            DeltasyncError: the service has refused a part for good, on this rank or another.
        """
        started = time.perf_counter()
        check_event_time(event_time_unix_ns)
        self._event_time = newest_event_time((self._event_time, event_time_unix_ns))
        self.tracker.step()
        self._take_launched()
        if self.tracker.steps % self._options.publish_every == 0:
            before = self._under_way
            self._mark_wanted(again=True)
            self._cut(time.time_ns())
            self.stats.absorbed += self._under_way is before
        if self.tracker.on_gpu and (self.tracker.steps + 1) % self._options.publish_every == 0:
            self.tracker.count_ahead(_CONSUMER)
        self.stats.step_seconds += time.perf_counter() - started

    def flush(self, timeout_seconds: float | None = None) -> Position:
        """Publish everything that changed and wait until it is sealed. Called by all ranks together.

        Args:
            timeout_seconds: how long to wait for the service at most; None = for ever.

        Returns:
            The position that holds the model as it is now.

        Raises:
            DeltasyncError: the service has refused a part for good, or did not seal it in time, on this rank
                or another.
        """
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self._cut(time.time_ns(), self._wait(deadline)):
            pass
        return self._position

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
        """Flush, and close the connection.

        Raises:
            DeltasyncError: as `flush`; the connection is closed then, too.
        """
        try:
            return self.flush(timeout_seconds)
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the connection at once: cuts that are not sealed may be lost."""
        self._arrivals.shutdown(wait=False, cancel_futures=True)
        if self._publisher:
            self._publisher.close()

    def __enter__(self) -> "DeltaSync":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        # After an error the ranks may no longer be in step, and a flush could wait for ever.
        if error:
            self.abort()
        else:
            self.close()

    def state_dict(self) -> dict[str, Any]:
        """What this rank adds to a checkpoint, so that a run from there need not publish every row anew."""
        return {
            "format": _STATE_FORMAT,
            "rank": self._agreement.rank,
            "world_size": self._agreement.world_size,
            "tracker": self.tracker.state_dict(),
            "history": self._position.history,
            "version": self._position.number,
            "event_time_unix_ns": self._event_time,
        }

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Go on from a checkpoint, whose weights the model has by now. Before the first step.

        Args:
            saved: the states of all ranks that saved it, whatever their number and their sharding.

        Raises:
            InvalidInput: some are missing, of another checkpoint, or of a newer format.
        """
        if isinstance(saved, Mapping):
            raise InvalidInput("expected a list with the states of all ranks, got one state")
        for state in saved:
            check_format("a state of DeltaSync", state.get("format", 1), _STATE_FORMAT)
        ranks = sorted((state["rank"], state["world_size"]) for state in saved)
        if not ranks or ranks != [(rank, len(saved)) for rank in range(len(saved))]:
            found = ", ".join(f"{rank} of {world_size}" for rank, world_size in ranks)
            raise InvalidInput(f"expected the states of all ranks of one checkpoint, got rank {found or 'none'}")
        self.tracker.load_state_dict([state["tracker"] for state in saved])
        # States of earlier versions lack it.
        self._event_time = newest_event_time(state.get("event_time_unix_ns") for state in saved)
        positions = {Position(state["history"], state["version"]) for state in saved}
        # They differ in a checkpoint taken while a cut was being sealed.
        self._position = positions.pop() if len(positions) == 1 else Position()
        self._resync = self._position.number == 0

    def _wait(self, deadline: float) -> DeltasyncError | None:
        """Wait a moment for the pending cut, then let the ranks agree again; the error if it is too late."""
        self._take_launched(wait=True)
        if self._pending is None:
            return None
        wait_for([self._pending.sealed], max(0.0, min(_PEER_POLL_SECONDS, deadline - time.monotonic())))
        if self._pending.sealed.done() or time.monotonic() < deadline:
            return None
        return ServiceUnavailable(
            f"{self._options.service} did not seal the cut of step {self._pending.part.step} in time; "
            f"its answers, if there were any, are in this process's log"
        )

    def _cut(self, step_end_unix_ns: int, late: DeltasyncError | None = None) -> bool:
        """Publish a cut if all ranks are ready for one; whether all of them had nothing to publish."""
        failure = late or self._failure or self._settle()
        self._mark_wanted(again=False)
        # A cut that is not full leaves what free rows of a map were.
        resync = self._resync or self.tracker.offers_all(_CONSUMER)
        agreed = self._agreement.reach(
            ready=self._under_way is None,
            resync=resync,
            unpublished=resync or self._published_changes != self.tracker.changes,
            failed=failure is not None,
            deletes=self._requests.newest(self._asked),
            refused=self._refused,
        )
        self._refused = False
        if failure:
            raise failure
        if agreed.failed:
            raise DeltasyncError("another rank cannot publish: its log says why")
        if agreed.refused and not agreed.ready:
            self._give_up()
            return False
        if agreed.ready and (agreed.unpublished or agreed.deletes):
            self._meet_requests(agreed.deletes)
            if self._published_step == self.tracker.steps:  # Marks from outside: each cut needs its own step.
                self.tracker.step()
            self._publish(step_end_unix_ns, full=agreed.resync)
        return agreed.ready and not agreed.unpublished and not agreed.deletes

    @property
    def _under_way(self) -> "Future[PendingCut] | PendingCut | None":
        """The cut that is not sealed yet."""
        return self._launched or self._pending

    @property
    def _asked(self) -> Sequence[DeleteRequest]:
        return self._publisher.deletes if self._publisher else ()

    def _meet_requests(self, upto: int) -> None:
        for request in self._requests.meet(self._asked, upto):
            self.delete(request.table, torch.from_numpy(request.ids))
            logger.info("%d rows of table %r are deleted on request", len(request.ids), request.table)

    def _mark_wanted(self, *, again: bool) -> None:
        """Have rows published again of which the service holds other bits than it was sent (`WantedRows.take`)."""
        wanted = self._wanted.take(self._publisher.wanted, again=again) if self._publisher else {}
        if not wanted:
            return
        tracked = {table.name for table in self.tracker.tables}
        for table, ids in wanted.items():
            if table in tracked:
                self.tracker.mark_held(table, torch.from_numpy(ids))
                logger.warning(
                    "%d rows of table %r are published again: the service lost some bits", len(ids), table
                )

    def _settle(self) -> Exception | None:
        """Take note of the pending cut's end, if it has come; the error, if it failed for good."""
        if self._pending is None or not self._pending.sealed.done():
            return None
        ended, self._pending = self._pending, None
        error = ended.sealed.exception()
        if isinstance(error, ResyncRequired):
            logger.warning("%s", error)
            self._resync = self._refused = True
            return None
        if isinstance(error, Exception):
            return error
        self._note_sealed(ended, ended.sealed.result())
        return None

    def _give_up(self) -> None:
        """Begin a new run: parts of this one wait for that of a rank which must publish every row instead."""
        self._take_launched(wait=True)
        if self._publisher:
            self._publisher.close()
        self._publisher = self._pending = None
        self._resync = True

    def _note_sealed(self, ended: PendingCut, position: Position) -> None:
        self.tracker.acknowledge(ended.token)
        self._position = position
        part = ended.part
        self._published_step, self._published_changes = part.step, ended.changes
        self.stats.cuts.append((position.number, part.step, part.step_end_unix_ns))
        for rows in part.rows:
            self.stats.rows += len(rows.ids)
            self.stats.bytes += rows.nbytes

    def _publish(self, step_end_unix_ns: int, *, full: bool) -> None:
        if full:
            self.tracker.resync(_CONSUMER)
            self._resync = False
        self._parts += 1
        if self._options.dense and self._parts.bit_count() == 1:  # 1, 2, 4, 8 and so on: at first, all are alike.
            self._compare_buffers()
        publisher = self._connected()  # All ranks do so, before what may fail on one alone.
        try:
            read = self.tracker.begin_delta(_CONSUMER)
        except DeltasyncError as error:  # The others learn of it when the ranks agree next.
            self._failure = error
            return
        what = {
            "step": self.tracker.steps,
            "step_end_unix_ns": step_end_unix_ns,
            "full": full,
            "deletes": sorted(self._requests.met),
            "event_time_unix_ns": self._event_time,
            "differing": sorted(self._differing) if self._agreement.rank == 0 else (),
        }
        publish = partial(published, publisher, read, self.tracker.changes, what)
        if read.arrived:
            self._pending = publish()
        else:
            self._launched = self._arrivals.submit(publish)

    def _take_launched(self, *, wait: bool = False) -> None:
        """Take note that the cut whose rows were on their way is published, if it is."""
        if self._launched and (wait or self._launched.done()):
            launched, self._launched = self._launched, None
            self._pending = launched.result()

    def _compare_buffers(self) -> None:
        """Say once of each buffer that it is not alike on all ranks: nothing but SyncBatchNorm keeps them so."""
        if self._agreement.world_size == 1:
            return
        found = self._agreement.differing(buffer_digests(self._model))
        new = [name for name in found if name not in self._differing]
        self._differing.update(new)
        if new and self._agreement.rank == 0:
            logger.warning("buffers differ between ranks; those of rank 0 are published: %s", ", ".join(new))

    def _connected(self) -> Publisher:
        if self._publisher and self._announced != self.tracker.attachments:
            # The model was resharded: ranks hold other shards, which a new run announces. No cut is pending.
            self._publisher.close()
            self._publisher = None
        if self._publisher is None:
            self._announced = self.tracker.attachments
            shards = [tracked.shard for tracked in self.tracker.shards]
            run, started = self._agreement.new_run()
            options = PublisherOptions(
                service=self._options.service,
                model=self._options.model,
                run=run,
                run_started_unix_ns=started,
                rank=self._agreement.rank,
                world_size=self._agreement.world_size,
                continues=self._position,
                takes_deletes=True,
            )
            self._publisher = Publisher(options, self._tables, shards)
        return self._publisher
