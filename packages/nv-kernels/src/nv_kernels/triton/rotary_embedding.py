"""Rotary position embedding as a Triton kernel.

Legend: h heads, r = rotary_dim / 2 rotated pairs, p = head_dim - rotary_dim dimensions that pass
unchanged; block_h, block_r and block_p are these, rounded up to powers of two. One program
rotates every query and key head of one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from nv_kernels.triton.device import device_of

if TYPE_CHECKING:
    from torch import Tensor


def rotary_embedding(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor
) -> tuple[Tensor, Tensor]:
    """Implements `nv_kernels.ops.rotary_embedding.rotary_embedding`.

    Cosine and sine stay fp32, so that a bf16 result is rounded once.
    """
    rotated_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    rotated_key = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, half = key.shape[1], cos_sin_cache.shape[1] // 2
    if num_tokens == 0:
        return rotated_query, rotated_key
    with device_of(query):
        _rotary_embedding_kernel[(num_tokens,)](
            query,
            key,
            rotated_query,
            rotated_key,
            positions,
            cos_sin_cache,
            query.stride(0),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            cos_sin_cache.stride(0),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            half=half,
            block_h=triton.next_power_of_2(num_heads),
            block_kh=triton.next_power_of_2(num_kv_heads),
            block_r=triton.next_power_of_2(half),
            block_p=triton.next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0,
        )
    return rotated_query, rotated_key


@triton.jit  # type: ignore[untyped-decorator]
def _rotary_embedding_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    rotated_query_ptr: tl.tensor,
    rotated_key_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    cos_sin_stride: tl.tensor,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    block_h: tl.constexpr,
    block_kh: tl.constexpr,
    block_r: tl.constexpr,
    block_p: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    pair = tl.arange(0, block_r)
    cos_ptr = cos_sin_ptr + position * cos_sin_stride + pair
    cos = tl.load(cos_ptr, mask=pair < half, other=0.0)[None, :]
    sin = tl.load(cos_ptr + half, mask=pair < half, other=0.0)[None, :]
    _rotate_heads(
        query_ptr + token * query_token_stride,
        rotated_query_ptr + token * num_heads * head_dim,
        query_head_stride,
        cos,
        sin,
        num_heads,
        head_dim,
        half,
        block_h,
        block_r,
        block_p,
    )
    _rotate_heads(
        key_ptr + token * key_token_stride,
        rotated_key_ptr + token * num_kv_heads * head_dim,
        key_head_stride,
        cos,
        sin,
        num_kv_heads,
        head_dim,
        half,
        block_kh,
        block_r,
        block_p,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_heads(
    input_ptr: tl.tensor,
    output_ptr: tl.tensor,
    head_stride: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    block_h: tl.constexpr,
    block_r: tl.constexpr,
    block_p: tl.constexpr,
) -> None:
    head = tl.arange(0, block_h)[:, None]
    pair = tl.arange(0, block_r)[None, :]
    inside = (head < num_heads) & (pair < half)
    first_ptr = input_ptr + head * head_stride + pair
    first = tl.load(first_ptr, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + half, mask=inside, other=0.0).to(tl.float32)
    dtype = output_ptr.dtype.element_ty
    rotated_ptr = output_ptr + head * head_dim + pair
    tl.store(rotated_ptr, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(rotated_ptr + half, (second * cos + first * sin).to(dtype), mask=inside)
    if block_p > 0:
        rest = 2 * half + tl.arange(0, block_p)[None, :]
        inside_rest = (head < num_heads) & (rest < head_dim)
        passed = tl.load(input_ptr + head * head_stride + rest, mask=inside_rest, other=0.0)
        tl.store(output_ptr + head * head_dim + rest, passed, mask=inside_rest)
