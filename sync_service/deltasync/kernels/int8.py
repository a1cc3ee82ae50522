"""Rows of fp32 as one byte per value: D codes, then scale and bias of the row (fp32, little-endian).

The codes are those of fbgemm's fused 8-bit row-wise operator, in fp32:

    scale = (max - min) / 255    bias = min    code = rint((value - bias) * (255 / (max - min + 1e-8)))

Zero has no sign in a bias: which of several zeros is the smallest depends on the processor. Where the range does
not fit fp32, which fbgemm makes an infinite scale of, scale and codes are found in fp64.

A value comes back as `code * scale + bias`, in fp64 and then rounded: what fbgemm's fused multiply-add gives,
except in the last bit of rows whose bias is about a million times smaller than their scale.
"""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels import types
from deltasync.kernels.compiled import called, in_order, inlined, kernel, readable, writable
from deltasync.kernels.digests import Digests
from deltasync.kernels.distances import IDS, MASK, NORMS, Ids, Mask, Norms, ask_ahead, differ, distance
from deltasync.kernels.floats import bits, float_of, rank, ranked

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_F32, _F64, _U32 = np.float32, np.float64, np.uint32
SCALE_AND_BIAS_BYTES = 8
_LARGEST = float(np.finfo(np.float32).max)
_FEWEST, _MOST = -(2**31), 2**31 - 1


@inlined
def write_word(encoded, row, at, word):  # type: ignore[no-untyped-def]
    """Write 32 bits into a row of bytes, little-endian."""
    for byte in range(4):
        encoded[row, at + byte] = np.uint8(word >> _U32(8 * byte))


@inlined
def read_word(encoded, row, at):  # type: ignore[no-untyped-def]
    """The 32 bits in a row of bytes, little-endian."""
    word = _U32(0)
    for byte in range(4):
        word |= _U32(encoded[row, at + byte]) << _U32(8 * byte)
    return word


@inlined
def extremes(values, row):  # type: ignore[no-untyped-def]
    """The smallest and the largest number of a row, as ranks."""
    lowest, highest = np.int32(_MOST), np.int32(_FEWEST)
    for column in range(values.shape[1]):
        place = rank(values[row, column])
        lowest, highest = min(lowest, place), max(highest, place)
    return lowest, highest


@inlined
def scale_and_bounds(values, row):  # type: ignore[no-untyped-def]
    """Scale, smallest and largest number of a row."""
    lowest, highest = extremes(values, row)
    # Zero has no sign here.
    low, high = ranked(lowest) + _F32(0), ranked(highest) + _F32(0)
    reach = high - low
    # Where the range does not fit fp32, fbgemm's scale is infinite.
    return _F32((_F64(high) - _F64(low)) / _F64(255)) if np.isinf(reach) else reach / _F32(255), low, high


@called
def write_wide_codes(values, row, scale, low, encoded, at):  # type: ignore[no-untyped-def]
    """Write the codes of a row whose range does not fit fp32."""
    for column in range(values.shape[1]):
        code = np.rint((_F64(values[row, column]) - _F64(low)) / _F64(scale))
        encoded[at, column] = np.uint8(np.int32(min(max(code, _F64(0)), _F64(255))))


@in_order
def encode_row(values, row, encoded, at):  # type: ignore[no-untyped-def]
    """Encode a row as row `at`."""
    dim = values.shape[1]
    scale, low, high = scale_and_bounds(values, row)
    factor = _F32(255) / (high - low + _F32(1e-8))
    for column in range(dim):
        encoded[at, column] = np.uint8(np.int32(np.rint((values[row, column] - low) * factor)))
    write_word(encoded, at, dim, bits(scale))
    write_word(encoded, at, dim + 4, bits(low))
    if np.isinf(high - low):
        write_wide_codes(values, row, scale, low, encoded, at)


@in_order
def alike(values, row, held, encoded):  # type: ignore[no-untyped-def]
    """Whether a row would be encoded as it is held; `encoded` [1, width] is scratch."""
    scale, low, _ = scale_and_bounds(values, row)
    dim = values.shape[1]
    # Few rows that have changed have the bounds of before.
    same = bits(scale) == read_word(held, row, dim) and bits(low) == read_word(held, row, dim + 4)
    if same:
        encode_row(values, row, encoded, 0)
        same = not differ(encoded, 0, held, row)
    return same


@inlined
def scale_and_bias(encoded, row, dim):  # type: ignore[no-untyped-def]
    """Scale and bias of an encoded row, in fp64."""
    return _F64(float_of(read_word(encoded, row, dim))), _F64(float_of(read_word(encoded, row, dim + 4)))


@inlined
def value_of(code, scale, bias):  # type: ignore[no-untyped-def]
    """What a code stands for: in fp64, then rounded; at most the largest number there is."""
    return _F32(min(max(_F64(code) * scale + bias, -_LARGEST), _LARGEST))


@in_order
def decode_row(encoded, row, values, at):  # type: ignore[no-untyped-def]
    """Decode a row as row `at`."""
    scale, bias = scale_and_bias(encoded, row, values.shape[1])
    for column in range(values.shape[1]):
        values[at, column] = value_of(encoded[row, column], scale, bias)


@kernel(types.void(readable(types.float32), writable(types.uint8)))
def encode(values: Floats, encoded: Bytes) -> None:
    """Set `encoded` [n, D + 8] to codes, scales and biases of finite values [n, D]."""
    for row in range(values.shape[0]):
        encode_row(values, row, encoded, row)


@kernel(types.void(readable(types.uint8), writable(types.float32)))
def decode(encoded: Bytes, values: Floats) -> None:
    """Set `values` [n, D] to what encoded rows [n, D + 8] stand for."""
    for row in range(values.shape[0]):
        decode_row(encoded, row, values, row)


@kernel(types.void(readable(types.uint8), readable(types.uint64, 1), writable(types.uint64, 1)))
def digest(encoded: Bytes, weights: Digests, digests: Digests) -> None:
    """Set `digests` [n] to those of what encoded rows [n, D + 8] stand for, with these weights [D]."""
    dim = weights.shape[0]
    for row in range(encoded.shape[0]):
        scale, bias = scale_and_bias(encoded, row, dim)
        total = np.uint64(0)
        for column in range(dim):
            total += np.uint64(bits(value_of(encoded[row, column], scale, bias))) * weights[column]
        digests[row] = total


@kernel(types.void(readable(types.float32), readable(types.uint8), IDS, NORMS, MASK))
def compare(values: Floats, held: Bytes, ids: Ids, norms: Norms, differs: Mask) -> None:
    """Set `norms` and `differs` [n] to the distances of rows `ids` [n] of a table [*, D] from those held, and to
    whether they would be encoded as other bytes."""
    decoded, encoded = np.empty((1, values.shape[1]), _F32), np.empty((1, held.shape[1]), np.uint8)
    for index in range(ids.shape[0]):
        ask_ahead(values, held, ids, index)
        row = ids[index]
        decode_row(held, row, decoded, 0)
        norms[index] = distance(values, row, decoded, 0)
        differs[index] = not alike(values, row, held, encoded)
