"""How a model lies in Redis, and the connection that reads and writes it there."""

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

# Of a command, and of commands that take effect together: the server serves nobody else meanwhile.
_COMMAND_BYTES, _COMMAND_FIELDS, _BATCH_COMMANDS = 1 << 18, 1024, 2
T = TypeVar("T")


class RedisStore:
    """The hashes of one server."""

    def __init__(self, client: "redis.Redis", retry_seconds: float) -> None:
        """Use a client; for so long a command is tried again where the connection is lost."""
        self._client: Any = client
        self._retry_seconds = retry_seconds
        self._place = place_of(client)

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
        text = str(error).rpartition("caused error: ")[2][
            :_LONGEST_TEXT
        ]  # Before it the client names the command.
        said = f"the store at {self._place} says: {text}"
        for kind, result, hint in _HINTS:
            if isinstance(error, kind):
                return result(f"{said}. {hint}")
        if "WRONGTYPE" in str(error):
            return Contradiction(f"{said}. Something else has keys under this prefix: use another one")
        return StorageFailed(f"{said}. Nothing is lost: put that right, and start the subscriber again")


class RedisWriter(RedisStore):
    """The hashes of one server, and the right to change them, which one writer has.

    Every change is made together with one of a hash that says who has made it, and how many: if another writer has
    come, or the server has lost some of them (it was restarted, or a replica that lags took over), none is made.
    """

    def __init__(self, client: "redis.Redis", retry_seconds: float, meta: str, where: str) -> None:
        """Take the right over with the first `exchange`; `meta` is the hash, `where` names the store in errors."""
        super().__init__(client, retry_seconds)
        self._meta, self._where = meta, where
        self._id, self._changes = uuid.uuid4().hex, 0

    def put(self, name: str, fields: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Set some fields of a hash."""
        pairs = [each for pair in zip(fields, values, strict=True) for each in pair]
        for batch in _batches(_commands("HSET", name, pairs, 2)):
            self.exchange(lambda _: {}, batch)

    def drop(self, name: str, fields: Sequence[bytes]) -> None:
        """Delete some fields of a hash."""
        for batch in _batches(_commands("HDEL", name, fields, 1)):
            self.exchange(lambda _: {}, batch)

    def exchange(
        self,
        change: Callable[[dict[bytes, bytes]], Mapping[str, str]],
        commands: Sequence[Sequence[Any]] = (),
    ) -> None:
        """Set the fields that `change` makes of all that the hash `meta` holds, and at once give some commands.

        Both may be done several times.

        Raises:
            Contradiction: somebody else has written, or the server has lost what was written before.
        """
        number = self._changes + 1

        def do(pipeline: Any) -> None:
            found = pipeline.hgetall(self._meta)
            self._check_writer(found)
            fields = {**change(found), "writer": self._id, "changes": number}
            self._check_changes(found)
            pipeline.multi()
            for command in commands:
                pipeline.execute_command(*command)
            pipeline.hset(self._meta, mapping=fields)

        self._tried(lambda: self._client.transaction(do, self._meta))
        self._changes = number

    def _check_writer(self, found: Mapping[bytes, bytes]) -> None:
        if self._changes and found.get(b"writer") != self._id.encode():
            what = "taken over by another target" if found else "emptied"
            raise Contradiction(
                f"{self._where} was {what} while this one writes there: let one target write, and start it again "
                "from what the store then holds"
            )

    def _check_changes(self, found: Mapping[bytes, bytes]) -> None:
        told, made = int(found.get(b"changes", 0)), self._changes
        if made and told not in (made, made + 1):  # The answer to the last one may have been lost.
            raise Contradiction(
                f"{self._where} has lost changes: it tells of {told} by this target, which has made {made}. "
                "Was it restarted, or has a replica taken over? Start the target again from what it holds"
            )


_HINTS: list[tuple[type[redis.RedisError], type[DeltasyncError], str]] = [
    (redis.AuthenticationError, StorageFailed, "Give the client a name and a password that it takes"),
    (redis.exceptions.NoPermissionError, StorageFailed, "Let this user use hashes, UNLINK and transactions"),
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


def place_of(client: "redis.Redis") -> str:
    """The server of a client, as errors name it.

    Raises:
        InvalidInput: the client is of another kind, or decodes what it reads.
    """
    if not isinstance(client, redis.Redis):
        kind = f"{type(client).__module__}.{type(client).__qualname__}"
        raise InvalidInput(f"client: a {kind}, expected a redis.Redis: of one server, and not of asyncio")
    if client.get_encoder().decode_responses:
        raise InvalidInput("decode_responses: rows are bytes; make the client without it")
    pool: Any = client.connection_pool
    settings = pool.connection_kwargs
    host = (
        getattr(pool, "service_name", None) or f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}"
    )
    place, database = settings.get("path") or host, settings.get("db")
    return f"{place}, database {database}" if database else place
