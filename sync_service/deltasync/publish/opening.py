"""What a rank says of itself when it opens a stream, checked."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from deltasync.core.errors import InvalidInput
from deltasync.core.limits import Limits
from deltasync.core.names import check_name
from deltasync.core.tables import Shard, TableSpec
from deltasync.core.words import counted
from deltasync.publish.runs import Run
from deltasync.v1 import publish_pb2
from deltasync.wire.messages import shards_from_open, table_from_message

# What takes long of an open, one after the other: the event loop's own threads are for those who are in.
OPENS = ThreadPoolExecutor(1, thread_name_prefix="opens")
MAX_WORLD_SIZE = 65_536
_LONGEST_PROCESS = 200


@dataclass(frozen=True)
class Opening:
    """What a rank says of itself: valid in itself, and not yet compared with what the service holds."""

    message: publish_pb2.PublishOpen
    run: Run
    tables: list[TableSpec]
    shards: list[Shard]


def check_counts(message: publish_pb2.PublishOpen, limits: Limits) -> None:
    """Check that the message that opens a stream is no longer than peers may have it.

    Raises:
        LimitReached: it is.
    """
    limits.check("tables_per_model", len(message.tables))
    limits.check("shards_per_open", len(message.shards))


def check_open(message: publish_pb2.PublishOpen, by: str | None = None) -> Opening:
    """Check the message that opens a stream of a client of the identity `by`.

    Any thread.

    Raises:
        InvalidInput: a field of the message can never be right.
    """
    check_name("model", message.model)
    tables = _checked_tables(message)
    return Opening(message, _checked_run(message, by), tables, shards_from_open(message, tables))


def _checked_run(message: publish_pb2.PublishOpen, by: str | None) -> Run:
    if not 1 <= len(message.run) <= 128:
        raise InvalidInput(f"run id {message.run!r}: use 1 to 128 characters")
    if not 1 <= message.world_size <= MAX_WORLD_SIZE:
        raise InvalidInput(f"world size {message.world_size}: expected 1 to {MAX_WORLD_SIZE}")
    if message.rank >= message.world_size:
        raise InvalidInput(f"rank {message.rank} of a world of {message.world_size}: ranks count from 0")
    if len(message.process) > _LONGEST_PROCESS or not message.process.isprintable():
        raise InvalidInput(f"process: use at most {_LONGEST_PROCESS} printable characters")
    return Run(message.run, message.run_started_unix_ns, message.world_size, message.process, by)


def _checked_tables(message: publish_pb2.PublishOpen) -> list[TableSpec]:
    tables = [table_from_message(table) for table in message.tables]
    if not tables:
        raise InvalidInput("the run announces no tables: describe at least one")
    known: dict[str, TableSpec] = {}
    for table in tables:
        if table.name in known:
            raise InvalidInput(f"table {table.name!r} is announced twice: tables need distinct names")
        known[table.name] = table
    aliases = set[str]()
    for table in tables:
        if table.of:
            _check_map(table, known.get(table.of))
        if twice := next((each for each in table.aliases if each in known or each in aliases), None):
            raise InvalidInput(f"table {table.name!r} is {twice!r}, too, which another table of the run is")
        aliases.update(table.aliases)
    return tables


def _check_map(table: TableSpec, rows: TableSpec | None) -> None:
    """Check that a map, or ranges, are of the rows of an embedding table: one not sharded is a parameter."""
    if rows is None or not rows.kind.trained:
        raise InvalidInput(f"table {table.name!r} is of {table.of!r}, which is no embedding table of the run")
    if rows.rows != table.rows:
        raise InvalidInput(
            f"table {table.name!r} has {counted(table.rows, 'row')}, but {table.of!r}, to which it "
            f"belongs, has {rows.rows}"
        )
