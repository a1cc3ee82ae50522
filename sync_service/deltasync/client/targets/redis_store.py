"""Read and write hashes of a Redis server, with retries and a single writer."""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import redis

from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput, ServiceUnavailable, StorageFailed
from deltasync.base.waiting import backoff
from deltasync.client.targets.redis_layout import _LONGEST_TEXT

# Bounds of a command and of a transaction, during which the server serves no other client.
_COMMAND_BYTES, _COMMAND_FIELDS, _BATCH_COMMANDS = 1 << 18, 1024, 2
T = TypeVar("T")


class RedisStore:
    """The hashes of one server."""

    def __init__(self, client: "redis.Redis", retry_seconds: float) -> None:
        """Use a client. Commands are retried for `retry_seconds` while the connection is lost."""
        self._client: Any = client
        self._retry_seconds = retry_seconds
        self._place = place_of(client)

    def setting(self, name: str) -> str | None:
        """A setting of the server; None if the server does not reveal it."""

        def ask() -> Any:
            try:
                return self._client.config_get(name).get(name)
            except redis.ResponseError:
                return None

        value = self._tried(ask)
        return value.decode() if isinstance(value, bytes) else value

    def fields(self, name: str) -> dict[bytes, bytes]:
        """All fields of a small hash."""
        fields: dict[bytes, bytes] = self._tried(lambda: self._client.hgetall(name))
        return fields

    def get(self, name: str, fields: Sequence[bytes]) -> list[bytes | None]:
        """The values of fields of a hash, None for missing fields."""
        values: list[bytes | None] = []
        for batch in _batches(_commands("HMGET", name, fields, 1)):
            for answer in self._send(batch):
                values += answer
        return values

    def size(self, name: str) -> int:
        """The number of a hash's fields."""
        size: int = self._tried(partial(self._client.hlen, name))
        return size

    def scan(self, name: str) -> Iterator[dict[bytes, bytes]]:
        """Iterate over the fields of a hash. Fields may repeat; changes meanwhile may be missed."""
        cursor = 0
        while True:
            cursor, fields = self._tried(partial(self._client.hscan, name, cursor, count=_COMMAND_FIELDS))
            yield fields
            if not cursor:
                return

    def _send(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands, which must be safe to repeat; return the answers."""

        def send() -> list[Any]:
            with self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                answers: list[Any] = pipeline.execute()
                return answers

        return self._tried(send)

    def _tried(self, what: Callable[[], T]) -> T:
        """Call a function, and repeat it for `retry_seconds` while the server cannot be reached."""
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
        text = str(error).rpartition("caused error: ")[2][:_LONGEST_TEXT]  # Cut off the command.
        reported = f"the store at {self._place} reports: {text}"
        for kind, result, hint in _HINTS:
            if isinstance(error, kind):
                return result(f"{reported}. {hint}")
        if "WRONGTYPE" in str(error):
            return Contradiction(f"{reported}. Another program has keys under this prefix: use another prefix")
        return StorageFailed(f"{reported}. No rows are lost: solve the problem, and restart the subscriber")


class RedisWriter(RedisStore):
    """The hashes of one server, with exclusive write access.

    Every transaction also updates the writer's id and its number of changes in the hash `meta`. It fails if there
    is another writer, or if the server has lost changes because it restarted or a lagging replica took over.
    """

    def __init__(self, client: "redis.Redis", retry_seconds: float, meta: str, where: str) -> None:
        """Become the writer with the first `exchange`. `meta` is the hash, `where` the store's name in errors."""
        super().__init__(client, retry_seconds)
        self._meta, self._where = meta, where
        self._id, self._changes = uuid.uuid4().hex, 0

    def put(self, name: str, fields: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Set fields of a hash."""
        pairs = [each for pair in zip(fields, values, strict=True) for each in pair]
        for batch in _batches(_commands("HSET", name, pairs, 2)):
            self.exchange(lambda _: {}, batch)

    def drop(self, name: str, fields: Sequence[bytes]) -> None:
        """Delete fields of a hash."""
        for batch in _batches(_commands("HDEL", name, fields, 1)):
            self.exchange(lambda _: {}, batch)

    def exchange(
        self,
        change: Callable[[dict[bytes, bytes]], Mapping[str, str]],
        commands: Sequence[Sequence[Any]] = (),
    ) -> None:
        """Update the hash `meta` and run commands in one transaction, which may be retried.

        `change` returns the fields to set, from all current fields of `meta`. Another writer or lost changes are a
        Contradiction.
        """
        number = self._changes + 1

        def do(pipeline: Any) -> None:
            current = pipeline.hgetall(self._meta)
            self._check_writer(current)
            fields = {**change(current), "writer": self._id, "changes": number}
            self._check_changes(current)
            pipeline.multi()
            for command in commands:
                pipeline.execute_command(*command)
            pipeline.hset(self._meta, mapping=fields)

        self._tried(lambda: self._client.transaction(do, self._meta))
        self._changes = number

    def _check_writer(self, meta: Mapping[bytes, bytes]) -> None:
        if self._changes and meta.get(b"writer") != self._id.encode():
            what = "changed by another target" if meta else "emptied"
            raise Contradiction(
                f"{self._where} was {what} while this target writes to it: run only one target, and restart it "
                "with held=target.position"
            )

    def _check_changes(self, meta: Mapping[bytes, bytes]) -> None:
        stored, made = int(meta.get(b"changes", 0)), self._changes
        if made and stored not in (made, made + 1):  # The answer to the last change may have been lost.
            raise Contradiction(
                f"{self._where} has lost changes: it has {stored} of the {made} changes of this target. Was it "
                "restarted, or did a replica take over? Restart the target with held=target.position"
            )


_HINTS: list[tuple[type[redis.RedisError], type[DeltasyncError], str]] = [
    (redis.AuthenticationError, StorageFailed, "Check the user name and the password of the client"),
    (redis.exceptions.NoPermissionError, StorageFailed, "Allow this user hashes, UNLINK and transactions"),
    (redis.exceptions.OutOfMemoryError, StorageFailed, "Raise its maxmemory, or follow fewer tables"),
    (redis.exceptions.ReadOnlyError, StorageFailed, "It is a replica: write to its master"),
    (redis.ConnectionError, ServiceUnavailable, "No rows are lost: restart the subscriber when it answers again"),
    (redis.TimeoutError, ServiceUnavailable, "No rows are lost: restart the subscriber when it answers again"),
]


def _commands(command: str, name: str, arguments: Sequence[bytes], step: int) -> Iterator[list[Any]]:
    """Split a command on a hash into several if it has too many arguments, in groups of `step`."""
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


def place_of(client: "redis.Redis") -> str:
    """The name of a client's server in errors; an InvalidInput if the client cannot be used."""
    if not isinstance(client, redis.Redis):
        kind = f"{type(client).__module__}.{type(client).__qualname__}"
        raise InvalidInput(f"client: a {kind}, expected a redis.Redis of one server, without cluster and asyncio")
    if client.get_encoder().decode_responses:
        raise InvalidInput("client: decode_responses is set, but rows are bytes; create the client without it")
    pool: Any = client.connection_pool
    settings = pool.connection_kwargs
    host = (
        getattr(pool, "service_name", None) or f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}"
    )
    place, database = settings.get("path") or host, settings.get("db")
    return f"{place}, database {database}" if database else place
