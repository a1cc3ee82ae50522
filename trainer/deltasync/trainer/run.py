"""The run that this process is a rank of, and its publisher. In the thread that trains."""

from collections.abc import Sequence

from deltasync.client import Endpoint, Position, Publisher, PublisherOptions
from deltasync.core.position import later_run_id
from deltasync.core.tables import TableSpec
from deltasync.trainer.distributed.agreement import Agreement
from deltasync.trainer.sync_state import PublishedVersions
from deltasync.trainer.tracking.tracker import Tracker


class TrainingRun:
    """The run of this trainer in the service. It begins when it first connects.

    Beginning it again, after a resharding say, keeps its start and its id's first part: a run of another trainer
    that began later, and has taken over, stays the later one.

    Attributes:
        publisher: the connected publisher; None before, and after `disconnect`.
        position: what the run builds on.
        versions: what was published, for going back to an earlier version.
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
        """How often this rank has connected."""
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
            shards = [tracked.shard for tracked in self._tracker.shards]
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
