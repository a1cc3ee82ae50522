"""Bits of floats: how they are ordered and rounded, in steps that vectorise."""

import numpy as np

from deltasync.kernels.compiled import inlined

_I32, _U32, _F32 = np.int32, np.uint32, np.float32

_SIGN, _MAGNITUDE = 0x80000000, 0x7FFFFFFF
# Bits of fp32: the largest fp16 and bf16, the smallest fp16 that is not denormal.
_LARGEST_FP16, _LARGEST_BF16, _NORMAL_FP16 = 0x477FE000, 0x7F7F0000, 0x38800000
# What makes an exponent of fp16 of one of fp32, modulo 2**32, and rounds down where that is a tie.
_REBIASED = 0xC8000FFF
_HALF = 0x3F000000
_INFINITY, _INFINITY_OF_FP16 = 0x7F800000, 0x0F800000


@inlined
def bits(number):  # type: ignore[no-untyped-def]
    """The bits of an fp32 number."""
    return _F32(number).view(_U32)


@inlined
def float_of(word):  # type: ignore[no-untyped-def]
    """The fp32 number that has these bits."""
    return _U32(word).view(_F32)


@inlined
def rank(number):  # type: ignore[no-untyped-def]
    """An int32 that is the larger the larger the fp32 number is; -0 (-1) comes before 0 (0).

    Minima of integers vectorise, those of floats do not.
    """
    word = _F32(number).view(_I32)
    return _I32(word ^ ((word >> _I32(31)) & _I32(_MAGNITUDE)))


@inlined
def ranked(place):  # type: ignore[no-untyped-def]
    """The fp32 number that has this rank."""
    return _I32(place ^ ((place >> _I32(31)) & _I32(_MAGNITUDE))).view(_F32)


@inlined
def fp16_of(number):  # type: ignore[no-untyped-def]
    """The bits of a finite fp32 number as fp16: to nearest, ties to even, at most the largest there is."""
    word = bits(number)
    magnitude = min(_U32(word & _U32(_MAGNITUDE)), _U32(_LARGEST_FP16))
    odd = _U32(magnitude >> _U32(13)) & _U32(1)
    normal = _U32(magnitude + _U32(_REBIASED) + odd) >> _U32(13)
    # 0.5 has its last bit where the last one of a denormal fp16 is: the sum is rounded there.
    denormal = bits(float_of(magnitude) + _F32(0.5)) - _U32(_HALF)
    rounded = _U32(denormal) if magnitude < _U32(_NORMAL_FP16) else _U32(normal)
    return np.uint16(rounded | (_U32(word >> _U32(16)) & _U32(0x8000)))


@inlined
def of_fp16(word):  # type: ignore[no-untyped-def]
    """The fp32 number that these bits of fp16 are."""
    magnitude = _U32(_U32(_U32(word) & _U32(0x7FFF)) << _U32(13))
    finite = bits(float_of(magnitude) * _F32(2.0**112))  # The exponents' biases differ by 112.
    positive = _U32(magnitude | _U32(_INFINITY)) if magnitude >= _U32(_INFINITY_OF_FP16) else finite
    return float_of(positive | _U32(_U32(_U32(word) & _U32(0x8000)) << _U32(16)))


@inlined
def bf16_of(number):  # type: ignore[no-untyped-def]
    """The bits of a finite fp32 number as bf16: to nearest, ties to even, at most the largest there is."""
    word = bits(number)
    magnitude = _U32(word & _U32(_MAGNITUDE))
    odd = _U32(magnitude >> _U32(16)) & _U32(1)
    rounded = min(_U32(magnitude + _U32(0x7FFF) + odd), _U32(_LARGEST_BF16))
    return np.uint16(_U32(rounded | _U32(word & _U32(_SIGN))) >> _U32(16))


@inlined
def of_bf16(word):  # type: ignore[no-untyped-def]
    """The fp32 number that these bits of bf16 are."""
    return float_of(_U32(word) << _U32(16))
