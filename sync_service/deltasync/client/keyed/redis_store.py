"""Hashes of a Redis or Valkey server, read and written in bounded batches and over lost connections."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import redis

from deltasync.core.backoff import backoff
from deltasync.core.errors import Contradiction, DeltasyncError, InvalidInput, ServiceUnavailable, StorageFailed

# Of a command, during which the server serves nobody else; and commands that are sent before answers are read.
_COMMAND_BYTES, _COMMAND_FIELDS, _BATCH_COMMANDS = 1 << 18, 1024, 8
_LONGEST_TEXT = 200

T = TypeVar("T")


class RedisStore:
    """The hashes of one server.

    Attributes:
        where: the server, as errors name it.
    """

    def __init__(self, client: "redis.Redis", retry_seconds: float) -> None:
        """Use a client; for so long a command is tried again where the connection is lost."""
        if client.get_encoder().decode_responses:
            raise InvalidInput("decode_responses: rows are bytes; make the client without it")
        self._client: Any = client
        self._retry_seconds = retry_seconds
        settings = client.connection_pool.connection_kwargs
        self.where = settings.get("path") or f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}"

    def setting(self, name: str) -> str | None:
        """A setting of the server; None where it does not tell."""

        def ask() -> Any:
            try:
                return self._client.config_get(name).get(name)
            except redis.ResponseError:
                return None

        value = self._tried(ask)
        return value.decode() if isinstance(value, bytes) else value

    def fields(self, name: str) -> dict[bytes, bytes]:
        """All fields of a hash, which is a small one."""
        found: dict[bytes, bytes] = self._tried(lambda: self._client.hgetall(name))
        return found

    def get(self, name: str, fields: Sequence[bytes]) -> list[bytes | None]:
        """The values of some fields of a hash, None for those that it has not."""
        found: list[bytes | None] = []
        for batch in _batches(_commands("HMGET", name, fields, 1)):
            for values in self._send(batch):
                found += values
        return found

    def put(self, name: str, fields: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Set some fields of a hash."""
        pairs = [each for pair in zip(fields, values, strict=True) for each in pair]
        for batch in _batches(_commands("HSET", name, pairs, 2)):
            self._send(batch)

    def drop(self, name: str, fields: Sequence[bytes]) -> None:
        """Delete some fields of a hash."""
        for batch in _batches(_commands("HDEL", name, fields, 1)):
            self._send(batch)

    def size(self, name: str) -> int:
        """The number of a hash's fields."""
        found: int = self._tried(partial(self._client.hlen, name))
        return found

    def scan(self, name: str) -> Iterator[dict[bytes, bytes]]:
        """All fields of a hash that are there all along, some several times."""
        cursor = 0
        while True:
            cursor, found = self._tried(partial(self._client.hscan, name, cursor, count=_COMMAND_FIELDS))
            yield found
            if not cursor:
                return

    def remove(self, names: Sequence[str]) -> None:
        """Remove some hashes; the server frees them in the background."""
        if names:
            self._tried(lambda: self._client.unlink(*names))

    def exchange(self, name: str, change: Callable[[dict[bytes, bytes]], Mapping[str, str]]) -> None:
        """Set the fields that `change` makes of all that a small hash holds, unless it changes meanwhile."""

        def do(pipeline: Any) -> None:
            fields = change(pipeline.hgetall(name))
            pipeline.multi()
            pipeline.hset(name, mapping=fields)

        self._tried(lambda: self._client.transaction(do, name))

    def _send(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """The answers to some commands, which may be given twice."""

        def send() -> list[Any]:
            with self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                answers: list[Any] = pipeline.execute()
                return answers

        return self._tried(send)

    def _tried(self, what: Callable[[], T]) -> T:
        """Do it, and again while the server cannot be reached.

        Raises:
            ServiceUnavailable: for too long.
            Contradiction: a key holds something else than a hash.
            StorageFailed: the server refuses.
        """
        deadline = time.monotonic() + self._retry_seconds
        for pause in backoff():
            try:
                return what()
            except (redis.ConnectionError, redis.TimeoutError) as error:
                final = isinstance(error, redis.AuthenticationError)
                if final or time.monotonic() + pause > deadline:
                    raise self._error(error) from error
            except redis.RedisError as error:
                raise self._error(error) from error
            time.sleep(pause)
        raise AssertionError

    def _error(self, error: redis.RedisError) -> DeltasyncError:
        said = f"the store at {self.where} says: {str(error)[:_LONGEST_TEXT]}"
        for kind, result, hint in _HINTS:
            if isinstance(error, kind):
                return result(f"{said}. {hint}")
        if "WRONGTYPE" in str(error):
            return Contradiction(f"{said}. Something else has keys under this prefix: use another one")
        return StorageFailed(f"{said}. Nothing is lost: put that right, and start the subscriber again")


_HINTS: list[tuple[type[redis.RedisError], type[DeltasyncError], str]] = [
    (redis.AuthenticationError, StorageFailed, "Give the client a name and a password that it takes"),
    (redis.exceptions.NoPermissionError, StorageFailed, "Let this user use hashes, UNLINK and WATCH"),
    (redis.exceptions.OutOfMemoryError, StorageFailed, "Give it more memory (maxmemory), or follow fewer tables"),
    (redis.exceptions.ReadOnlyError, StorageFailed, "It is a replica: write to its master"),
    (redis.ConnectionError, ServiceUnavailable, "Nothing is lost: start the subscriber again once it answers"),
    (redis.TimeoutError, ServiceUnavailable, "Nothing is lost: start the subscriber again once it answers"),
]


def _commands(command: str, name: str, arguments: Sequence[bytes], step: int) -> Iterator[list[Any]]:
    """A command on a hash, as often as its arguments are too many for once; they belong together by `step`."""
    start = size = 0
    for end in range(step, len(arguments) + 1, step):
        size += sum(map(len, arguments[end - step : end]))
        if size >= _COMMAND_BYTES or end - start >= step * _COMMAND_FIELDS or end == len(arguments):
            yield [command, name, *arguments[start:end]]
            start, size = end, 0


def _batches(commands: Iterable[list[Any]]) -> Iterator[list[list[Any]]]:
    remaining = iter(commands)
    while batch := list(islice(remaining, _BATCH_COMMANDS)):
        yield batch
