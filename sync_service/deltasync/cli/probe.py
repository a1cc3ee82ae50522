"""The probe of a service: a trainer and a replica of its own, over the way that all others take."""

import logging
import threading
import time
import uuid

import numpy as np

from deltasync.client import (
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
)
from deltasync.core.errors import DeltasyncError, ServiceUnavailable
from deltasync.core.probe_status import ProbeStatus

logger = logging.getLogger(__name__)

TABLE = TableSpec("probe", 1, 4)
_PATIENCE_SECONDS = 10.0
# Whole numbers that a value of the table can tell from each other.
_MOST = 1 << 24


class _Echo(NumpyTarget):
    """Tells when it holds a number."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def apply(self, release: Release) -> None:
        super().apply(release)
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, number: int, seconds: float) -> bool:
        """Whether it holds that number within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._held() == number, seconds)

    def _held(self) -> float:
        table = self.tables.get(TABLE.name)
        return -1.0 if table is None else float(table[0, 0])


class Probe:
    """Publishes a row every few seconds, and reads it back through a subscription, in a thread of its own.

    Attributes:
        status: what it has found.
    """

    def __init__(self, service: Endpoint, seconds: float, status: ProbeStatus) -> None:
        self.status = status
        self._service, self._seconds = service, seconds
        self._closing, self._number = threading.Event(), 0
        self._run_id, self._started = uuid.uuid4().hex, time.time_ns()
        self._publisher: Publisher | None = None
        self._echo = _Echo()
        options = SubscriberOptions(service=service, consumer=status.name, replica="probe")
        self._subscriber = Subscriber(options, self._echo)
        self._thread = threading.Thread(target=self._run, name="probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it, within seconds."""
        self._closing.set()
        self._thread.join()
        self._subscriber.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.status.note(self._turn())
            except (DeltasyncError, TimeoutError) as error:
                if not self._closing.is_set():
                    self._note_failure(error)
            self._closing.wait(self._seconds)
        self._disconnect()

    def _turn(self) -> float:
        """Seconds until a row came back.

        Raises:
            DeltasyncError: it did not.
            TimeoutError: it was not sealed in time.
        """
        self._number = self._number % _MOST + 1
        values = np.full((1, TABLE.dim), self._number, TABLE.dtype)
        rows = RowBatch(Shard.whole(TABLE), np.zeros(1, np.int64), values)
        begun = time.monotonic()
        position = self._connected().publish(self._part(rows)).result(_PATIENCE_SECONDS)
        if not self._echo.wait_for(self._number, _PATIENCE_SECONDS):
            raise ServiceUnavailable(f"version {position.number} was not read back in {_PATIENCE_SECONDS:.0f} s")
        return time.monotonic() - begun

    def _part(self, rows: RowBatch) -> Part:
        return Part(step=self._number, step_end_unix_ns=time.time_ns(), rows=[rows], full=True)

    def _connected(self) -> Publisher:
        if self._publisher is None:
            options = PublisherOptions(
                service=self._service,
                model=self.status.name,
                run=self._run_id,
                run_started_unix_ns=self._started,
            )
            self._publisher = Publisher(options, [TABLE], [Shard.whole(TABLE)])
        return self._publisher

    def _note_failure(self, error: Exception) -> None:
        if not self.status.trouble:
            logger.warning("the probe's row did not come back, which is tried again: %s", error)
        self.status.note_failure(str(error) or f"no answer in {_PATIENCE_SECONDS:.0f} s")
        self._disconnect()

    def _disconnect(self) -> None:
        if self._publisher:
            self._publisher.close()
        self._publisher = None
