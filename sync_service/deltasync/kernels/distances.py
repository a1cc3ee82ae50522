"""How far rows of two tables are from each other, and whether any of their bits differ."""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels import types
from deltasync.kernels.compiled import in_any_order, in_order, inlined, kernel, readable, writable
from deltasync.kernels.floats import bits, of_fp16
from deltasync.kernels.prefetch import AHEAD, ask_for_row

# Beyond any of fp32 rows; squares of it add up to a finite number.
LARGEST_DISTANCE = 1e100

Norms = NDArray[np.float64]
Mask = NDArray[np.bool_]
Ids = NDArray[np.int64]

IDS = readable(types.int64, 1)
NORMS, MASK = writable(types.float64, 1), writable(types.boolean, 1)


@inlined
def norm_of(square_sum):  # type: ignore[no-untyped-def]
    """The norm, which is never infinite."""
    return min(np.sqrt(square_sum), LARGEST_DISTANCE)


@in_any_order
def distance(rows, row, others, other):  # type: ignore[no-untyped-def]
    """The L2 norm of what differs between a row and another."""
    # In fp64, in which no difference of two fp32 numbers overflows, nor its square.
    total = np.float64(0)
    for column in range(rows.shape[1]):
        delta = np.float64(rows[row, column]) - np.float64(others[other, column])
        total += delta * delta
    return norm_of(total)


@in_order
def differ(rows, row, others, other):  # type: ignore[no-untyped-def]
    """Whether a row and another, of unsigned numbers, differ."""
    found = rows[row, 0] ^ others[other, 0]
    for column in range(1, rows.shape[1]):
        found |= rows[row, column] ^ others[other, column]
    return found != 0


@inlined
def ask_ahead(rows, held, ids, index):  # type: ignore[no-untyped-def]
    """Ask for rows of both tables that are compared a little later."""
    if index + AHEAD < ids.shape[0]:
        ask_for_row(rows, np.uint64(rows.shape[1] * rows.itemsize), ids[index + AHEAD])
        ask_for_row(held, np.uint64(held.shape[1] * held.itemsize), ids[index + AHEAD])


@kernel(types.void(readable(types.uint8), readable(types.uint8), IDS, MASK))
def compare_bytes(rows: NDArray[np.uint8], held: NDArray[np.uint8], ids: Ids, differs: Mask) -> None:
    """Set `differs` [n] to whether rows `ids` [n] of two tables [*, bytes] differ."""
    for index in range(ids.shape[0]):
        ask_ahead(rows, held, ids, index)
        differs[index] = differ(rows, ids[index], held, ids[index])


@kernel(types.void(readable(types.float32), readable(types.float32), IDS, NORMS, MASK), any_order=True)
def compare_fp32(
    rows: NDArray[np.float32], held: NDArray[np.float32], ids: Ids, norms: Norms, differs: Mask
) -> None:
    """Set `norms` and `differs` [n] to the distances of rows `ids` [n] of two tables [*, D], and to whether any
    bits differ."""
    for index in range(ids.shape[0]):
        ask_ahead(rows, held, ids, index)
        row = ids[index]
        total, found = np.float64(0), np.uint32(0)
        for column in range(rows.shape[1]):
            number, other = rows[row, column], held[row, column]
            delta = np.float64(number) - np.float64(other)
            total += delta * delta
            found |= bits(number) ^ bits(other)
        norms[index], differs[index] = norm_of(total), found != np.uint32(0)


@kernel(types.void(readable(types.uint16), readable(types.uint16), IDS, NORMS, MASK), any_order=True)
def compare_fp16(
    rows: NDArray[np.uint16], held: NDArray[np.uint16], ids: Ids, norms: Norms, differs: Mask
) -> None:
    """The same of tables in fp16, as bits."""
    for index in range(ids.shape[0]):
        ask_ahead(rows, held, ids, index)
        row = ids[index]
        total, found = np.float64(0), np.uint16(0)
        for column in range(rows.shape[1]):
            word, other = rows[row, column], held[row, column]
            delta = np.float64(of_fp16(word)) - np.float64(of_fp16(other))
            total += delta * delta
            found |= word ^ other
        norms[index], differs[index] = norm_of(total), found != np.uint16(0)
