"""Rows of fp32 as fp16 and bf16, whose bits come and go as 16-bit words."""

import numpy as np
from numba import types
from numpy.typing import NDArray

from deltasync.kernels.compiled import kernel, readable, writable
from deltasync.kernels.digests import Digests
from deltasync.kernels.distances import IDS, MASK, NORMS, Ids, Mask, Norms, ask_ahead, norm_of
from deltasync.kernels.floats import bf16_of, bits, fp16_of, of_bf16, of_fp16

Words = NDArray[np.uint16]
Floats = NDArray[np.float32]

_ENCODE = types.void(readable(types.float32), writable(types.uint16))
_DECODE = types.void(readable(types.uint16), writable(types.float32))
_DIGEST = types.void(readable(types.uint16), readable(types.uint64, 1), writable(types.uint64, 1))
_COMPARE = types.void(readable(types.float32), readable(types.uint16), IDS, NORMS, MASK)


@kernel(_ENCODE)
def encode_fp16(values: Floats, encoded: Words) -> None:
    """Set `encoded` [n, D] to the bits of finite values [n, D]."""
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            encoded[row, column] = fp16_of(values[row, column])


@kernel(_DECODE)
def decode_fp16(encoded: Words, values: Floats) -> None:
    """Set `values` [n, D] to what the bits [n, D] stand for."""
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            values[row, column] = of_fp16(encoded[row, column])


@kernel(_DIGEST)
def digest_fp16(encoded: Words, weights: Digests, digests: Digests) -> None:
    """Set `digests` [n] to those of what the bits [n, D] stand for, with these weights [D]."""
    for row in range(encoded.shape[0]):
        total = np.uint64(0)
        for column in range(encoded.shape[1]):
            total += np.uint64(bits(of_fp16(encoded[row, column]))) * weights[column]
        digests[row] = total


@kernel(_COMPARE, any_order=True)
def compare_fp16(values: Floats, held: Words, ids: Ids, norms: Norms, differs: Mask) -> None:
    """Set `norms` and `differs` [n] to the distances of rows `ids` [n] of a table [*, D] from those held, and to
    whether they would be encoded as other bits."""
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
