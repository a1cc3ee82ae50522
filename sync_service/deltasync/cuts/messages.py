"""What a rank says in the messages of its stream, checked by itself but not yet compared with the model."""

from collections.abc import Sequence

from deltasync.access.limits import Limits
from deltasync.base.arguments import check_name
from deltasync.base.errors import InvalidInput
from deltasync.base.words import counted
from deltasync.core.seal import check_event_time
from deltasync.core.tables import TableSpec
from deltasync.cuts.admission import Opening, Run
from deltasync.cuts.cut import PartEnd
from deltasync.v1 import publish_pb2
from deltasync.wire.messages import (
    event_time_from_message,
    position_from_message,
    shards_from_open,
    table_from_message,
)

MAX_WORLD_SIZE = 65_536
_LONGEST_PROCESS = 200
# Maximum number of deletes in a close. A rank never gets more at once.
_MOST_DELETES = 131_072


def check_counts(message: publish_pb2.PublishOpen, limits: Limits) -> None:
    """Check the number of tables and shards in an opening message against the limits."""
    limits.check("tables_per_model", len(message.tables))
    limits.check("shards_per_open", len(message.shards))


def check_open(message: publish_pb2.PublishOpen, by: str | None = None) -> Opening:
    """Check the opening message of a stream from a client with identity `by`. Any thread may call it."""
    check_name("model", message.model)
    tables = _checked_tables(message)
    return Opening(
        message.model,
        _checked_run(message, by),
        message.rank,
        tables,
        shards_from_open(message, tables),
        position_from_message(message.continues),
        message.start_over,
        message.takes_deletes,
        message.takes_changes,
    )


def check_close(message: publish_pb2.PartClose, tables: Sequence[TableSpec]) -> PartEnd:
    """Check the end of a part of a rank that announced these tables."""
    if len(message.differing) > len(tables) or len(message.deletes) > _MOST_DELETES:
        numbers = f"{len(message.differing)} tables that differ, and {len(message.deletes)} deletes"
        raise InvalidInput(f"{numbers}: expected at most {len(tables)} and {_MOST_DELETES}")
    if unknown := [index for index in message.differing if index >= len(tables)]:
        raise InvalidInput(f"table {unknown[0]} differs between ranks, but only {len(tables)} were announced")
    event_time = event_time_from_message(message)
    check_event_time(event_time)
    return PartEnd(
        message.step,
        message.rows,
        message.full,
        message.step_end_unix_ns,
        event_time,
        message.gather_ns,
        frozenset(message.deletes),
        frozenset(tables[index].name for index in message.differing),
    )


def _checked_run(message: publish_pb2.PublishOpen, by: str | None) -> Run:
    if not 1 <= len(message.run) <= 128:
        raise InvalidInput(f"run id {message.run!r}: use 1 to 128 characters")
    if not 1 <= message.world_size <= MAX_WORLD_SIZE:
        raise InvalidInput(f"world size {message.world_size}: expected 1 to {MAX_WORLD_SIZE}")
    if message.rank >= message.world_size:
        raise InvalidInput(f"rank {message.rank}: expected 0 to {message.world_size - 1}, below world_size")
    if len(message.process) > _LONGEST_PROCESS or not message.process.isprintable():
        raise InvalidInput(f"process: use at most {_LONGEST_PROCESS} printable characters")
    return Run(message.run, message.run_started_unix_ns, message.world_size, message.process, by)


def _checked_tables(message: publish_pb2.PublishOpen) -> list[TableSpec]:
    tables = [table_from_message(table) for table in message.tables]
    if not tables:
        raise InvalidInput("the run announces no tables: describe at least one")
    by_name: dict[str, TableSpec] = {}
    for table in tables:
        if table.name in by_name:
            raise InvalidInput(f"table {table.name!r} is announced twice: tables need distinct names")
        by_name[table.name] = table
    aliases = set[str]()
    for table in tables:
        if table.of:
            _check_map(table, by_name.get(table.of))
        if twice := next((each for each in table.aliases if each in by_name or each in aliases), None):
            raise InvalidInput(f"table {table.name!r} has the alias {twice!r}, which another table uses")
        aliases.update(table.aliases)
    return tables


def _check_map(table: TableSpec, rows: TableSpec | None) -> None:
    """Check that a map belongs to an embedding table with as many rows."""
    if rows is None or not rows.kind.trained:
        raise InvalidInput(f"table {table.name!r} belongs to {table.of!r}, not an embedding table of the run")
    if rows.rows != table.rows:
        raise InvalidInput(
            f"table {table.name!r} has {counted(table.rows, 'row')}, but {table.of!r}, to which it "
            f"belongs, has {rows.rows}"
        )
