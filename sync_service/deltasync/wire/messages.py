"""Convert tables, positions and row ids to and from messages."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from deltasync.base.errors import InvalidInput
from deltasync.base.words import counted
from deltasync.core.position import Position
from deltasync.core.rows import Ids
from deltasync.core.table_form import Mode, TableForm
from deltasync.core.tables import ID_TYPE, STATE_TYPES, Numbered, Shard, TableKind, TableSpec, sizes_of
from deltasync.core.value_types import ValueType
from deltasync.v1 import publish_pb2, subscribe_pb2, tables_pb2

N = TypeVar("N", bound=Numbered)

# The value types of tables. Some of them are also types in which values are sent.
_DTYPES: dict[int, np.dtype[np.generic]] = dict(zip((1, 2, 5, 6, 7, 8, 9, 10), STATE_TYPES, strict=True))
_DTYPE_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}


def table_from_message(message: tables_pb2.Table) -> TableSpec:
    """Read a table from a message."""
    if message.value_type not in _DTYPES:
        dtypes = ", ".join(f"{number} ({dtype})" for number, dtype in _DTYPES.items())
        raise InvalidInput(f"table {message.name!r}: value type {message.value_type}, expected one of {dtypes}")
    kind = _member(TableKind, message.kind, f"table {message.name!r}: kind")
    sizes = sizes_of(message.shape.sizes) if message.HasField("shape") else None
    table = TableSpec(
        message.name,
        message.rows,
        message.dim,
        _DTYPES[message.value_type],
        kind,
        message.of,
        sizes,
        tuple(message.aliases),
    )
    if sizes is not None and table.shape != tuple(message.shape.sizes):
        raise InvalidInput(
            f"table {message.name!r}: {message.rows} x {message.dim} values do not fit the shape "
            f"{list(message.shape.sizes)}"
        )
    return table


def table_to_message(table: TableSpec) -> tables_pb2.Table:
    """Write a table to a message."""
    number: Any = _DTYPE_NUMBERS[table.dtype]
    return tables_pb2.Table(
        name=table.name,
        rows=table.rows,
        dim=table.dim,
        value_type=number,
        kind=table.kind.number,
        of=table.of,
        shape=None if table.shape is None else tables_pb2.Shape(sizes=table.shape),
        aliases=table.aliases,
    )


def mode_from_message(number: int) -> Mode:
    """Read a mode from its number on the wire; 0 is the default."""
    return _member(Mode, number, "mode") if number else Mode.EMBEDDINGS


def mode_to_message(mode: Mode) -> Any:
    """The number of a mode on the wire."""
    return mode.number


def _member(kind: type[N], number: int, words: str) -> N:
    member = kind.of_number(number)
    if not member:
        raise InvalidInput(f"{words} {number}: expected one of {', '.join(each.value for each in kind)}")
    return member


def form_from_message(message: tables_pb2.Table, mode: Mode) -> TableForm:
    """Read the form in which a subscriber gets a table."""
    own = replace(TableForm.unchanged(table_from_message(message)), mode=mode)
    if own.value_type is None or message.sent_as in (0, message.value_type):
        return own
    return replace(own, value_type=_member(ValueType, message.sent_as, "value type"))


def form_to_message(form: TableForm) -> tables_pb2.Table:
    """Write the form in which a subscriber gets a table."""
    message = table_to_message(form.spec)
    message.sent_as = form.value_type.number if form.value_type else message.value_type
    return message


def checksums_to_message(checksums: Mapping[int, int]) -> list[tables_pb2.Checksum]:
    """Write checksums of tables, by slot, to messages."""
    return [tables_pb2.Checksum(slot=slot, sum=checksum) for slot, checksum in checksums.items()]


def shards_from_open(message: publish_pb2.PublishOpen, tables: list[TableSpec]) -> list[Shard]:
    """Read the shards of a rank."""
    for number, shard in enumerate(message.shards):
        if shard.table >= len(tables):
            raise InvalidInput(
                f"shard {number} has table index {shard.table}, the message has {counted(len(tables), 'table')}"
            )
    return [Shard(tables[s.table], s.row_offset, s.rows, s.col_offset, s.cols) for s in message.shards]


def shard_to_message(shard: Shard, tables: list[TableSpec]) -> publish_pb2.Shard:
    """Write a shard to a message."""
    return publish_pb2.Shard(
        table=tables.index(shard.table),
        row_offset=shard.row_offset,
        rows=shard.rows,
        col_offset=shard.col_offset,
        cols=shard.cols,
    )


def event_time_from_message(
    message: publish_pb2.PartClose | subscribe_pb2.ReleaseEnd | subscribe_pb2.Progress,
) -> int | None:
    """The event time in a message, nanoseconds since 1970; None if there is none."""
    return message.event_time_unix_ns or None


def position_from_message(message: tables_pb2.Position) -> Position:
    """Read a position from a message."""
    return Position(message.history, message.version, message.seal)


def position_to_message(position: Position) -> tables_pb2.Position:
    """Write a position to a message."""
    return tables_pb2.Position(history=position.history, version=position.number, seal=position.seal)


# Limit of ids in one message, 1 MiB. Each table in it counts as 4 more ids.
MOST_IDS = 131_072
_TABLE_IDS = 4


def changed_to_messages(tables: Sequence[tuple[int, Ids]]) -> Iterator[publish_pb2.ChangedRows]:
    """Write row ids ([n], ascending) by index of their table to messages. The last message is marked."""
    message, room = publish_pb2.ChangedRows(), MOST_IDS
    for table, ids in tables:
        at = 0
        while at < len(ids):
            if room <= _TABLE_IDS:
                yield message
                message, room = publish_pb2.ChangedRows(), MOST_IDS
            piece = ids[at : at + room - _TABLE_IDS]
            message.tables.add(table=table, ids=piece.astype("<i8").tobytes())
            at, room = at + len(piece), room - len(piece) - _TABLE_IDS
    message.last = True
    yield message


def changed_from_message(message: publish_pb2.ChangedRows) -> list[tuple[int, Ids]]:
    """Read ids of rows ([n] int64) with the index of their table from a message."""
    if any(len(each.ids) % ID_TYPE.itemsize for each in message.tables):
        raise InvalidInput("ids of a ChangedRows message: expected a multiple of 8 bytes")
    return [(each.table, np.frombuffer(each.ids, "<i8").astype(ID_TYPE)) for each in message.tables]


def joined(pieces: Iterable[tuple[int, Ids]]) -> dict[int, Ids]:
    """Join pieces of ids by the index of their table, in order."""
    by_table: dict[int, list[Ids]] = {}
    for table, ids in pieces:
        by_table.setdefault(table, []).append(ids)
    return {table: np.concatenate(several) for table, several in by_table.items()}
