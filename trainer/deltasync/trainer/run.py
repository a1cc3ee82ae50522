"""This rank's training run: its publisher, and the cut under way. In the thread that trains."""

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
    """The run of this trainer in the service. It begins when it first connects.

    Beginning it again, after a resharding say, keeps its start and its id's first part: a run of another trainer
    that began later, and has taken over, stays the later one.

    Attributes:
        publisher: the connected publisher; None before, and after `disconnect`.
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
    ) -> None:
        self.publisher: Publisher | None = None
        self.position = Position()
        self.versions = PublishedVersions()
        self._service, self._model, self._tables = service, model, list(tables)
        self._tracker, self._agreement = tracker, agreement
        self._announced = self._earlier_connections = 0
        self._first_id, self._started_unix_ns = "", 0
        self._later = -1  # How often the run has begun again.

    @property
    def connections(self) -> int:
        """Number of connections that this rank has made."""
        now = self.publisher.connection.connections if self.publisher else 0
        return self._earlier_connections + now

    def connect(self) -> Publisher:
        """Return the publisher; make one if there is none. All ranks call this together, without a cut under way.

        After a resharding, ranks have other shards, which a run of another id announces.

        Raises:
            InvalidInput: on this rank alone, a file with its token or its certificates cannot be read now. The
                collectives are complete by then.
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
        """Note that a cut is sealed, with all rows that the tracker had stamped up to a cursor."""
        self.position = position
        self.versions.add(position, cursor)

    def go_on_from(self, position: Position, versions: PublishedVersions) -> None:
        """Build on a checkpoint, as a run of another id: this one may have published later versions."""
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
        """Close the connection, and give up a part under way."""
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
        )


class CutUnderWay:
    """This rank's part of a cut. In the thread that trains.

    Attributes:
        part: what is published; without rows until they have arrived.
        token: acknowledges the rows.
        changes: the tracker's when the rows were read.
    """

    def __init__(self, publisher: Publisher, delta: Delta, part: Part, changes: int) -> None:
        """Publish a delta. Where its rows are on their way from a GPU, a thread waits for them first.

        Args:
            publisher: sends the part.
            delta: the rows.
            part: everything else of the part.
            changes: the tracker's when the rows were read.

        Raises:
            DeltasyncError: the publisher cannot send such a part.
        """
        self.part = part
        self.token = delta.token
        self.changes = changes
        self._publisher = publisher
        self._delta = delta
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
        """Note whether the rows were published, or wait for it. Return why they cannot be."""
        if self._arrival and (wait or self._arrival.done()):
            arrival, self._arrival = self._arrival, None
            try:
                self._sealed = arrival.result()
            except DeltasyncError as error:
                return error
        return None

    @property
    def answer(self) -> "Future[Position] | None":
        """The service's answer: the position of the sealed cut, or an error. None until it has come."""
        return self._sealed if self._sealed and self._sealed.done() else None

    def ends_within(self, seconds: float) -> bool:
        """Wait for the service's answer, no longer than this; whether it has come."""
        if self._sealed:
            wait_for([self._sealed], seconds)
        return self.answer is not None

    @property
    def seconds(self) -> float:
        """How long the service took to answer, from when the rows were in host memory; so far, if it has not."""
        return (self._ended or time.perf_counter()) - self._started

    def _publish(self) -> "Future[Position]":
        self.part = replace(self.part, rows=self._delta.result.batches(), made_unix_ns=time.time_ns())
        self._started = time.perf_counter()
        sealed = self._publisher.publish(self.part)
        sealed.add_done_callback(self._note_end)
        return sealed

    def _note_end(self, _sealed: object) -> None:
        self._ended = time.perf_counter()
