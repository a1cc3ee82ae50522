"""Between the rows that were published after a version and the messages that name them."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from deltasync.core.errors import InvalidInput
from deltasync.core.rows import Ids
from deltasync.core.tables import ID_TYPE
from deltasync.v1 import publish_pb2

# Of one message: 1 MiB of ids; a table's name and index count as so many ids.
MOST_IDS = 131_072
_TABLE_IDS = 4


def changed_to_messages(tables: Sequence[tuple[int, Ids]]) -> Iterator[publish_pb2.ChangedRows]:
    """The messages that name rows (ids [n], ascending) of tables, by index; the last one is marked."""
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
    """The ids ([n] int64) of tables, by index, that a message names.

    Raises:
        InvalidInput: the bytes of some are no ids.
    """
    if any(len(each.ids) % ID_TYPE.itemsize for each in message.tables):
        raise InvalidInput("a message names rows by a number of bytes that is not a multiple of 8")
    return [(each.table, np.frombuffer(each.ids, "<i8").astype(ID_TYPE)) for each in message.tables]


def joined(pieces: Iterable[tuple[int, Ids]]) -> dict[int, Ids]:
    """The ids of tables, by index, that came in pieces, in their order."""
    by_table: dict[int, list[Ids]] = {}
    for table, ids in pieces:
        by_table.setdefault(table, []).append(ids)
    return {table: np.concatenate(several) for table, several in by_table.items()}
