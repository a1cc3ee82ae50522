"""How a model lies in Redis, and the connection that reads and writes it there."""

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import redis

from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput, ServiceUnavailable, StorageFailed
from deltasync.base.waiting import backoff
from deltasync.client.targets.target import Release
from deltasync.core.delivery import HeldSpec
from deltasync.core.position import Position
from deltasync.core.rows import Ids, Values
from deltasync.core.tables import TableSpec

FORMAT = 1
# Of a command, and of commands that take effect together: the server serves nobody else meanwhile.
_COMMAND_BYTES, _COMMAND_FIELDS, _BATCH_COMMANDS = 1 << 18, 1024, 2
_LONGEST_TEXT = 200
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


@dataclass(frozen=True)
class Names:
    """The names of the keys under a prefix."""

    prefix: str

    @property
    def meta(self) -> str:
        """The hash that says what the others are."""
        return f"{self.prefix}:meta"

    def rows(self, table: str) -> str:
        """The hash of a table's rows: by raw id where it has a map, else by row number."""
        return f"{self.prefix}:rows:{table}"

    def free(self, table: str) -> str:
        """The hash of the rows of a table with a map that no raw id has, by row number."""
        return f"{self.prefix}:free:{table}"


@dataclass(frozen=True)
class Meta:
    """What the hash `meta` says: strings by field.

    Attributes:
        model: the model's name.
        position: the one to go on from; an empty one while everything is written anew.
        version: what all rows are of, or newer; with its step and times as `Release` has them, None before any.
        tables: those that the store has rows of.
        writing: the version that is being written, 0 while none is: until it is there, rows are of both.
    """

    model: str
    tables: "tuple[StoredTable, ...]"
    position: Position = field(default_factory=Position)
    version: int = 0
    step: int | None = None
    step_end_unix_ns: int | None = None
    event_time_unix_ns: int | None = None
    writing: int = 0

    def begun(self, release: Release, tables: "tuple[StoredTable, ...]") -> "Meta":
        """The same while a release is written."""
        known = {table.name: table for table in (*self.tables, *tables)}
        told = self
        if release.resync:  # Another consumer's, say: if it is cut off, nothing else can go on from there.
            older = release.version < self.version
            told = replace(self.after(release, tables) if older else self, position=Position())
        return replace(told, tables=tuple(known.values()), writing=release.version)

    def after(self, release: Release, tables: "tuple[StoredTable, ...]") -> "Meta":
        """The same once a release is there."""
        return replace(
            self,
            tables=tables,
            position=release.position,
            version=release.version,
            step=release.step,
            step_end_unix_ns=release.step_end_unix_ns,
            event_time_unix_ns=release.event_time_unix_ns,
            writing=0,
        )

    def fields(self) -> dict[str, str]:
        """As they are written: what is not known is empty."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return {
            "format": str(FORMAT),
            "model": self.model,
            "history": self.position.history,
            "number": str(self.position.number),
            "seal": str(self.position.seal),
            "tables": json.dumps([asdict(table) for table in self.tables]),
            **{name: "" if value is None else str(value) for name, value in numbers.items()},
        }

    @classmethod
    def of_fields(cls, found: Mapping[bytes, bytes], where: str) -> "Meta | None":
        """What a hash says; None where it is empty.

        Raises:
            Contradiction: it is of another format, or is no such hash.
        """
        if not found:
            return None
        fields = {name.decode(): value.decode() for name, value in found.items()}
        if fields.get("format") != str(FORMAT):
            raise Contradiction(
                f"{where} has rows of format {fields.get('format')!r}, this version of deltasync writes and reads "
                f"{FORMAT}: update deltasync, or use another prefix"
            )
        try:
            return cls._parsed(fields)
        except (KeyError, TypeError, ValueError) as error:
            text = f"{where}: its meta cannot be read ({error!r}): delete the keys of this prefix, or use another"
            raise Contradiction(text) from error

    @classmethod
    def _parsed(cls, fields: Mapping[str, str]) -> "Meta":
        numbers: dict[str, Any] = {name: int(fields[name]) if fields[name] else None for name in _NUMBERS}
        tables = tuple(StoredTable(**table) for table in json.loads(fields["tables"]))
        position = Position(fields["history"], int(fields["number"]), int(fields["seal"]))
        return cls(fields["model"], tables, position, **numbers)


_NUMBERS = ("version", "step", "step_end_unix_ns", "event_time_unix_ns", "writing")


@dataclass(frozen=True)
class StoredTable:
    """A table of the store.

    Attributes:
        rows: how many rows the model has of it; of them, those that never were or are deleted are not there.
        dim: values of a row.
        dtype: their type, as NumPy writes it.
        tbe_bits: 8 or 4 where they are the bytes of an inference TBE: codes of so many bits, then scale and bias
            (fp16 each); else 0.
        kind: as `TableKind` has it.
        of: the table that a map or ranges belong to.
        mapped: whether rows are named by raw ids.
    """

    name: str
    rows: int
    dim: int
    dtype: str
    tbe_bits: int
    kind: str
    of: str
    mapped: bool

    @classmethod
    def of_spec(cls, table: TableSpec, *, mapped: bool) -> "StoredTable":
        """The same of a table of a release."""
        tbe_bits = (table.value_type.tbe_bits or 0) if isinstance(table, HeldSpec) else 0
        return cls(
            table.name, table.rows, table.dim, table.dtype.str, tbe_bits, table.kind.value, table.of, mapped
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.dim * np.dtype(self.dtype).itemsize

    def values(self, rows: list[bytes | None]) -> Values:
        """Rows as they lie in the store, as [n, dim]; zeros for None."""
        nothing = bytes(self.row_bytes)
        joined = bytearray().join(
            nothing if row is None else row for row in rows
        )  # What is made of it is writable.
        return np.frombuffer(joined, self.dtype).reshape(len(rows), self.dim)

    def lies_as(self, other: "StoredTable") -> bool:
        """Whether rows of both are named and read alike."""
        return replace(self, rows=other.rows) == other

    def __str__(self) -> str:
        """What readers of its rows rely on."""
        named = "raw id" if self.mapped else "row number"
        coding = f" (int{self.tbe_bits} of a TBE)" if self.tbe_bits else ""
        return f"{self.kind}, {self.dim} values of {np.dtype(self.dtype)}{coding} by {named}"


def key_fields(keys: Ids) -> list[bytes]:
    """Keys as the names of fields: 8 bytes each, little-endian."""
    fields: list[bytes] = np.ascontiguousarray(keys, "<i8").view("V8").tolist()
    return fields


def keys_of(fields: Iterable[bytes]) -> Ids:
    """The keys that the names of some fields are."""
    return np.frombuffer(b"".join(fields), "<i8")


def row_values(values: Values) -> list[bytes]:
    """Rows ([n, dim]) as the values of fields: their bytes, little-endian, without padding."""
    rows: list[bytes] = np.ascontiguousarray(values).view(f"V{values.shape[1] * values.itemsize}").ravel().tolist()
    return rows
