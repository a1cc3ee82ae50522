"""A Redis client that ends its process, in earnest or in play, before the n-th thing that it sends."""

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
    """What stands for SIGKILL inside of a process: nothing catches it."""


@contextmanager
def single_commands(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every field is written by a command of its own, which is sent alone: a process can end between any two."""
    with patch.context() as patched:
        patched.setattr(redis_store, "_COMMAND_FIELDS", 1)
        patched.setattr(redis_store, "_BATCH_COMMANDS", 1)
        yield


class PlayDead:
    """Raises `Killed`, and lets nothing be sent by what is cleaned up then."""

    def __init__(self) -> None:
        self._dead = False

    def __call__(self) -> None:
        if self._dead:
            raise redis.ConnectionError("this process is dead")
        self._dead = True
        raise Killed


class Sends:
    """A client, and what happens before each time that it sends, or after."""

    def __init__(self, server: RedisServer, *, after: bool = False) -> None:
        self.count = 0
        self._then: dict[int, Callable[[], None]] = {}
        self.client = mortal(server.client(), 0, self._next, after=after)

    def do(self, then: dict[int, Callable[[], None]]) -> None:
        """From now on, do something at the n-th time, counted from 0."""
        self._then, self.count = then, 0

    def _next(self) -> None:
        self.count += 1
        self._then.get(self.count - 1, lambda: None)()


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def mortal(client: "redis.Redis", commands: int, die: Callable[[], None], *, after: bool = False) -> "redis.Redis":
    """Let a client send so many times, and then die, before each time that it sends, or after."""
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
