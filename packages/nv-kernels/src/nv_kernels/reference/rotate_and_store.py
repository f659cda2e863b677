"""Norm, rotation and cache write of a fused projection, as the three ops that it joins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nv_kernels.reference.rms_norm import rms_norm
from nv_kernels.reference.rotary_embedding import rotary_embedding
from nv_kernels.reference.store_kv import store_kv

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
    k_scale: float,
    v_scale: float,
) -> Tensor:
    """Implements `nv_kernels.ops.rotate_and_store.rotate_and_store`."""
    num_kv_heads = key_cache.shape[2]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    query, key, value = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)  # type: ignore[no-untyped-call]
    if query_weight is not None and key_weight is not None:
        query = rms_norm(query, query_weight, eps=eps)
        key = rms_norm(key, key_weight, eps=eps)
    query, key = rotary_embedding(query, key, positions, cos_sin_cache)
    store_kv(key, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    return query
