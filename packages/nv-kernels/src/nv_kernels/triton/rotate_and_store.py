"""Norm, rotation and cache write of a fused projection as one Triton kernel.

Legend: half = head_dim / 2, r pairs of a head (half rounded up to a power of two), h heads of a
tile. One program takes up to block_h heads of one kind of one token: query heads are normalised,
rotated and written out, key heads the same but into the cache, value heads are copied there. An
fp8 cache rounds what is stored once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from nv_kernels.kv_quantisation import FP8
from nv_kernels.triton.device import device_of
from nv_kernels.triton.fp8 import store_in_cache
from nv_kernels.triton.launch import launch_options, wait_for_previous

if TYPE_CHECKING:
    from torch import Tensor

_TILE_PAIRS = 512  # with two warps, 16-byte accesses of 8 bf16 each


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
    k_scale: float,
    v_scale: float,
    is_settled: bool,
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
    block_r = triton.next_power_of_2(half)
    block_h = max(1, _TILE_PAIRS // block_r)
    num_query_parts, num_kv_parts = (
        triton.cdiv(num_heads, block_h),
        triton.cdiv(num_kv_heads, block_h),
    )
    with device_of(qkv):
        _rotate_and_store_kernel[(num_tokens, num_query_parts + 2 * num_kv_parts)](
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
            1 / k_scale,
            1 / v_scale,
            *qkv.stride()[:2],
            cos_sin_cache.stride(0),
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            num_query_parts=num_query_parts,
            num_kv_parts=num_kv_parts,
            half=half,
            block_size=block_size,
            has_norm=query_weight is not None,
            is_fp8=key_cache.dtype == FP8,
            is_settled=is_settled,
            block_h=block_h,
            block_r=block_r,
            num_warps=2,
            **launch_options(qkv),
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
    inverse_k_scale: tl.tensor,
    inverse_v_scale: tl.tensor,
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
    num_query_parts: tl.constexpr,
    num_kv_parts: tl.constexpr,
    half: tl.constexpr,
    block_size: tl.constexpr,
    has_norm: tl.constexpr,
    is_fp8: tl.constexpr,
    is_settled: tl.constexpr,
    block_h: tl.constexpr,
    block_r: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    h = tl.arange(0, block_h)[:, None]
    pair = tl.arange(0, block_r)[None, :]
    inside_r = pair < half
    # Every program reads all that comes before the projection, needed or not: these reads are done
    # when the projection is.
    first_weight, second_weight = tl.full([], 1.0, tl.float32), tl.full([], 1.0, tl.float32)
    if has_norm:
        weight_ptr = (query_weight_ptr if part < num_query_parts else key_weight_ptr) + pair
        first_weight = tl.load(weight_ptr, mask=inside_r, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + half, mask=inside_r, other=0.0).to(tl.float32)
    wait_for_previous(overlaps and not is_settled)
    cos_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * cos_sin_stride + pair
    cos = tl.load(cos_ptr, mask=inside_r, other=0.0)
    sin = tl.load(cos_ptr + half, mask=inside_r, other=0.0)
    # int64: a pool of a few GB has more elements than int32 can count.
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    wait_for_previous(overlaps and is_settled)
    token_ptr = qkv_ptr + token * qkv_token_stride + pair
    if part < num_query_parts:
        head = part * block_h + h
        inside = (head < num_heads) & inside_r
        source_ptr = token_ptr + head * qkv_head_stride
        first, second = _load_rotated(
            source_ptr, inside, first_weight, second_weight, cos, sin, eps, half, has_norm
        )
        target_ptr = query_ptr + (token * num_heads + head) * (2 * half) + pair
        tl.store(target_ptr, first, mask=inside)
        tl.store(target_ptr + half, second, mask=inside)
        return
    if slot < 0:
        return
    block, offset = slot // block_size, slot % block_size
    part -= num_query_parts
    if part < num_kv_parts:
        head = part * block_h + h
        inside = (head < num_kv_heads) & inside_r
        source_ptr = token_ptr + (num_heads + head) * qkv_head_stride
        first, second = _load_rotated(
            source_ptr, inside, first_weight, second_weight, cos, sin, eps, half, has_norm
        )
        slot_ptr = key_cache_ptr + block * key_block_stride + offset * key_offset_stride
        target_ptr = slot_ptr + head.to(tl.int64) * key_head_stride + pair
        inverse_scale = inverse_k_scale
    else:
        head = (part - num_kv_parts) * block_h + h
        inside = (head < num_kv_heads) & inside_r
        source_ptr = token_ptr + (num_heads + num_kv_heads + head) * qkv_head_stride
        first = tl.load(source_ptr, mask=inside, other=0.0)
        second = tl.load(source_ptr + half, mask=inside, other=0.0)
        slot_ptr = value_cache_ptr + block * value_block_stride + offset * value_offset_stride
        target_ptr = slot_ptr + head.to(tl.int64) * value_head_stride + pair
        inverse_scale = inverse_v_scale
    store_in_cache(target_ptr, first, inverse_scale, inside, is_fp8)
    store_in_cache(target_ptr + half, second, inverse_scale, inside, is_fp8)


@triton.jit  # type: ignore[untyped-decorator]
def _load_rotated(
    source_ptr: tl.tensor,
    inside: tl.tensor,
    first_weight: tl.tensor,
    second_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: tl.tensor,
    half: tl.constexpr,
    has_norm: tl.constexpr,
) -> tl.tuple:
    """Loads heads, [h, r] pointers to their first halves, and returns their rotated halves.

    Weights (if normalised), cosines and sines are [1, r] fp32.
    """
    dtype = source_ptr.dtype.element_ty
    first = tl.load(source_ptr, mask=inside, other=0.0)
    second = tl.load(source_ptr + half, mask=inside, other=0.0)
    if has_norm:
        wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
        squares = wide_first * wide_first + wide_second * wide_second
        scale = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / (2 * half) + eps)
        # Rounded twice, as the norm alone does it.
        first = ((wide_first * scale).to(dtype).to(tl.float32) * first_weight).to(dtype)
        second = ((wide_second * scale).to(dtype).to(tl.float32) * second_weight).to(dtype)
    x, y = first.to(tl.float32), second.to(tl.float32)
    return (x * cos - y * sin).to(dtype), (y * cos + x * sin).to(dtype)
