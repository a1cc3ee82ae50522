"""Connections of publishers and subscribers: their state, silence of the service, and forked processes."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # It has no types.

from deltasync.base.clock import FOREVER_NS, steady_ns
from deltasync.base.decision import Decision
from deltasync.base.errors import DeltasyncError, InvalidInput, ServiceUnavailable
from deltasync.base.waiting import backoff
from deltasync.base.words import counted
from deltasync.core.rows import BLOCK_ROWS
from deltasync.wire.row_messages import MESSAGES_IN_TIME, is_alive

logger = logging.getLogger(__name__)

# Shortest time between log lines about failed attempts: for a new error, for a new outage, and otherwise.
_NEW_ERROR_SECONDS, _NEW_OUTAGE_SECONDS, _SAME_OUTAGE_SECONDS = 10.0, 60.0, 600.0

Response = TypeVar("Response")


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The clock, pauses and sizes of a client. Tests pass other ones.

    Attributes:
        clock: monotonic time in nanoseconds.
        pauses: makes the pauses between attempts to connect, in seconds.
        read_seconds: how long the verification of all rows lasts before the replica applies new releases.
        read_rows: number of rows that a verification reads at once.
        sweeps: whether each release verifies some other rows, too.
    """

    clock: Callable[[], int] = steady_ns
    pauses: Callable[[], Iterator[float]] = backoff
    read_seconds: float = 0.1
    read_rows: int = BLOCK_ROWS
    sweeps: bool = True


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

    def __init__(self, who: str, clock: Callable[[], int]) -> None:
        """`who` names the client in the log; `clock` is that of its `Tuning`."""
        self._who, self._clock = who, clock
        self._lock = threading.Lock()
        self._connected = False
        self._since_ns, self._since_unix_ns = clock(), time.time_ns()
        self._attempts = self._connections = 0
        self._error = ""
        self._logged = "", -FOREVER_NS  # Error and time of the last log line.
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
            if self._connected:
                return
            if self._outage_logged:
                text = "%s is connected again, after %.1f s and %s"
                logger.info(text, self._who, self._seconds, counted(self._attempts, "failed attempt"))
            self._outage_logged = False
            self._connections += 1
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
            logged, at_ns = self._logged
            silent_seconds, new = (self._clock() - at_ns) / 1e9, logged != self._error
            log = should_log(silent_seconds, new_error=new, new_outage=not self._outage_logged)
            if pause is not None and log.yes:
                self._logged, self._outage_logged = (self._error, self._clock()), True
                text = "%s has been disconnected for %.1f s, %s failed, next attempt in %.2f s: %s"
                failed = counted(self._attempts, "attempt")
                logger.warning(text, self._who, self._seconds, failed, pause, self._error)

    @property
    def _seconds(self) -> float:
        return (self._clock() - self._since_ns) / 1e9

    def _set(self, *, connected: bool) -> None:
        if self._connected != connected:
            self._connected, self._attempts = connected, 0
            self._since_ns, self._since_unix_ns = self._clock(), time.time_ns()


def should_log(silent_seconds: float, *, new_error: bool, new_outage: bool) -> Decision:
    """Decide whether to log a failed attempt, by the time since the last log line.

    `new_error`: that line was about another error. `new_outage`: the client has been connected since.
    """
    if new_error and silent_seconds >= _NEW_ERROR_SECONDS:
        return Decision(True, "the error is a new one")
    if new_outage and silent_seconds >= _NEW_OUTAGE_SECONDS:
        return Decision(True, "the outage is a new one")
    if silent_seconds >= _SAME_OUTAGE_SECONDS:
        return Decision(True, "the last line is old")
    return Decision(False, "the last line is recent")


class LiveStream(Generic[Response]):
    """Iterates over a call's responses. Ends the call if the service sends nothing for too long.

    A ping would not show that: a proxy answers it, even if the connection behind the proxy is dead. Silence counts
    only while the caller waits for a response. A thread puts `alive` into the requests, also while the caller is
    busy.
    """

    def __init__(
        self, call: Any, name: str, first_seconds: float, requests: "SimpleQueue[Any]", alive: Any
    ) -> None:
        """Wait `first_seconds` for the first response, which tells how long to wait for others."""
        self._call, self._name, self._requests, self._alive = call, name, requests, alive
        self._seconds = first_seconds
        self._told = self._waiting = self._silent = self._closed = False
        self._received = 0
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="deltasync-silence", daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Response:
        """The next response; ServiceUnavailable if the service is silent, grpc.RpcError if the call has failed."""
        self._waiting = True
        try:
            while is_alive(response := next(self._call)):
                self._received += 1
                if not self._told:
                    self._seconds, self._told = response.alive.within_seconds, True
                    self._changed.set()
        except grpc.RpcError:
            if self._silent:
                text = (
                    f"{self._name} has sent nothing for {self._seconds:.15g} s, so its connection counts as dead"
                )
                raise ServiceUnavailable(f"{text}; this client opens a new one") from None
            raise
        else:
            return response  # type: ignore[no-any-return]  # gRPC has no types
        finally:
            self._received += 1
            self._waiting = False

    def close(self) -> None:
        """End the thread. Cancel the call before."""
        self._closed = True
        self._changed.set()
        self._thread.join()

    def _watch(self) -> None:
        received = missed = 0
        while not self._closed:
            if self._changed.wait(self._seconds / MESSAGES_IN_TIME):
                self._changed.clear()
            else:
                # Count intervals, because after a pause of this whole process a clock would count the pause too.
                silent = self._waiting and self._received == received
                received, missed = self._received, missed + 1 if silent else 0
            if missed > MESSAGES_IN_TIME:
                self._silent = True
                self._call.cancel()
                return
            if self._told and not self._closed:
                self._requests.put(self._alive)


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
        if os.getpid() != self.process:
            raise ServiceUnavailable(self.left)


def note_connecting() -> None:
    """Record that this process opens a channel, if it may: see `check_process`."""
    global _connected_in
    check_process()
    _connected_in = os.getpid()


def check_process() -> None:
    """Check that this process may open a channel."""
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
