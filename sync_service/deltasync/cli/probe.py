"""The probe of a service: a trainer and a replica of its own, over the way that all others take."""

import logging
import threading
import time
import uuid
from collections.abc import Callable

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
from deltasync.core.events import described
from deltasync.core.probe_status import PATIENCE_SECONDS, ProbeStatus

logger = logging.getLogger(__name__)

TABLE = TableSpec("probe", 1, 4)
# Whole numbers that a value of the table can tell from each other.
_MOST = 1 << 24


class _Echo(NumpyTarget):
    """Tells when it holds something else."""

    def __init__(self, news: threading.Condition) -> None:
        super().__init__()
        self._news = news

    def apply(self, release: Release) -> None:
        super().apply(release)
        with self._news:
            self._news.notify_all()

    def holds(self, number: int) -> bool:
        """Whether it holds that number."""
        table = self.tables.get(TABLE.name)
        return table is not None and float(table[0, 0]) == number


class Probe:
    """Publishes a row every few seconds, and reads it back through a subscription, in a thread of its own.

    Attributes:
        status: what it has found.
    """

    def __init__(self, service: Endpoint, seconds: float, status: ProbeStatus) -> None:
        self.status = status
        status.every_seconds = seconds
        self._service, self._number = service, 0
        self._run_id, self._started = uuid.uuid4().hex, time.time_ns()
        self._publisher: Publisher | None = None
        self._subscriber: Subscriber | None = None
        # Wakes whoever waits for a row that is sealed or held, or for the end.
        self._news, self._closing = threading.Condition(), False
        self._echo = _Echo(self._news)
        self._thread = threading.Thread(target=self._run, name="probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it, at once."""
        with self._news:
            self._closing = True
            self._news.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            try:
                self.status.note(self._turn())
            except Exception as error:  # noqa: BLE001  # it must go on, whatever it was
                if not self._closing:
                    self._note_failure(error)
            self._wait(lambda: False, self.status.every_seconds)
        self._disconnect()

    def _turn(self) -> float:
        """Seconds until a row came back.

        Raises:
            DeltasyncError: it did not.
        """
        self._number = self._number % _MOST + 1
        values = np.full((1, TABLE.dim), self._number, TABLE.dtype)
        rows = RowBatch(Shard.whole(TABLE), np.zeros(1, np.int64), values)
        begun = time.monotonic()
        publisher, subscriber = self._connected()
        sealed = publisher.publish(self._part(rows))
        sealed.add_done_callback(self._tell)
        if not self._wait(sealed.done, PATIENCE_SECONDS):
            raise ServiceUnavailable(f"a row was not sealed in {PATIENCE_SECONDS:.0f} s")
        position = sealed.result()
        if not self._wait(lambda: self._echo.holds(self._number), PATIENCE_SECONDS):
            subscriber.check()  # What has ended it is the reason.
            raise ServiceUnavailable(f"version {position.number} was not read back in {PATIENCE_SECONDS:.0f} s")
        return time.monotonic() - begun

    def _wait(self, wanted: Callable[[], bool], seconds: float) -> bool:
        """Whether something is so within so many seconds; not longer than until the end."""
        with self._news:
            self._news.wait_for(lambda: self._closing or wanted(), seconds)
            return wanted()

    def _tell(self, _: object) -> None:
        with self._news:
            self._news.notify_all()

    def _part(self, rows: RowBatch) -> Part:
        return Part(step=self._number, step_end_unix_ns=time.time_ns(), rows=[rows], full=True)

    def _connected(self) -> tuple[Publisher, Subscriber]:
        name = self.status.name
        if self._publisher is None:
            options = PublisherOptions(
                service=self._service, model=name, run=self._run_id, run_started_unix_ns=self._started
            )
            self._publisher = Publisher(options, [TABLE], [Shard.whole(TABLE)])
        if self._subscriber is None:
            wanted = SubscriberOptions(service=self._service, consumer=name, replica="probe")
            self._subscriber = Subscriber(wanted, self._echo)
        return self._publisher, self._subscriber

    def _note_failure(self, error: Exception) -> None:
        if not self.status.failure:
            unforeseen = None if isinstance(error, DeltasyncError) else error
            logger.warning(
                "the probe's row did not come back, which is tried again: %s", error, exc_info=unforeseen
            )
        self.status.note_failure(described(error))
        self._disconnect()

    def _disconnect(self) -> None:
        """Both connections begin anew: one may have been ended for good."""
        for each in (self._publisher, self._subscriber):
            if each:
                each.close()
        self._publisher = self._subscriber = None
