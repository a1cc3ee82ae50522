"""How far rows are from what is held of them."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from deltasync.core.rows import BLOCK_ROWS, Ids, Mask, Values
from deltasync.core.tables import VALUE_TYPES
from deltasync.kernels.distances import LARGEST_DISTANCE, compare_bytes, compare_fp16, compare_fp32

Distances = NDArray[np.float64]

_FP32, _FP16 = VALUE_TYPES


def compare_values(rows: Values, held: Values, ids: Ids) -> tuple[Distances, Mask]:
    """How far rows `ids` ([n]) of two tables of one type ([*, D]) are from each other.

    Returns:
        The L2 norms [n] of the differences, never infinite; and which rows differ in any bit.
    """
    norms, differs = np.empty(len(ids)), np.empty(len(ids), np.bool_)
    if rows.dtype == _FP32:
        compare_fp32(rows.view(np.float32), held.view(np.float32), ids, norms, differs)
    elif rows.dtype == _FP16:
        compare_fp16(rows.view(np.uint16), held.view(np.uint16), ids, norms, differs)
    else:
        for block in blocks(len(ids)):
            norms[block] = distances(rows[ids[block]], held[ids[block]])
        differs = compare_bits(rows, held, ids)
    return norms, differs


def compare_bits(rows: Values, held: Values, ids: Ids) -> Mask:
    """Which of the rows `ids` ([n]) of two tables of one type ([*, width]) differ in any bit."""
    differs = np.empty(len(ids), np.bool_)
    compare_bytes(rows.view(np.uint8), held.view(np.uint8), ids, differs)
    return differs


def distances(rows: Values, others: Values) -> Distances:
    """The L2 norms [n] of what differs between rows [n, D] of any type; never infinite."""
    # In fp64, in which no difference of two fp32 numbers overflows, nor its square.
    with np.errstate(over="ignore"):
        deltas = np.subtract(rows, others, dtype=np.float64)
        norms: Distances = np.sqrt(np.vecdot(deltas, deltas))
    return np.minimum(norms, LARGEST_DISTANCE)


def blocks(rows: int) -> Iterator[slice]:
    """All of so many rows, in blocks of which scratch memory stays in the processor's cache."""
    return (slice(start, start + BLOCK_ROWS) for start in range(0, rows, BLOCK_ROWS))
