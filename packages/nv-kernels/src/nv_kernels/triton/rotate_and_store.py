"""Norm, rotation and cache write of a fused projection as one Triton kernel.

Legend: half = head_dim / 2, block_r is half rounded up to a power of two. One program takes one
head of one token: a query head is normalised, rotated and written out, a key head the same but into
the cache, a value head is copied there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from nv_kernels.triton.device import device_of

if TYPE_CHECKING:
    from torch import Tensor


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """Implements `nv_kernels.ops.rotate_and_store.rotate_and_store`.

    Cosine and sine stay fp32, so that a bf16 result is rounded once after the norm's own rounding.
    """
    num_tokens, num_all_heads, head_dim = qkv.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    num_heads = num_all_heads - 2 * num_kv_heads
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return query
    half = head_dim // 2
    with device_of(qkv):
        _rotate_and_store_kernel[(num_tokens, num_all_heads)](
            qkv,
            positions,
            cos_sin_cache,
            key_cache,
            value_cache,
            slot_mapping,
            qkv if query_weight is None else query_weight,
            qkv if key_weight is None else key_weight,
            query,
            eps,
            *qkv.stride()[:2],
            cos_sin_cache.stride(0),
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            half=half,
            block_size=block_size,
            has_norm=query_weight is not None,
            block_r=triton.next_power_of_2(half),
            num_warps=1,
        )
    return query


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_store_kernel(
    qkv_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    query_weight_ptr: tl.tensor,
    key_weight_ptr: tl.tensor,
    query_ptr: tl.tensor,
    eps: tl.tensor,
    qkv_token_stride: tl.tensor,
    qkv_head_stride: tl.tensor,
    cos_sin_stride: tl.tensor,
    key_block_stride: tl.tensor,
    key_offset_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_offset_stride: tl.tensor,
    value_head_stride: tl.tensor,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    half: tl.constexpr,
    block_size: tl.constexpr,
    has_norm: tl.constexpr,
    block_r: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, block_r)
    inside = pair < half
    dtype = query_ptr.dtype.element_ty
    # int64 from here on: a pool of a few GB has more elements than int32 can count.
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if (head >= num_heads) & (slot < 0):
        return
    block, offset = slot // block_size, slot % block_size
    source_ptr = qkv_ptr + token * qkv_token_stride + head * qkv_head_stride + pair
    first = tl.load(source_ptr, mask=inside, other=0.0)
    second = tl.load(source_ptr + half, mask=inside, other=0.0)

    if head >= num_heads + num_kv_heads:
        target_ptr = (
            value_cache_ptr
            + block * value_block_stride
            + offset * value_offset_stride
            + (head - num_heads - num_kv_heads) * value_head_stride
            + pair
        )
        tl.store(target_ptr, first, mask=inside)
        tl.store(target_ptr + half, second, mask=inside)
        return

    is_query = head < num_heads
    if has_norm:
        wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
        total = tl.sum(wide_first * wide_first, axis=0) + tl.sum(wide_second * wide_second, axis=0)
        scale = tl.rsqrt(total / (2 * half) + eps)
        weight_ptr = tl.where(is_query, query_weight_ptr, key_weight_ptr) + pair
        first_weight = tl.load(weight_ptr, mask=inside, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + half, mask=inside, other=0.0).to(tl.float32)
        # Rounded twice, as the norm alone does it.
        first = ((wide_first * scale).to(dtype).to(tl.float32) * first_weight).to(dtype)
        second = ((wide_second * scale).to(dtype).to(tl.float32) * second_weight).to(dtype)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos_ptr = cos_sin_ptr + position * cos_sin_stride + pair
    cos = tl.load(cos_ptr, mask=inside, other=0.0)
    sin = tl.load(cos_ptr + half, mask=inside, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    rotated_first, rotated_second = (x * cos - y * sin).to(dtype), (y * cos + x * sin).to(dtype)
    if is_query:
        target_ptr = query_ptr + (token * num_heads + head) * (2 * half) + pair
        tl.store(target_ptr, rotated_first, mask=inside)
        tl.store(target_ptr + half, rotated_second, mask=inside)
    else:
        target_ptr = (
            key_cache_ptr
            + block * key_block_stride
            + offset * key_offset_stride
            + (head - num_heads) * key_head_stride
            + pair
        )
        tl.store(target_ptr, rotated_first, mask=inside)
        tl.store(target_ptr + half, rotated_second, mask=inside)
