"""How the kernels write fp8 (e4m3), bit for bit as `kv_quantisation.py` says, and how they read it.

Triton's own conversion to fp8 is one instruction on a new GPU, but its interpreter rounds wrongly.
Ours is a dozen instructions in kernels that wait for memory.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Two pairs at a time: even bytes together, odd bytes together, and both to fp16.
_SPLIT_PAIRS = tl.constexpr(
    """
    {
    .reg .b16 even, odd;
    .reg .b32 sorted;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
    }
    """
)


@triton.jit  # type: ignore[untyped-decorator]
def store_in_cache(
    pointers: tl.tensor,
    x: tl.tensor,
    inverse_scale: tl.tensor,
    mask: tl.tensor,
    is_fp8: tl.constexpr,
) -> None:
    """Stores x as it is, or in an fp8 cache quantised.

    Args:
        pointers: Where, in a cache of x's dtype or of fp8.
        x: Keys or values; fp32, fp16 or bf16 for fp8.
        inverse_scale: Factor before the rounding to fp8.
        mask: What to store.
        is_fp8: Whether the cache is fp8.
    """
    if is_fp8:
        bits = fp8_bits(x.to(tl.float32) * inverse_scale)
        tl.store(pointers.to(tl.pointer_type(tl.uint8), bitcast=True), bits, mask=mask)
    else:
        tl.store(pointers, x, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def fp8_bits(x: tl.tensor) -> tl.tensor:
    """Rounds fp32 to the nearest e4m3, ties to even; past 448 is 448, NaN is NaN.

    Returns:
        The bits, uint8: sign, four of exponent (bias 7), three of mantissa; 127 is NaN.
    """
    is_nan = x != x
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Adding just under half of the last kept bit, and that bit itself, carries where it must. The
    # bias of fp32's exponent is 127.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 numbers are multiples of 2^-9, the last bit of fp32 numbers from 2^14 on: the
    # addition rounds to it.
    shifted = (magnitude + 16384.0).to(tl.int32, bitcast=True)
    subnormal = shifted & 0xF
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    code = tl.where(is_nan, 127, code)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def split_pairs(pairs: tl.tensor, dtype: tl.constexpr) -> tl.tuple:
    """Turns pairs of fp8 elements into numbers.

    Values meet the tensor cores with the token, not the dimension, as the inner index. Shared
    memory is transposed on the way there 16 bits at a time, so values travel in pairs of
    dimensions, and are told apart when they are in registers. Byte by byte the loop would take a
    quarter longer (docs/kernels.md).

    Args:
        pairs: uint16, [n, d / 2].
        dtype: fp16 or fp32.

    Returns:
        Elements of even places and of odd ones, [n, d / 2] each.
    """
    if _INTERPRETED:
        even = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        odd = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        even, odd = tl.inline_asm_elementwise(
            _SPLIT_PAIRS,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return even.to(dtype), odd.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def prepare_query(query: tl.tensor, scale_log2: tl.tensor, is_fp8: tl.constexpr) -> tl.tuple:
    """Gives queries the dtype in which they meet the cache: fp16 for bf16 and fp8, else their own.

    fp8 turns into fp16 in one instruction for two numbers, into bf16 in six. fp16 has more mantissa
    than bf16 but less range, so each row is divided by a power of two first, which is exact: the
    largest element lies in [1, 2) then, and only what is less than 2^-14 of it can lose bits.

    Args:
        query: [m, d].
        scale_log2: Factor of all scores.
        is_fp8: Whether the cache is fp8.

    Returns:
        Queries [m, d], and the factor of each row's scores [m].
    """
    row_scale = tl.full([query.shape[0]], scale_log2, tl.float32)
    if is_fp8 and query.dtype == tl.bfloat16:
        wide = query.to(tl.float32)
        peak = tl.max(tl.abs(wide), axis=1).to(tl.int32, bitcast=True)
        # Only the exponent is left; where it is 0 or so large that its negative does not exist, the
        # next one that does will do.
        exponent = tl.minimum(tl.maximum(peak >> 23, 1), 253)
        row_scale *= (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        query = (wide * inverse[:, None]).to(tl.float16)
    return query, row_scale
