"""The connection state of publishers and subscribers, and checks for forked processes."""

import logging
import os
import sys
import threading
import time
from dataclasses import dataclass, field

from grpc._cython import cygrpc  # type: ignore[attr-defined]  # It has no types.

from deltasync.base.clock import steady_ns
from deltasync.base.decision import Decision
from deltasync.base.errors import DeltasyncError, InvalidInput, ServiceUnavailable
from deltasync.base.words import counted

logger = logging.getLogger(__name__)

# Shortest time between log lines about failed attempts: for a new error, for a new outage, and otherwise.
_NEW_ERROR_SECONDS, _NEW_OUTAGE_SECONDS, _SAME_OUTAGE_SECONDS = 10.0, 60.0, 600.0


@dataclass(frozen=True)
class Connection:
    """The state of the connection to the service.

    The client notices within 30 seconds that the service has vanished, also behind a proxy that is still there.

    Attributes:
        connected: whether the service has answered on a stream that is still open.
        since_unix_ns: time of the last change of `connected`, nanoseconds since 1970.
        seconds: time since then, by a monotonic clock.
        attempts: number of failed attempts since then; 0 while connected.
        last_error: the last error, also after a reconnect; empty if there was none.
        connections: number of connections so far.
    """

    connected: bool
    since_unix_ns: int
    seconds: float
    attempts: int
    last_error: str
    connections: int = 0

    def __str__(self) -> str:
        if self.connected:
            return f"connected for {self.seconds:.1f} s"
        error = f", last error: {self.last_error}" if self.last_error else ""
        return f"not connected for {self.seconds:.1f} s, {counted(self.attempts, 'attempt')} failed{error}"


class Connectivity:
    """Tracks and logs the connections of one client. Safe to use from any thread."""

    def __init__(self, who: str) -> None:
        """`who` names the client in the log."""
        self._who = who
        self._lock = threading.Lock()
        self._connected = False
        self._since_ns, self._since_unix_ns = steady_ns(), time.time_ns()
        self._attempts = self._connections = 0
        self._error = ""
        self._logged: tuple[str, int] | None = None  # Error and time of the last log line.
        self._outage_logged = False  # Whether the current outage has been logged.

    @property
    def now(self) -> Connection:
        """The current state."""
        with self._lock:
            since = self._since_unix_ns, self._seconds
            return Connection(self._connected, *since, self._attempts, self._error, self._connections)

    def forked(self, why: str) -> Connection:
        """The state in a forked child. Uses no lock: a parent's thread may have locked it during the fork."""
        return Connection(False, self._since_unix_ns, self._seconds, 0, why, self._connections)

    def note_connected(self) -> None:
        """Record that the service has answered."""
        with self._lock:
            if self._outage_logged:
                text = "%s is connected again, after %.1f s and %s"
                logger.info(text, self._who, self._seconds, counted(self._attempts, "failed attempt"))
            self._outage_logged = False
            self._set(connected=True)

    def note_lost(self, error: DeltasyncError) -> None:
        """Record the end of the stream, before a new attempt."""
        with self._lock:
            self._set(connected=False)
            self._error = str(error)

    def note_failed(self, error: Exception, pause: float | None) -> None:
        """Record a failed attempt. The next one follows after `pause` seconds; None = there is none."""
        with self._lock:
            self._set(connected=False)
            self._attempts, self._error = self._attempts + 1, str(error)
            if pause is not None and self._should_log():
                self._logged, self._outage_logged = (self._error, steady_ns()), True
                text = "%s has been disconnected for %.1f s, %s failed, next attempt in %.2f s: %s"
                failed = counted(self._attempts, "attempt")
                logger.warning(text, self._who, self._seconds, failed, pause, self._error)

    @property
    def _seconds(self) -> float:
        return (steady_ns() - self._since_ns) / 1e9

    def _should_log(self) -> bool:
        if self._logged is None:
            return True
        error, at_ns = self._logged
        seconds = (steady_ns() - at_ns) / 1e9
        return should_log(seconds, new_error=error != self._error, new_outage=not self._outage_logged).yes

    def _set(self, *, connected: bool) -> None:
        if self._connected != connected:
            self._connected, self._attempts = connected, 0
            self._connections += connected
            self._since_ns, self._since_unix_ns = steady_ns(), time.time_ns()


def should_log(silent_seconds: float, *, new_error: bool, new_outage: bool) -> Decision:
    """Decide whether to log a failed attempt.

    Args:
        silent_seconds: time since the last log line.
        new_error: whether that line was about another error.
        new_outage: whether the client has been connected since that line.
    """
    if new_error and silent_seconds >= _NEW_ERROR_SECONDS:
        return Decision(True, "the error is a new one")
    if new_outage and silent_seconds >= _NEW_OUTAGE_SECONDS:
        return Decision(True, "the outage is a new one")
    if silent_seconds >= _SAME_OUTAGE_SECONDS:
        return Decision(True, "the last line is old")
    return Decision(False, "the last line is recent")


_connected_in: int | None = None  # The process that opened this library's first channel.


@dataclass(frozen=True)
class ForkGuard:
    """The process that made an object. The object works only there.

    Attributes:
        what: the object's name in errors.
        process: the id of the process.
    """

    what: str
    process: int = field(default_factory=os.getpid)

    @property
    def left(self) -> str:
        """Why the object does not work here; empty in the process that made it."""
        if (here := os.getpid()) == self.process:
            return ""
        return (
            f"{self.what} belongs to process {self.process}, and this process {here} was forked from it: make a "
            "new one here, after the fork"
        )

    def check(self) -> None:
        """Raise ServiceUnavailable in a process that was forked from the one that made it."""
        if left := self.left:
            raise ServiceUnavailable(left)


def note_connecting() -> None:
    """Record that this process opens a channel.

    Raises:
        ServiceUnavailable, InvalidInput: as `check_process`.
    """
    global _connected_in
    check_process()
    _connected_in = os.getpid()


def check_process() -> None:
    """Check that this process may open a channel.

    Raises:
        ServiceUnavailable: it was forked from a connected process; gRPC would hang or crash here.
        InvalidInput: gevent has replaced its threads, but not those of gRPC; every greenlet would stand still.
    """
    gevent = sys.modules.get("gevent.monkey")  # Not imported here: without it nothing is replaced.
    # Another version of gRPC may not tell.
    if gevent and gevent.is_module_patched("threading") and not getattr(cygrpc, "g_gevent_activated", True):
        raise InvalidInput(
            "gevent has patched this process, but not gRPC, which would block all greenlets: call "
            "grpc.experimental.gevent.init_gevent() after monkey.patch_all(), before you connect"
        )
    here = os.getpid()
    if _connected_in not in (None, here):
        raise ServiceUnavailable(
            f"process {here} was forked from process {_connected_in} after that had connected, and gRPC does not "
            "work in such a process: connect only after the fork, or start processes with 'spawn' or 'forkserver'"
        )
