"""This rank's training run in the service: its publisher and its current cut. For the training thread."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace

from deltasync.base.errors import DeltasyncError
from deltasync.client import Endpoint, Part, Position, Publisher, PublisherOptions
from deltasync.core.position import later_run_id
from deltasync.core.tables import TableSpec
from deltasync.trainer.distributed.agreement import Agreement
from deltasync.trainer.sync_state import PublishedVersions
from deltasync.trainer.tracking.delta import Delta
from deltasync.trainer.tracking.tracker import Tracker


class TrainingRun:
    """The run of this trainer in the service. It begins when this first connects.

    After a resharding or a loaded checkpoint, the trainer continues under a new run id with the same first part,
    and with nearly the same start time. A run of another trainer that began in between therefore still counts as
    the later one.

    Attributes:
        publisher: the publisher; None before `connect` and after `disconnect`.
        position: the position that the run builds on.
        versions: the published versions, for going back to an earlier one.
    """

    def __init__(
        self,
        service: Endpoint | str,
        model: str,
        tables: Sequence[TableSpec],
        tracker: Tracker,
        agreement: Agreement,
        *,
        start_over: bool = False,
    ) -> None:
        self.publisher: Publisher | None = None
        self.position = Position()
        self.versions = PublishedVersions()
        self._service, self._model, self._tables = service, model, list(tables)
        self._tracker, self._agreement, self._start_over = tracker, agreement, start_over
        self._announced = self._earlier_connections = 0
        self._first_id, self._started_unix_ns = "", 0
        self._later = -1  # How often the run has begun again.

    @property
    def connections(self) -> int:
        """Number of connections that this rank has made."""
        now = self.publisher.connection.connections if self.publisher else 0
        return self._earlier_connections + now

    def connect(self) -> Publisher:
        """Return the publisher, or make one. All ranks call this together, while no cut is in progress.

        After a resharding, ranks have other shards, and announce them under a new run id.
        """
        if self._announced != self._tracker.attachments:
            self.disconnect()
            self._announced = self._tracker.attachments
            if not self._first_id:
                self._first_id, self._started_unix_ns = self._agreement.new_run()
            self._later += 1
        if self.publisher is None:
            shards = [tracked.shard for table in self._tracker.tables for tracked in table.shards]
            self.publisher = Publisher(self._options(), self._tables, shards)
        return self.publisher

    def note_sealed(self, position: Position, cursor: int) -> None:
        """Record that a cut is sealed. It has all rows that the tracker had stamped up to `cursor`."""
        self.position = position
        self.versions.add(position, cursor)

    def go_on_from(self, position: Position, versions: PublishedVersions) -> None:
        """Continue from a checkpoint under a new run id, because this run may have published later versions."""
        self.disconnect()
        self.position = position
        self.versions = versions
        self._announced = 0

    def finish(self) -> None:
        """Tell the service that this rank has finished, and close the connection."""
        if self.publisher:
            self.publisher.close()
        self.disconnect()

    def disconnect(self) -> None:
        """Close the connection and drop a part that is not sealed."""
        if self.publisher:
            self.publisher.abort()
            self._earlier_connections += self.publisher.connection.connections
        self.publisher = None

    def _options(self) -> PublisherOptions:
        return PublisherOptions(
            service=self._service,
            model=self._model,
            run=later_run_id(self._first_id, self._later),
            run_started_unix_ns=self._started_unix_ns + self._later,
            rank=self._agreement.rank,
            world_size=self._agreement.world_size,
            continues=self.position,
            takes_deletes=True,
            start_over=self._start_over,
        )


class CutUnderWay:
    """This rank's part of a cut, for the training thread.

    Attributes:
        delta: the rows, to acknowledge when the cut is sealed.
        part: the part; without rows until they have arrived in host memory.
        changes: `Tracker.changes` when the rows were read.
    """

    def __init__(self, publisher: Publisher, delta: Delta, part: Part, changes: int) -> None:
        """Publish a delta. While its rows are being copied from a GPU, a thread waits for them."""
        self.delta, self.part, self.changes = delta, part, changes
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

    @property
    def answer(self) -> "Future[Position] | None":
        """The service's answer: the position of the sealed cut, or an error. None until it arrives."""
        return self._sealed if self._sealed and self._sealed.done() else None

    def ends_within(self, seconds: float) -> bool:
        """Wait for the service's answer up to `seconds`. Returns whether it has arrived."""
        if self._sealed:
            wait_for([self._sealed], seconds)
        return self.answer is not None

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
