"""The probe of a service: a trainer and a replica of its own, over the way that all others take."""

import logging
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np

from deltasync.base.errors import DeltasyncError, InvalidInput, ServiceUnavailable
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
)
from deltasync.service.self_test import PATIENCE_SECONDS, ProbeStatus

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

    `service` says where it is, and with which rights, whenever it connects.

    Attributes:
        status: what it has found.
    """

    def __init__(self, service: Callable[[], Endpoint], seconds: float, status: ProbeStatus) -> None:
        self.status = status
        status.every_seconds = seconds
        # Of an earlier run the service has another number, most probably.
        self._service, self._number = service, secrets.randbelow(_MOST)
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
            raise _late("a row was not sealed", publisher.connection)
        position = sealed.result()
        if not self._wait(lambda: self._echo.holds(self._number), PATIENCE_SECONDS):
            subscriber.check()  # What has ended it is the reason.
            raise _late(f"version {position.number} was not read back", subscriber.connection)
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
                service=self._service(), model=name, run=self._run_id, run_started_unix_ns=self._started
            )
            self._publisher = Publisher(options, [TABLE], [Shard.whole(TABLE)])
        if self._subscriber is None:
            wanted = SubscriberOptions(service=self._service(), consumer=name, replica="probe")
            self._subscriber = Subscriber(wanted, self._echo)
        return self._publisher, self._subscriber

    def _note_failure(self, error: Exception) -> None:
        if not self.status.failure:
            unforeseen = None if isinstance(error, DeltasyncError) else error
            logger.warning(
                "the probe's row did not come back, which is tried again: %s", error, exc_info=unforeseen
            )
        self.status.note_failure(error_text(error))
        self._disconnect()

    def _disconnect(self) -> None:
        """Both connections begin anew: one may have been ended for good."""
        for each in (self._publisher, self._subscriber):
            if each:
                each.close()
        self._publisher = self._subscriber = None


def _late(what: str, connection: Connection) -> ServiceUnavailable:
    why = "" if connection.connected or not connection.last_error else f": {connection.last_error}"
    return ServiceUnavailable(f"{what} in {PATIENCE_SECONDS:.0f} s{why}")


F = TypeVar("F", bound=Callable[..., Any])

# Half of what the alert DeltasyncProbeFails waits for: it would call a slower probe a failing one.
_MOST_SECONDS = 30.0


def probe_options(command: F) -> F:
    """`--probe-seconds` and `--probe-endpoint`."""
    seconds = click.option(
        "--probe-seconds",
        type=click.FloatRange(0.1, _MOST_SECONDS),
        default=None,
        show_default=False,
        help="Publish a row of a table of its own so often (30 at most), and read it back as a replica.",
    )
    endpoint = click.option(
        "--probe-endpoint",
        type=click.Path(dir_okay=False, path_type=Path),
        default=None,
        show_default=False,
        help="TOML file with what the probe shows of itself, as --endpoint of other commands: with TLS or roles.",
    )
    return endpoint(seconds(command))


def take_probe_options(settings: dict[str, Any], *, guarded: bool) -> "Callable[[str, ProbeStatus], Probe] | None":
    """Take what says whether the service probes itself out of a command's settings; None = it does not.

    Raises:
        InvalidInput: the service is `guarded`, by TLS or roles, and nothing says what the probe shows.
    """
    every, file = settings.pop("probe_seconds"), settings.pop("probe_endpoint")
    if every is None:
        return None
    if guarded and file is None:
        raise InvalidInput("--probe-seconds: with TLS or roles the probe needs rights: see --probe-endpoint")
    from deltasync.client import Endpoint

    def begin(address: str, status: ProbeStatus) -> Probe:
        return Probe(lambda: Endpoint.from_file(file) if file else Endpoint(address), every, status)

    return begin
