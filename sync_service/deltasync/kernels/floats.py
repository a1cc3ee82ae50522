"""Bits of floats, ordered and rounded in steps that vectorise, and distances between rows of two tables."""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels.compiled import (
    boolean,
    float32,
    float64,
    in_any_order,
    in_order,
    inlined,
    int64,
    kernel,
    readable,
    uint8,
    uint16,
    uint32,
    void,
    writable,
)
from deltasync.kernels.instructions import AHEAD, ask_for_row

_I32, _U32, _F32 = np.int32, np.uint32, np.float32

_SIGN, _MAGNITUDE = 0x80000000, 0x7FFFFFFF
# Bits of fp32: the largest fp16 and bf16, and the smallest normal fp16.
_LARGEST_FP16, _LARGEST_BF16, _NORMAL_FP16 = 0x477FE000, 0x7F7F0000, 0x38800000
# Converts an exponent of fp32 to one of fp16, modulo 2**32, and rounds ties down.
_REBIASED = 0xC8000FFF
_HALF = 0x3F000000
_INFINITY, _INFINITY_OF_FP16 = 0x7F800000, 0x0F800000


@kernel(*(boolean(readable(word, 1), word) for word in (uint16, uint32)))
def all_finite(words: NDArray[np.unsignedinteger], infinity: np.unsignedinteger) -> bool:
    """Whether floats [n] are finite, from their bits. NaN and infinity have all bits of `infinity`."""
    finite = True
    for index in range(words.shape[0]):
        finite &= (words[index] & infinity) != infinity
    return finite


@inlined
def bits(number):  # type: ignore[no-untyped-def]
    """The bits of an fp32 number."""
    return _F32(number).view(_U32)


@inlined
def float_of(word):  # type: ignore[no-untyped-def]
    """The fp32 number with these bits."""
    return _U32(word).view(_F32)


@inlined
def rank(number):  # type: ignore[no-untyped-def]
    """An int32 with the order of fp32 numbers; -0 (-1) comes before 0 (0).

    Minima of integers vectorise, those of floats do not.
    """
    word = _F32(number).view(_I32)
    return _I32(word ^ ((word >> _I32(31)) & _I32(_MAGNITUDE)))


@inlined
def ranked(place):  # type: ignore[no-untyped-def]
    """The fp32 number with this rank."""
    return _I32(place ^ ((place >> _I32(31)) & _I32(_MAGNITUDE))).view(_F32)


@inlined
def fp16_of(number):  # type: ignore[no-untyped-def]
    """Round a finite fp32 number to the bits of fp16: to nearest, ties to even, within its range."""
    word = bits(number)
    magnitude = min(_U32(word & _U32(_MAGNITUDE)), _U32(_LARGEST_FP16))
    odd = _U32(magnitude >> _U32(13)) & _U32(1)
    normal = _U32(magnitude + _U32(_REBIASED) + odd) >> _U32(13)
    # The last bit of 0.5 has the place of the last bit of a denormal fp16, so the sum is rounded there.
    denormal = bits(float_of(magnitude) + _F32(0.5)) - _U32(_HALF)
    rounded = _U32(denormal) if magnitude < _U32(_NORMAL_FP16) else _U32(normal)
    return np.uint16(rounded | (_U32(word >> _U32(16)) & _U32(0x8000)))


@inlined
def of_fp16(word):  # type: ignore[no-untyped-def]
    """Convert the bits of fp16 to fp32."""
    magnitude = _U32(_U32(_U32(word) & _U32(0x7FFF)) << _U32(13))
    finite = bits(float_of(magnitude) * _F32(2.0**112))  # The exponents' biases differ by 112.
    positive = _U32(magnitude | _U32(_INFINITY)) if magnitude >= _U32(_INFINITY_OF_FP16) else finite
    return float_of(positive | _U32(_U32(_U32(word) & _U32(0x8000)) << _U32(16)))


@inlined
def bf16_of(number):  # type: ignore[no-untyped-def]
    """Round a finite fp32 number to the bits of bf16: to nearest, ties to even, within its range."""
    word = bits(number)
    magnitude = _U32(word & _U32(_MAGNITUDE))
    odd = _U32(magnitude >> _U32(16)) & _U32(1)
    rounded = min(_U32(magnitude + _U32(0x7FFF) + odd), _U32(_LARGEST_BF16))
    return np.uint16(_U32(rounded | _U32(word & _U32(_SIGN))) >> _U32(16))


@inlined
def of_bf16(word):  # type: ignore[no-untyped-def]
    """Convert the bits of bf16 to fp32."""
    return float_of(_U32(word) << _U32(16))


# Distances.

# Larger than any distance of fp32 rows, with finite sums of squares.
LARGEST_DISTANCE = 1e100

Norms = NDArray[np.float64]
Mask = NDArray[np.bool_]
Ids = NDArray[np.int64]

IDS = readable(int64, 1)
NORMS, MASK = writable(float64, 1), writable(boolean, 1)


@inlined
def norm_of(square_sum):  # type: ignore[no-untyped-def]
    """The norm from a sum of squares, never infinite."""
    return min(np.sqrt(square_sum), LARGEST_DISTANCE)


@in_any_order
def distance(rows, row, others, other):  # type: ignore[no-untyped-def]
    """The L2 norm of the difference of two rows."""
    # In fp64, the difference of two fp32 numbers and its square cannot overflow.
    total = np.float64(0)
    for column in range(rows.shape[1]):
        delta = np.float64(rows[row, column]) - np.float64(others[other, column])
        total += delta * delta
    return norm_of(total)


@in_order
def differ(rows, row, others, other):  # type: ignore[no-untyped-def]
    """Whether two rows of unsigned numbers differ."""
    found = rows[row, 0] ^ others[other, 0]
    for column in range(1, rows.shape[1]):
        found |= rows[row, column] ^ others[other, column]
    return found != 0


@inlined
def ask_ahead(rows, held, ids, index):  # type: ignore[no-untyped-def]
    """Prefetch the rows of both tables that are compared a little later."""
    if index + AHEAD < ids.shape[0]:
        ask_for_row(rows, np.uint64(rows.shape[1] * rows.itemsize), ids[index + AHEAD])
        ask_for_row(held, np.uint64(held.shape[1] * held.itemsize), ids[index + AHEAD])


@kernel(void(readable(uint8), readable(uint8), IDS, MASK))
def compare_bytes(rows: NDArray[np.uint8], held: NDArray[np.uint8], ids: Ids, differs: Mask) -> None:
    """Set `differs` [n] to whether rows `ids` [n] of two tables [*, bytes] differ."""
    for index in range(ids.shape[0]):
        ask_ahead(rows, held, ids, index)
        differs[index] = differ(rows, ids[index], held, ids[index])


@kernel(void(readable(float32), readable(float32), IDS, NORMS, MASK), any_order=True)
def compare_fp32(
    rows: NDArray[np.float32], held: NDArray[np.float32], ids: Ids, norms: Norms, differs: Mask
) -> None:
    """Set `norms` [n] to the distances of rows `ids` [n] of two tables [*, D], and `differs` [n] to whether any
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


@kernel(void(readable(uint16), readable(uint16), IDS, NORMS, MASK), any_order=True)
def compare_fp16(
    rows: NDArray[np.uint16], held: NDArray[np.uint16], ids: Ids, norms: Norms, differs: Mask
) -> None:
    """Do the same as `compare_fp32` for tables of fp16, given as bits."""
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
