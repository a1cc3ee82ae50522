"""What the kernels that encode and decode are to find, in NumPy: one operation after another on whole arrays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_EPSILON = np.float32(1e-8)
_LARGEST_FP32 = np.finfo(np.float32).max
_LARGEST_FP16 = np.float32(np.finfo(np.float16).max)
_LARGEST_BF16_BITS = np.uint32(0x7F7F0000)
_ONE = np.float32(1)
_ONE_BITS = np.uint16(0x3C00)
# fbgemm looks for a minimum in so many columns at a time.
_LANES = 8

Bytes = NDArray[Any]
Words = NDArray[np.uint16]
Floats = NDArray[np.float32]


def encode_fp16(values: Floats) -> Words:
    return np.clip(values, -_LARGEST_FP16, _LARGEST_FP16).astype(np.float16).view(np.uint16)


def decode_fp16(encoded: Words) -> Floats:
    return encoded.view(np.float16).astype(np.float32)


def encode_bf16(values: Floats) -> Words:
    bits = values.view(np.uint32)
    magnitude, sign = bits & np.uint32(0x7FFFFFFF), bits & np.uint32(0x80000000)
    magnitude += np.uint32(0x7FFF) + ((magnitude >> np.uint32(16)) & np.uint32(1))
    np.minimum(magnitude, _LARGEST_BF16_BITS, out=magnitude)
    return ((sign | magnitude) >> np.uint32(16)).astype(np.uint16)


def decode_bf16(encoded: Words) -> Floats:
    return (encoded.astype(np.uint32) << np.uint32(16)).view(np.float32)


def encode_int8(values: Floats) -> Bytes:
    """Rows [n, D], finite, as codes, scale and bias: [n, D + 8]."""
    low, high = values.min(axis=1, keepdims=True), values.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):
        reach = high - low
    encoded = np.empty((len(values), values.shape[1] + 8), np.uint8)
    wide = np.isinf(reach[:, 0])
    if wide.any():
        encoded[wide], encoded[~wide] = _encode_wide(values[wide]), encode_int8(values[~wide])
        return encoded
    codes = values - low
    codes *= np.float32(255) / (reach + _EPSILON)
    np.rint(codes, out=codes)
    encoded[:, : values.shape[1]] = codes
    _append(encoded, reach / np.float32(255), low)
    return encoded


def _encode_wide(values: Floats) -> Bytes:
    """The same for rows whose range does not fit fp32, which fbgemm makes an infinite scale of."""
    encoded = np.empty((len(values), values.shape[1] + 8), np.uint8)
    exact = values.astype(np.float64)
    low = exact.min(axis=1, keepdims=True)
    scale = ((exact.max(axis=1, keepdims=True) - low) / 255).astype(np.float32)
    encoded[:, : values.shape[1]] = np.clip(np.rint((exact - low) / scale), 0, 255)
    _append(encoded, scale, low.astype(np.float32))
    return encoded


def _append(encoded: Bytes, scale: Floats, bias: Floats) -> None:
    # Zeros have no sign here: which of several is the smallest depends on the processor.
    encoded[:, -8:-4] = np.ascontiguousarray(scale + np.float32(0)).view(np.uint8)
    encoded[:, -4:] = np.ascontiguousarray(bias + np.float32(0)).view(np.uint8)


def decode_int8(encoded: Bytes) -> Floats:
    scale, bias = np.ascontiguousarray(encoded[:, -8:]).view("<f4").astype(np.float64).T
    exact = encoded[:, :-8] * scale[:, None] + bias[:, None]
    values: Floats = np.clip(exact, -_LARGEST_FP32, _LARGEST_FP32).astype(np.float32)
    return values


def encode_tbe(values: Floats, bits: int) -> Bytes:
    """Rows [n, D], finite, as codes, scale and bias: [n, width]; 8 bits, or 4 where D is even."""
    steps = np.float32(2**bits - 1)
    bias, highest = _fp16(_lowest(values))[:, None], values.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):
        scale = _fp16((highest - bias) / steps)
        scale[scale == 0] = _ONE
        codes = values - bias
        codes *= _ONE / scale
    np.rint(codes, out=codes)
    encoded = np.empty((len(values), values.shape[1] * bits // 8 + 4), np.uint8)
    encoded[:, :-4] = _packed(np.clip(codes, 0, steps, out=codes).astype(np.uint8), bits)
    encoded[:, -4:-2] = scale.astype("<f2").view(np.uint8)
    encoded[:, -2:] = bias.astype("<f2").view(np.uint8)
    encoded[
        (encoded[:, -4:-2].view("<u2")[:, 0] == _ONE_BITS)
        & ~encoded[:, :-4].any(axis=1)
        & ~encoded[:, -2:].any(axis=1)
    ] = 0
    return encoded


def decode_tbe(encoded: Bytes, bits: int) -> Floats:
    """`code * scale + bias` in fp32: what a TBE looks up, but for the last bit where it multiplies and adds at
    once."""
    codes, (scale, bias) = encoded[:, :-4], np.ascontiguousarray(encoded[:, -4:]).view("<f2").T
    values = (codes if bits == 8 else _unpacked(codes)).astype(np.float32)
    values *= scale[:, None].astype(np.float32)
    values += bias[:, None].astype(np.float32)
    return values


def _fp16(values: Floats) -> Floats:
    """Values rounded to fp16."""
    return np.clip(values, -_LARGEST_FP16, _LARGEST_FP16).astype(np.float16).astype(np.float32)


def _lowest(values: Floats) -> Floats:
    """The minimum of each row: of zeros with both signs the one that fbgemm finds."""
    lowest: Floats = values.min(axis=1)
    zero = np.flatnonzero(lowest == 0)
    signed = zero[np.signbit(values[zero]).any(axis=1)]
    lowest[signed] = _lowest_by_lanes(values[signed])
    return lowest


def _lowest_by_lanes(values: Floats) -> Floats:
    """The minimum as fbgemm looks for it: by lanes, in which of equal numbers the last one wins, and then among
    these and the columns that fill no lanes, where the first one does."""
    whole = values.shape[1] // _LANES * _LANES
    lanes = np.full((len(values), _LANES), np.inf, np.float32)
    for first in range(0, whole, _LANES):
        some = values[:, first : first + _LANES]
        lanes = np.where(lanes < some, lanes, some)
    lowest = np.full(len(values), np.inf, np.float32)
    for column in np.concatenate([lanes, values[:, whole:]], axis=1).T:
        lowest = np.where(column < lowest, column, lowest)
    return lowest


def _packed(codes: Bytes, bits: int) -> Bytes:
    """Codes [n, D] as bytes [n, D * bits / 8]."""
    return codes if bits == 8 else codes[:, ::2] | (codes[:, 1::2] << 4)


def _unpacked(packed: Bytes) -> Bytes:
    """Codes of 4 bits [n, D], of bytes [n, D / 2]."""
    return np.stack([packed & 0xF, packed >> 4], axis=2).reshape(len(packed), 2 * packed.shape[1])


class Coding(NamedTuple):
    """How rows of fp32 are encoded, and decoded."""

    encode: Callable[[Floats], Bytes]
    decode: Callable[[Bytes], Floats]


CODINGS = {
    "fp16": Coding(encode_fp16, decode_fp16),
    "bf16": Coding(encode_bf16, decode_bf16),
    "int8": Coding(encode_int8, decode_int8),
    "int8-tbe": Coding(lambda values: encode_tbe(values, 8), lambda encoded: decode_tbe(encoded, 8)),
    "int4-tbe": Coding(lambda values: encode_tbe(values, 4), lambda encoded: decode_tbe(encoded, 4)),
}
