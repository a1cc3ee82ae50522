"""The run that this process is a rank of, and its publisher. In the thread that trains."""

from collections.abc import Sequence

from deltasync.base.run_ids import later_run_id
from deltasync.client import Endpoint, Position, Publisher, PublisherOptions
from deltasync.core.tables import TableSpec
from deltasync.trainer.distributed.agreement import Agreement
from deltasync.trainer.tracking.tracker import Tracker


class TrainingRun:
    """Begins when it first connects. However often it is begun anew, it is no younger for that, and has an id that
    tells whose it is: a run that began later, which has taken over, stays the later one.

    Attributes:
        publisher: the one that is connected; None before, and after `disconnect`.
        position: what the run is known to build on.
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
        self._service, self._model, self._tables = service, model, list(tables)
        self._tracker, self._agreement = tracker, agreement
        self._announced = self._earlier_connections = 0
        self._first_id, self._started_unix_ns = "", 0
        self._later = -1  # How often it was begun anew.

    @property
    def connections(self) -> int:
        """How often this rank has been connected."""
        now = self.publisher.connection.connections if self.publisher else 0
        return self._earlier_connections + now

    def connect(self) -> Publisher:
        """The publisher, which is made if there is none. All ranks call it together; no cut is under way.

        Where the model was resharded, ranks hold other shards, which a run of another id announces.

        Raises:
            InvalidInput: on this rank alone, a file with its token or its certificates cannot be read now. What
                ranks do together is done.
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

    def go_on_from(self, position: Position) -> None:
        """Build on that from here on, as a run of another id: this one may have published what came after it."""
        self.disconnect()
        self.position, self._announced = position, 0

    def finish(self) -> None:
        """Tell the service that this rank has finished, and close the connection."""
        if self.publisher:
            self.publisher.close()
        self.disconnect()

    def disconnect(self) -> None:
        """Give up what is under way, and close the connection."""
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
