"""Rows of fp32 as codes of 8 or 4 bits, then scale and bias of the row in fp16: see `core/value_types.py`."""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels import types
from deltasync.kernels.compiled import called, in_order, inlined, kernel, readable, writable
from deltasync.kernels.distances import IDS, MASK, NORMS, Ids, Mask, Norms, ask_ahead, differ, distance
from deltasync.kernels.floats import fp16_of, of_fp16, ranked
from deltasync.kernels.int8 import extremes

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_F32, _U8, _U16 = np.float32, np.uint8, np.uint16
SCALE_AND_BIAS_BYTES = 4
_ONE = 0x3C00
# fbgemm looks for a minimum in so many columns at a time.
_LANES = 8


@inlined
def write_half(encoded, row, at, word):  # type: ignore[no-untyped-def]
    """Write 16 bits into a row of bytes, little-endian."""
    encoded[row, at] = _U8(word & _U16(0xFF))
    encoded[row, at + 1] = _U8(word >> _U16(8))


@inlined
def read_half(encoded, row, at):  # type: ignore[no-untyped-def]
    """The 16 bits in a row of bytes, little-endian."""
    return _U16(encoded[row, at]) | (_U16(encoded[row, at + 1]) << _U16(8))


@called
def lowest_zero(values, row):  # type: ignore[no-untyped-def]
    """The minimum of a row that is zero, with the sign that fbgemm finds: by lanes, in which of equal numbers the
    last one wins, and then among these and the columns that fill no lanes, where the first one does."""
    whole = values.shape[1] // _LANES * _LANES
    lowest = _F32(np.inf)
    for lane in range(_LANES):
        least = _F32(np.inf)
        for column in range(lane, whole, _LANES):
            least = least if least < values[row, column] else values[row, column]
        lowest = least if least < lowest else lowest
    for column in range(whole, values.shape[1]):
        lowest = values[row, column] if values[row, column] < lowest else lowest
    return lowest


@called
def zero_if_alike(encoded, at):  # type: ignore[no-untyped-def]
    """Make a row of scale 1 and bias 0 zero bytes if its codes are."""
    end = encoded.shape[1] - SCALE_AND_BIAS_BYTES
    found = _U8(0)
    for column in range(end):
        found |= encoded[at, column]
    if found == _U8(0):
        write_half(encoded, at, end, _U16(0))


@inlined
def code_of(number, bias, factor, steps):  # type: ignore[no-untyped-def]
    """The code of a number."""
    return _U8(np.int32(np.rint(min(max((number - bias) * factor, _F32(0)), steps))))


@inlined
def scale_and_bias(bits, values, row):  # type: ignore[no-untyped-def]
    """The bits of scale and bias of a row."""
    lowest, highest = extremes(values, row)
    bias = fp16_of(lowest_zero(values, row) if lowest == np.int32(-1) else ranked(lowest))
    scale = fp16_of((ranked(highest) - of_fp16(bias)) / (_F32(255) if bits == 8 else _F32(15)))
    return scale if scale & _U16(0x7FFF) else _U16(_ONE), bias


@in_order
def encode_row(bits, values, row, encoded, at):  # type: ignore[no-untyped-def]
    """Encode a row as row `at`; one that would be codes 0, scale 1 and bias 0 as zero bytes only."""
    scale, bias = scale_and_bias(bits, values, row)
    write_codes(bits, values, row, of_fp16(bias), _F32(1) / of_fp16(scale), encoded, at)
    end = encoded.shape[1]
    write_half(encoded, at, end - 4, scale)
    write_half(encoded, at, end - 2, bias)
    if scale == _U16(_ONE) and bias == _U16(0):
        zero_if_alike(encoded, at)


@in_order
def alike(bits, values, row, held, encoded):  # type: ignore[no-untyped-def]
    """Whether a row would be encoded as it is held; `encoded` [1, width] is scratch."""
    scale, bias = scale_and_bias(bits, values, row)
    end = held.shape[1]
    same = bias == read_half(held, row, end - 2) and (
        scale == read_half(held, row, end - 4) or scale == _U16(_ONE)
    )
    if same:
        encode_row(bits, values, row, encoded, 0)
        same = not differ(encoded, 0, held, row)
    return same


@in_order
def write_codes(bits, values, row, bias, factor, encoded, at):  # type: ignore[no-untyped-def]
    """Write the codes of a row; of two in a byte, the first has its lower half."""
    if bits == 8:
        for column in range(values.shape[1]):
            encoded[at, column] = code_of(values[row, column], bias, factor, _F32(255))
    else:
        for column in range(values.shape[1] // 2):
            first = code_of(values[row, 2 * column], bias, factor, _F32(15))
            second = code_of(values[row, 2 * column + 1], bias, factor, _F32(15))
            encoded[at, column] = first | (second << _U8(4))


@in_order
def decode_row(bits, encoded, row, values, at):  # type: ignore[no-untyped-def]
    """Decode a row as row `at`."""
    end = encoded.shape[1]
    scale, bias = of_fp16(read_half(encoded, row, end - 4)), of_fp16(read_half(encoded, row, end - 2))
    if bits == 8:
        for column in range(values.shape[1]):
            values[at, column] = _F32(encoded[row, column]) * scale + bias
    else:
        for column in range(values.shape[1] // 2):
            pair = encoded[row, column]
            values[at, 2 * column] = _F32(pair & _U8(0xF)) * scale + bias
            values[at, 2 * column + 1] = _F32(pair >> _U8(4)) * scale + bias


@kernel(types.void(types.int64, readable(types.float32), writable(types.uint8)))
def encode(bits: int, values: Floats, encoded: Bytes) -> None:
    """Set `encoded` [n, width] to codes of 8 or 4 bits, scales and biases of finite values [n, D]."""
    for row in range(values.shape[0]):
        encode_row(bits, values, row, encoded, row)


@kernel(types.void(types.int64, readable(types.uint8), writable(types.float32)))
def decode(bits: int, encoded: Bytes, values: Floats) -> None:
    """Set `values` [n, D] to what encoded rows [n, width] stand for."""
    for row in range(values.shape[0]):
        decode_row(bits, encoded, row, values, row)


@kernel(types.void(types.int64, readable(types.float32), readable(types.uint8), IDS, NORMS, MASK))
def compare(bits: int, values: Floats, held: Bytes, ids: Ids, norms: Norms, differs: Mask) -> None:
    """Set `norms` and `differs` [n] to the distances of rows `ids` [n] of a table [*, D] from those held, and to
    whether they would be encoded as other bytes."""
    decoded, encoded = np.empty((1, values.shape[1]), _F32), np.empty((1, held.shape[1]), np.uint8)
    for index in range(ids.shape[0]):
        ask_ahead(values, held, ids, index)
        row = ids[index]
        decode_row(bits, held, row, decoded, 0)
        norms[index] = distance(values, row, decoded, 0)
        differs[index] = not alike(bits, values, row, held, encoded)
