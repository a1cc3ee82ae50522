"""Rows of an array by their numbers, read and written."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from deltasync.core.errors import Contradiction
from deltasync.core.rows import BLOCK_ROWS, Ids, Values
from deltasync.kernels.rows import gather, scatter

Bytes = NDArray[np.uint8]


def check_fit(rows: int, row_bytes: int, ids: Ids, values: Values) -> None:
    """Check that memory of so many rows of so many bytes can take `values` ([n, D]) as its rows `ids` ([n]).

    Raises:
        Contradiction: it has no such rows, or wider or narrower ones.
    """
    given = values.shape[1] * values.itemsize
    if given != row_bytes or not _within(rows, ids):
        ids_text = f"ids {ids.min()} to {ids.max()}" if len(ids) else "no ids"
        raise Contradiction(
            f"{ids_text} of {given} bytes a row, for memory of {rows} rows of {row_bytes} bytes: not written"
        )


def staged_rows(held: Values, ids: Ids, values: Values) -> Callable[[], None]:
    """What writes `values` ([n, D]) to the rows `ids` ([n]) of an array [N, D] of their type, and no more.

    Raises:
        Contradiction: they do not fit.
    """
    check_fit(len(held), held.shape[1] * held.itemsize, ids, values)
    memory = _memory_of(held)
    if memory is None or not held.flags.writeable:
        return lambda: held.__setitem__(ids, values)
    scatter.compile()  # Not in front of readers that wait.
    if not values.flags.c_contiguous:
        return lambda: _put_blocks(memory, ids, values)
    numbers, rows = _numbers(ids), values.view(np.uint8)
    return lambda: scatter(memory, 0, numbers, rows)


def _put_blocks(memory: Bytes, ids: Ids, values: Values) -> None:
    """Of zeros that take no memory only a block is made."""
    for start in range(0, len(ids), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        scatter(memory, 0, _numbers(ids[block]), np.ascontiguousarray(values[block]).view(np.uint8))


def rows_at(held: Values, ids: Ids) -> Values:
    """A copy of the rows `ids` ([n]) of an array [N, D]: [n, D], zeros where they are past its end."""
    values, memory = np.empty((len(ids), held.shape[1]), held.dtype), _memory_of(held)
    if memory is not None and _within(len(held), ids):
        gather(memory, _numbers(ids), values.view(np.uint8))
        return values
    there = ids < len(held)
    values[there], values[~there] = held[ids[there]], 0
    return values


def _within(rows: int, ids: Ids) -> bool:
    return not len(ids) or bool(0 <= ids.min() <= ids.max() < rows)


def _numbers(ids: Ids) -> Ids:
    return np.ascontiguousarray(ids, np.int64)


def _memory_of(held: Values) -> Bytes | None:
    """The bytes of rows and of what they are padded with, [N, from one row to the next]; None where a row does not
    lie in one piece.
    """
    apart, step = held.strides
    if step != held.itemsize or apart < held.shape[1] * step:
        return None
    # Behind the last row there may be no padding; nothing reads that of any row.
    memory: Bytes = np.lib.stride_tricks.as_strided(held[:, :1].view(np.uint8), (len(held), apart), (apart, 1))
    return memory
