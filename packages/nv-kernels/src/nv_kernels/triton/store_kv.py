"""Writing keys and values into the paged cache as a Triton kernel.

Legend: one program copies (for an fp8 cache, rounds) all num_kv_heads * head_dim elements of one
token; block_n is that number, rounded up to a power of two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from nv_kernels.kv_quantisation import FP8
from nv_kernels.triton.device import device_of
from nv_kernels.triton.fp8 import store_in_cache

if TYPE_CHECKING:
    from torch import Tensor


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float,
    v_scale: float,
) -> None:
    """Implements `nv_kernels.ops.store_kv.store_kv`."""
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    with device_of(key):
        _store_kv_kernel[(num_tokens,)](
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            1 / k_scale,
            1 / v_scale,
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=key_cache.shape[1],
            is_fp8=key_cache.dtype == FP8,
            block_n=triton.next_power_of_2(num_kv_heads * head_dim),
        )


@triton.jit  # type: ignore[untyped-decorator]
def _store_kv_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    inverse_k_scale: tl.tensor,
    inverse_v_scale: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    key_cache_block_stride: tl.tensor,
    key_cache_offset_stride: tl.tensor,
    key_cache_head_stride: tl.tensor,
    value_cache_block_stride: tl.tensor,
    value_cache_offset_stride: tl.tensor,
    value_cache_head_stride: tl.tensor,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    is_fp8: tl.constexpr,
    block_n: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    # int64 from here on: a pool of a few GB has more elements than int32 can count.
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot < 0:
        return
    block, offset = slot // block_size, slot % block_size
    element = tl.arange(0, block_n)
    head, dim = (element // head_dim).to(tl.int64), element % head_dim
    inside = head < num_kv_heads
    key = tl.load(key_ptr + token * key_token_stride + head * key_head_stride + dim, mask=inside)
    store_in_cache(
        key_cache_ptr
        + block * key_cache_block_stride
        + offset * key_cache_offset_stride
        + head * key_cache_head_stride
        + dim,
        key,
        inverse_k_scale,
        inside,
        is_fp8,
    )
    value = tl.load(
        value_ptr + token * value_token_stride + head * value_head_stride + dim, mask=inside
    )
    store_in_cache(
        value_cache_ptr
        + block * value_cache_block_stride
        + offset * value_cache_offset_stride
        + head * value_cache_head_stride
        + dim,
        value,
        inverse_v_scale,
        inside,
        is_fp8,
    )
