"""The service's probe: a trainer and a replica that use the same path as all others."""

import logging
import secrets
import threading
import time
import uuid
from collections.abc import Callable

import numpy as np

from deltasync.base.errors import DeltasyncError, ServiceUnavailable
from deltasync.base.events import error_text
from deltasync.client import (
    Connection,
    Endpoint,
    NumpyTarget,
    Part,
    Publisher,
    PublisherOptions,
    Release,
    RowBatch,
    Shard,
    Subscriber,
    SubscriberOptions,
    TableSpec,
    Written,
)
from deltasync.service.consumers import PATIENCE_SECONDS, ProbeStatus

logger = logging.getLogger(__name__)

TABLE = TableSpec("probe", 1, 4)
# A float32 value represents every whole number up to here.
_MOST = 1 << 24


class _Echo(NumpyTarget):
    """A target that notifies a condition after each release."""

    def __init__(self, changed: threading.Condition) -> None:
        super().__init__()
        self._changed = changed

    def apply(self, release: Release) -> Written | None:
        written = super().apply(release)
        with self._changed:
            self._changed.notify_all()
        return written

    def holds(self, number: int) -> bool:
        """Whether the row has this number."""
        table = self.tables.get(TABLE.name)
        return table is not None and float(table[0, 0]) == number


class Probe:
    """A thread that publishes a row every few seconds and reads it back through a subscription.

    It calls `service` for the endpoint at every connection, and writes its results to `status`.
    """

    def __init__(self, service: Callable[[], Endpoint], seconds: float, status: ProbeStatus) -> None:
        self.status = status
        status.every_seconds = seconds
        # Random, because the service may still have the number of an earlier run.
        self._service, self._number = service, secrets.randbelow(_MOST)
        self._run_id, self._started = uuid.uuid4().hex, time.time_ns()
        self._publisher: Publisher | None = None
        self._subscriber: Subscriber | None = None
        # Notified when a row is sealed or applied, and at the end.
        self._changed, self._closing = threading.Condition(), False
        self._echo = _Echo(self._changed)
        self._thread = threading.Thread(target=self._run, name="probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop at once."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            try:
                self.status.record(self._turn())
            except Exception as error:  # noqa: BLE001  # the probe outlives any error
                if not self._closing:
                    self._note_failure(error)
            self._wait(lambda: False, self.status.every_seconds)
        self._disconnect()

    def _turn(self) -> float:
        """Publish a row, read it back and return the seconds this took."""
        self._number = self._number % _MOST + 1
        values = np.full((1, TABLE.dim), self._number, TABLE.dtype)
        rows = RowBatch(Shard.whole(TABLE), np.zeros(1, np.int64), values)
        begun = time.monotonic()
        publisher, subscriber = self._connected()
        sealed = publisher.publish(self._part(rows))
        sealed.add_done_callback(self._notify)
        if not self._wait(sealed.done, PATIENCE_SECONDS):
            raise _late("a row was not sealed", publisher.connection)
        position = sealed.result()
        if not self._wait(lambda: self._echo.holds(self._number), PATIENCE_SECONDS):
            subscriber.check()  # Raises the error that stopped it, if any.
            raise _late(f"version {position.number} was not read back", subscriber.connection)
        return time.monotonic() - begun

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition until the timeout or `close`; return whether it holds."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or condition(), seconds)
            return condition()

    def _notify(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()

    def _part(self, rows: RowBatch) -> Part:
        return Part(step=self._number, step_end_unix_ns=time.time_ns(), rows=[rows], full=True)

    def _connected(self) -> tuple[Publisher, Subscriber]:
        name = self.status.name
        if self._publisher is None:
            options = PublisherOptions(
                service=self._service(), model=name, run=self._run_id, run_started_unix_ns=self._started
            )
            self._publisher = Publisher(options, [TABLE], [Shard.whole(TABLE)])
        if self._subscriber is None:
            subscription = SubscriberOptions(service=self._service(), consumer=name, replica="probe")
            self._subscriber = Subscriber(subscription, self._echo)
        return self._publisher, self._subscriber

    def _note_failure(self, error: Exception) -> None:
        if not self.status.failure:
            unexpected = None if isinstance(error, DeltasyncError) else error
            logger.warning("the probe's row did not come back; trying again: %s", error, exc_info=unexpected)
        self.status.record_failure(error_text(error))
        self._disconnect()

    def _disconnect(self) -> None:
        """Close both connections, because either may have ended for good. The next turn opens new ones."""
        for each in (self._publisher, self._subscriber):
            if each:
                each.close()
        self._publisher = self._subscriber = None


def _late(what: str, connection: Connection) -> ServiceUnavailable:
    why = "" if connection.connected or not connection.last_error else f": {connection.last_error}"
    return ServiceUnavailable(f"{what} in {PATIENCE_SECONDS:.0f} s{why}")
