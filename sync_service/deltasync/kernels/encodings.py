"""Encode rows of fp32 in the types in which values are sent, decode and compare them.

fp16 and bf16: bits as 16-bit words.

int8: D codes of a byte, then scale and bias of the row (fp32, little-endian). The codes are those of fbgemm's
fused 8-bit row-wise operator, in fp32:

    scale = (max - min) / 255    bias = min    code = rint((value - bias) * (255 / (max - min + 1e-8)))

Zero has no sign in a bias, because which of several zeros is the smallest depends on the processor. If the range
exceeds fp32, for which fbgemm gets an infinite scale, scale and codes are computed in fp64.

A value is decoded as `code * scale + bias` in fp64 and then rounded. This equals fbgemm's fused multiply-add,
except in the last bit of rows whose bias is about a million times smaller than their scale.

TBE: scale and bias of the row in fp16, then codes of 8 or 4 bits: see `core/value_types.py`.
"""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels.compiled import (
    called,
    float32,
    in_order,
    inlined,
    int64,
    kernel,
    readable,
    uint8,
    uint16,
    uint64,
    void,
    writable,
)
from deltasync.kernels.digests import Digests
from deltasync.kernels.floats import (
    IDS,
    MASK,
    NORMS,
    Ids,
    Mask,
    Norms,
    ask_ahead,
    bf16_of,
    bits,
    differ,
    distance,
    float_of,
    fp16_of,
    norm_of,
    of_bf16,
    of_fp16,
    rank,
    ranked,
)

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16]
Floats = NDArray[np.float32]

_ENCODE = void(readable(float32), writable(uint16))
_DECODE = void(readable(uint16), writable(float32))
_DIGEST = void(readable(uint16), readable(uint64, 1), writable(uint64, 1))
_COMPARE = void(readable(float32), readable(uint16), IDS, NORMS, MASK)


@kernel(_ENCODE)
def encode_fp16(values: Floats, encoded: Words) -> None:
    """Set `encoded` [n, D] to the bits of finite values [n, D]."""
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            encoded[row, column] = fp16_of(values[row, column])


@kernel(_DECODE)
def decode_fp16(encoded: Words, values: Floats) -> None:
    """Set `values` [n, D] to the numbers with these bits [n, D]."""
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            values[row, column] = of_fp16(encoded[row, column])


@kernel(_DIGEST)
def digest_fp16(encoded: Words, weights: Digests, digests: Digests) -> None:
    """Set `digests` [n] to those of the decoded bits [n, D], with these weights [D]."""
    for row in range(encoded.shape[0]):
        total = np.uint64(0)
        for column in range(encoded.shape[1]):
            total += np.uint64(bits(of_fp16(encoded[row, column]))) * weights[column]
        digests[row] = total


@kernel(_COMPARE, any_order=True)
def compare_fp16(values: Floats, held: Words, ids: Ids, norms: Norms, differs: Mask) -> None:
    """Set `norms` [n] to the distances of rows `ids` [n] of a table [*, D] from the encoded rows `held`, and
    `differs` [n] to whether encoding them gives other bits."""
    for index in range(ids.shape[0]):
        ask_ahead(values, held, ids, index)
        row = ids[index]
        total, found = np.float64(0), np.uint16(0)
        for column in range(values.shape[1]):
            number, word = values[row, column], held[row, column]
            delta = np.float64(number) - np.float64(of_fp16(word))
            total += delta * delta
            found |= fp16_of(number) ^ word
        norms[index], differs[index] = norm_of(total), found != np.uint16(0)


@kernel(_ENCODE)
def encode_bf16(values: Floats, encoded: Words) -> None:
    """See `encode_fp16`."""
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            encoded[row, column] = bf16_of(values[row, column])


@kernel(_DECODE)
def decode_bf16(encoded: Words, values: Floats) -> None:
    """See `decode_fp16`."""
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            values[row, column] = of_bf16(encoded[row, column])


@kernel(_DIGEST)
def digest_bf16(encoded: Words, weights: Digests, digests: Digests) -> None:
    """See `digest_fp16`."""
    for row in range(encoded.shape[0]):
        total = np.uint64(0)
        for column in range(encoded.shape[1]):
            total += np.uint64(bits(of_bf16(encoded[row, column]))) * weights[column]
        digests[row] = total


@kernel(_COMPARE, any_order=True)
def compare_bf16(values: Floats, held: Words, ids: Ids, norms: Norms, differs: Mask) -> None:
    """See `compare_fp16`."""
    for index in range(ids.shape[0]):
        ask_ahead(values, held, ids, index)
        row = ids[index]
        total, found = np.float64(0), np.uint16(0)
        for column in range(values.shape[1]):
            number, word = values[row, column], held[row, column]
            delta = np.float64(number) - np.float64(of_bf16(word))
            total += delta * delta
            found |= bf16_of(number) ^ word
        norms[index], differs[index] = norm_of(total), found != np.uint16(0)


# int8.


_F32, _F64, _U32 = np.float32, np.float64, np.uint32
SCALE_AND_BIAS_BYTES_INT8 = 8
_LARGEST = float(np.finfo(np.float32).max)
_FEWEST, _MOST = -(2**31), 2**31 - 1


@inlined
def write_word(encoded, row, at, word):  # type: ignore[no-untyped-def]
    """Write 32 bits into a row of bytes, little-endian."""
    for byte in range(4):
        encoded[row, at + byte] = np.uint8(word >> _U32(8 * byte))


@inlined
def read_word(encoded, row, at):  # type: ignore[no-untyped-def]
    """Read 32 bits from a row of bytes, little-endian."""
    word = _U32(0)
    for byte in range(4):
        word |= _U32(encoded[row, at + byte]) << _U32(8 * byte)
    return word


@inlined
def extremes(values, row):  # type: ignore[no-untyped-def]
    """The smallest and the largest number of a row as ranks."""
    lowest, highest = np.int32(_MOST), np.int32(_FEWEST)
    for column in range(values.shape[1]):
        place = rank(values[row, column])
        lowest, highest = min(lowest, place), max(highest, place)
    return lowest, highest


@inlined
def scale_and_bounds(values, row):  # type: ignore[no-untyped-def]
    """The scale, the smallest and the largest number of a row."""
    lowest, highest = extremes(values, row)
    # Zero has no sign here.
    low, high = ranked(lowest) + _F32(0), ranked(highest) + _F32(0)
    reach = high - low
    # If the range exceeds fp32, fbgemm's scale is infinite.
    return _F32((_F64(high) - _F64(low)) / _F64(255)) if np.isinf(reach) else reach / _F32(255), low, high


@called
def write_wide_codes(values, row, scale, low, encoded, at):  # type: ignore[no-untyped-def]
    """Write the codes of a row whose range exceeds fp32."""
    for column in range(values.shape[1]):
        code = np.rint((_F64(values[row, column]) - _F64(low)) / _F64(scale))
        encoded[at, column] = np.uint8(np.int32(min(max(code, _F64(0)), _F64(255))))


@in_order
def encode_row_int8(values, row, encoded, at):  # type: ignore[no-untyped-def]
    """Encode a row into row `at`."""
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
def alike_int8(values, row, held, encoded):  # type: ignore[no-untyped-def]
    """Whether encoding a row gives the bytes of `held`; `encoded` [1, width] is scratch."""
    scale, low, _ = scale_and_bounds(values, row)
    dim = values.shape[1]
    # Most changed rows have other bounds, which are quick to compare.
    same = bits(scale) == read_word(held, row, dim) and bits(low) == read_word(held, row, dim + 4)
    if same:
        encode_row_int8(values, row, encoded, 0)
        same = not differ(encoded, 0, held, row)
    return same


@inlined
def scale_and_bias_int8(encoded, row, dim):  # type: ignore[no-untyped-def]
    """Scale and bias of an encoded row, in fp64."""
    return _F64(float_of(read_word(encoded, row, dim))), _F64(float_of(read_word(encoded, row, dim + 4)))


@inlined
def value_of(code, scale, bias):  # type: ignore[no-untyped-def]
    """Decode a code: in fp64, then rounded, within the range of fp32."""
    return _F32(min(max(_F64(code) * scale + bias, -_LARGEST), _LARGEST))


@in_order
def decode_row_int8(encoded, row, values, at):  # type: ignore[no-untyped-def]
    """Decode a row into row `at`."""
    scale, bias = scale_and_bias_int8(encoded, row, values.shape[1])
    for column in range(values.shape[1]):
        values[at, column] = value_of(encoded[row, column], scale, bias)


@kernel(void(readable(float32), writable(uint8)))
def encode_int8(values: Floats, encoded: Bytes) -> None:
    """Set `encoded` [n, D + 8] to codes, scales and biases of finite values [n, D]."""
    for row in range(values.shape[0]):
        encode_row_int8(values, row, encoded, row)


@kernel(void(readable(uint8), writable(float32)))
def decode_int8(encoded: Bytes, values: Floats) -> None:
    """Set `values` [n, D] to the decoded rows [n, D + 8]."""
    for row in range(values.shape[0]):
        decode_row_int8(encoded, row, values, row)


@kernel(void(readable(uint8), readable(uint64, 1), writable(uint64, 1)))
def digest_int8(encoded: Bytes, weights: Digests, digests: Digests) -> None:
    """Set `digests` [n] to those of the decoded rows [n, D + 8], with these weights [D]."""
    dim = weights.shape[0]
    for row in range(encoded.shape[0]):
        scale, bias = scale_and_bias_int8(encoded, row, dim)
        total = np.uint64(0)
        for column in range(dim):
            total += np.uint64(bits(value_of(encoded[row, column], scale, bias))) * weights[column]
        digests[row] = total


@kernel(void(readable(float32), readable(uint8), IDS, NORMS, MASK))
def compare_int8(values: Floats, held: Bytes, ids: Ids, norms: Norms, differs: Mask) -> None:
    """Set `norms` [n] to the distances of rows `ids` [n] of a table [*, D] from the encoded rows `held`, and
    `differs` [n] to whether encoding them gives other bytes."""
    decoded, encoded = np.empty((1, values.shape[1]), _F32), np.empty((1, held.shape[1]), np.uint8)
    for index in range(ids.shape[0]):
        ask_ahead(values, held, ids, index)
        row = ids[index]
        decode_row_int8(held, row, decoded, 0)
        norms[index] = distance(values, row, decoded, 0)
        differs[index] = not alike_int8(values, row, held, encoded)


# TBE.


_U8, _U16 = np.uint8, np.uint16
SCALE_AND_BIAS_BYTES_TBE = 4
_ONE = 0x3C00
# Number of columns in which fbgemm searches a minimum at a time.
_LANES = 8


@inlined
def write_half(encoded, row, at, word):  # type: ignore[no-untyped-def]
    """Write 16 bits into a row of bytes, little-endian."""
    encoded[row, at] = _U8(word & _U16(0xFF))
    encoded[row, at + 1] = _U8(word >> _U16(8))


@inlined
def read_half(encoded, row, at):  # type: ignore[no-untyped-def]
    """Read 16 bits from a row of bytes, little-endian."""
    return _U16(encoded[row, at]) | (_U16(encoded[row, at + 1]) << _U16(8))


@called
def lowest_zero(values, row):  # type: ignore[no-untyped-def]
    """The minimum of a row whose minimum is zero, with fbgemm's sign. fbgemm searches in lanes, where the last of
    equal numbers wins, then among the lanes and the remaining columns, where the first one wins."""
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
    """Set a row with scale 1 and bias 0 to zero bytes if its codes are 0."""
    found = _U8(0)
    for column in range(SCALE_AND_BIAS_BYTES_TBE, encoded.shape[1]):
        found |= encoded[at, column]
    if found == _U8(0):
        write_half(encoded, at, 0, _U16(0))


@inlined
def code_of(number, bias, factor, steps):  # type: ignore[no-untyped-def]
    """The code of a number."""
    return _U8(np.int32(np.rint(min(max((number - bias) * factor, _F32(0)), steps))))


@inlined
def scale_and_bias_tbe(bits, values, row):  # type: ignore[no-untyped-def]
    """The bits of scale and bias of a row."""
    lowest, highest = extremes(values, row)
    bias = fp16_of(lowest_zero(values, row) if lowest == np.int32(-1) else ranked(lowest))
    scale = fp16_of((ranked(highest) - of_fp16(bias)) / (_F32(255) if bits == 8 else _F32(15)))
    return scale if scale & _U16(0x7FFF) else _U16(_ONE), bias


@in_order
def encode_row_tbe(bits, values, row, encoded, at):  # type: ignore[no-untyped-def]
    """Encode a row into row `at`; codes 0 with scale 1 and bias 0 become zero bytes."""
    scale, bias = scale_and_bias_tbe(bits, values, row)
    write_codes(bits, values, row, of_fp16(bias), _F32(1) / of_fp16(scale), encoded, at)
    write_half(encoded, at, 0, scale)
    write_half(encoded, at, 2, bias)
    if scale == _U16(_ONE) and bias == _U16(0):
        zero_if_alike(encoded, at)


@in_order
def alike_tbe(bits, values, row, held, encoded):  # type: ignore[no-untyped-def]
    """Whether encoding a row gives the bytes of `held`; `encoded` [1, width] is scratch."""
    scale, bias = scale_and_bias_tbe(bits, values, row)
    same = bias == read_half(held, row, 2) and (scale == read_half(held, row, 0) or scale == _U16(_ONE))
    if same:
        encode_row_tbe(bits, values, row, encoded, 0)
        same = not differ(encoded, 0, held, row)
    return same


@in_order
def write_codes(bits, values, row, bias, factor, encoded, at):  # type: ignore[no-untyped-def]
    """Write the codes of a row. Of two codes in a byte, the first is in the lower half."""
    first_code = SCALE_AND_BIAS_BYTES_TBE
    if bits == 8:
        for column in range(values.shape[1]):
            encoded[at, first_code + column] = code_of(values[row, column], bias, factor, _F32(255))
    else:
        for column in range(values.shape[1] // 2):
            first = code_of(values[row, 2 * column], bias, factor, _F32(15))
            second = code_of(values[row, 2 * column + 1], bias, factor, _F32(15))
            encoded[at, first_code + column] = first | (second << _U8(4))


@in_order
def decode_row_tbe(bits, encoded, row, values, at):  # type: ignore[no-untyped-def]
    """Decode a row into row `at`."""
    scale, bias = of_fp16(read_half(encoded, row, 0)), of_fp16(read_half(encoded, row, 2))
    first_code = SCALE_AND_BIAS_BYTES_TBE
    if bits == 8:
        for column in range(values.shape[1]):
            values[at, column] = _F32(encoded[row, first_code + column]) * scale + bias
    else:
        for column in range(values.shape[1] // 2):
            pair = encoded[row, first_code + column]
            values[at, 2 * column] = _F32(pair & _U8(0xF)) * scale + bias
            values[at, 2 * column + 1] = _F32(pair >> _U8(4)) * scale + bias


@kernel(void(int64, readable(float32), writable(uint8)))
def encode_tbe(bits: int, values: Floats, encoded: Bytes) -> None:
    """Set `encoded` [n, width] to scales, biases and codes of 8 or 4 bits of finite values [n, D]."""
    for row in range(values.shape[0]):
        encode_row_tbe(bits, values, row, encoded, row)


@kernel(void(int64, readable(uint8), writable(float32)))
def decode_tbe(bits: int, encoded: Bytes, values: Floats) -> None:
    """Set `values` [n, D] to the decoded rows [n, width]."""
    for row in range(values.shape[0]):
        decode_row_tbe(bits, encoded, row, values, row)


@kernel(void(int64, readable(float32), readable(uint8), IDS, NORMS, MASK))
def compare_tbe(bits: int, values: Floats, held: Bytes, ids: Ids, norms: Norms, differs: Mask) -> None:
    """Set `norms` [n] to the distances of rows `ids` [n] of a table [*, D] from the encoded rows `held`, and
    `differs` [n] to whether encoding them gives other bytes."""
    decoded, encoded = np.empty((1, values.shape[1]), _F32), np.empty((1, held.shape[1]), np.uint8)
    for index in range(ids.shape[0]):
        ask_ahead(values, held, ids, index)
        row = ids[index]
        decode_row_tbe(bits, held, row, decoded, 0)
        norms[index] = distance(values, row, decoded, 0)
        differs[index] = not alike_tbe(bits, values, row, held, encoded)
