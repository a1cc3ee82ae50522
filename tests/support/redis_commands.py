"""A Redis client that ends its process, really or in simulation, before the n-th command that it sends."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from tests.support.redis_server import RedisServer

from deltasync.client.targets import redis_store


class Killed(BaseException):
    """Simulates SIGKILL inside a process: nothing catches it."""


@contextmanager
def single_commands(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Send every field in a separate command, so that a process can end between any two of them."""
    with patch.context() as patched:
        patched.setattr(redis_store, "_COMMAND_FIELDS", 1)
        patched.setattr(redis_store, "_BATCH_COMMANDS", 1)
        yield


class PlayDead:
    """Raises `Killed`, and sends nothing during the cleanup that follows."""

    def __init__(self) -> None:
        self._dead = False

    def __call__(self) -> None:
        if self._dead:
            raise redis.ConnectionError("this process is dead")
        self._dead = True
        raise Killed


class Sends:
    """A client, with a function to call before or after each send."""

    def __init__(self, server: RedisServer, *, after: bool = False) -> None:
        self.count = 0
        self._then: dict[int, Callable[[], None]] = {}
        self.client = mortal(server.client(), 0, self._next, after=after)

    def do(self, then: dict[int, Callable[[], None]]) -> None:
        """Call a function at the n-th send from now, counted from 0."""
        self._then, self.count = then, 0

    def _next(self) -> None:
        self.count += 1
        self._then.get(self.count - 1, lambda: None)()


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def mortal(client: "redis.Redis", commands: int, die: Callable[[], None], *, after: bool = False) -> "redis.Redis":
    """Let a client die before or after the n-th send."""
    left = [commands]
    pool: Any = client.connection_pool
    base: Any = pool.connection_class

    class Connection(base):  # type: ignore[misc]
        def send_packed_command(self, *arguments: Any, **settings: Any) -> None:
            dies = left[0] <= 0
            left[0] -= 1
            if dies and not after:
                die()
            super().send_packed_command(*arguments, **settings)
            if dies and after:
                die()

    pool.connection_class = Connection
    return client
