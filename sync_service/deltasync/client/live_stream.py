"""The responses of a stream, until the service falls silent."""

import threading
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import grpc

from deltasync.base.errors import ServiceUnavailable
from deltasync.wire.row_messages import MESSAGES_IN_TIME, is_alive

Response = TypeVar("Response")


class LiveStream(Generic[Response]):
    """Iterates over a call's responses. Ends the call if the service sends nothing for too long.

    A ping would not show that: a proxy answers it, even if the connection behind the proxy is dead. Silence counts
    only while the caller waits for a response. A thread tells the service that this client lives, also while the
    caller is busy.
    """

    def __init__(self, call: Any, name: str, first_seconds: float, say_alive: Callable[[], None]) -> None:
        """Start the thread.

        Args:
            call: the call.
            name: the name of the service in errors.
            first_seconds: how long to wait for the first response, which tells how long to wait for others.
            say_alive: sends an `Alive`.
        """
        self._call, self._name, self._say_alive = call, name, say_alive
        self._seconds = first_seconds
        self._told = self._waiting = self._silent = self._closed = False
        self._received = 0
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="deltasync-silence", daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Response:
        """The next response.

        Raises:
            ServiceUnavailable: the service is silent.
            grpc.RpcError: the call has failed.
        """
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
                self._say_alive()
