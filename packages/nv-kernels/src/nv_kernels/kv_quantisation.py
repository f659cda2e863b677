"""What an fp8 element of the KV cache stands for, and which caches there are.

A cache has the dtype of queries and keys, or float8_e4m3fn at half the memory. In an fp8 cache an
element stands for itself times its layer's scale, one for keys and one for values:

- Storing x keeps x * (1 / scale), computed in fp32, cut off at +-448 (infinities too), and rounded
  to the nearest e4m3, ties to even. NaN stays NaN, so that an error upstream remains visible.
- Reading turns e4m3 into the dtype of the query, which is exact. Attention never multiplies keys or
  values by their scale: k_scale goes into the factor of the scores, v_scale into the result.

Scales are numbers of the host. They are known before the first step and never change, so a captured
graph may hold them, kernels take them as plain arguments, and no step reads them from memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.checks import FLOAT_DTYPES
from nv_kernels.errors import KernelInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

FP8 = torch.float8_e4m3fn
"""The dtype of a quantised cache: 4 bits of exponent, 3 of mantissa, NaN but no infinity."""

FP8_MAX = torch.finfo(FP8).max
"""The largest e4m3, 448."""

CACHE_DTYPES = (*FLOAT_DTYPES, FP8)
"""What a cache that attention reads may consist of."""

MIN_SCALE = torch.finfo(torch.float32).tiny
"""The least scale: the smallest normal fp32, whose reciprocal is in range, too."""

MAX_SCALE = 1 / MIN_SCALE
"""The largest scale, for the same reason."""


def stored_dtypes(cache_dtype: torch.dtype) -> Sequence[torch.dtype]:
    """Lists the dtypes of keys and values that a cache takes: its own, or for fp8 any float."""
    return FLOAT_DTYPES if cache_dtype == FP8 else (cache_dtype,)


def read_dtypes(dtype: torch.dtype) -> Sequence[torch.dtype]:
    """Lists the dtypes of caches that queries of a dtype can read: their own, and fp8."""
    return (dtype, FP8)


def check_scales(cache_dtype: torch.dtype, k_scale: float, v_scale: float) -> None:
    """Raises unless the scales suit the cache.

    Args:
        cache_dtype: Of keys and values in the cache.
        k_scale: What a cached key is to be multiplied by.
        v_scale: What a cached value is to be multiplied by.

    Raises:
        KernelInputError: A scale is no number, not positive or not in the range of fp32, or the
            cache is not quantised and a scale is not 1.
    """
    if k_scale == v_scale == 1.0:
        return
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not isinstance(scale, (int, float)):
            raise KernelInputError(
                f"{name} is {scale!r}, but must be a number. Pass the largest magnitude to be "
                "stored over 448, or 1.0."
            )
        if not MIN_SCALE <= scale <= MAX_SCALE:
            raise KernelInputError(
                f"{name} is {scale}, but must be positive and in the range of fp32. Pass the "
                "largest magnitude to be stored over 448, or 1.0."
            )
        if cache_dtype != FP8 and scale != 1.0:
            raise KernelInputError(
                f"{name} is {scale}, but only a cache of {FP8} is scaled, and this one is of "
                f"{cache_dtype}. Pass 1.0, or allocate the cache in {FP8}."
            )
