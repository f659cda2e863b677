"""Writing this step's keys and values into one layer's paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nv_kernels.checks import (
    INDEX_DTYPES,
    check_is_tensor,
    check_last_dim_contiguous,
    check_tensor,
)
from nv_kernels.dispatch import choose_implementation
from nv_kernels.kv_quantisation import check_scales, stored_dtypes
from nv_kernels.reference.store_kv import store_kv as store_kv_reference

if TYPE_CHECKING:
    from torch import Tensor


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    backend: str = "auto",
) -> None:
    """Writes keys and values to their slots in the paged cache.

    Args:
        key: New keys, [num_tokens, num_kv_heads, head_dim], any dtype, the cache's too; for an fp8
            cache fp32, fp16 or bf16. Any strides but a contiguous last dimension, so a slice of a
            fused projection will do.
        value: New values, same shape and dtype as `key`, strides of their own.
        key_cache: One layer's keys, [num_blocks, block_size, num_kv_heads, head_dim], any strides
            but a contiguous last dimension. Changed in place, at the slots and nowhere else.
        value_cache: One layer's values, same shape and dtype, strides of its own; changed too.
        slot_mapping: Target slot `block_id * block_size + offset` of each token, [num_tokens]
            int32 or int64, each below num_blocks * block_size; -1 means "do not store". No slot
            may appear twice. The values are not checked.
        k_scale: For an fp8 cache, what its keys will be multiplied by when they are read: stored
            is key / k_scale, cut off at +-448; NaN stays NaN (see `kv_quantisation.py`).
        v_scale: The same for values.
        backend: "auto", "torch" or "triton".

    Raises:
        KernelInputError: A shape, dtype, device or stride disagrees, or a scale is not positive.

    Source: "PagedAttention", section 4.2 (arXiv:2309.06180).
    """
    check_is_tensor("key_cache", key_cache)
    dtypes, device = (key_cache.dtype,), key_cache.device
    cache_layout = "[num_blocks, block_size, num_kv_heads, head_dim]"
    check_tensor("key_cache", key_cache, cache_layout, [None] * 4, dtypes=dtypes)
    check_tensor(
        "value_cache", value_cache, cache_layout, key_cache.shape, dtypes=dtypes, device=device
    )
    sizes = [None, *key_cache.shape[2:]]
    layout = "[num_tokens, num_kv_heads, head_dim]"
    check_tensor("key", key, layout, sizes, dtypes=stored_dtypes(key_cache.dtype), device=device)
    check_tensor("value", value, layout, key.shape, dtypes=(key.dtype,), device=device)
    check_tensor(
        "slot_mapping",
        slot_mapping,
        "[num_tokens]",
        key.shape[:1],
        dtypes=INDEX_DTYPES,
        device=device,
    )
    check_last_dim_contiguous("key", key)
    check_last_dim_contiguous("value", value)
    check_last_dim_contiguous("key_cache", key_cache)
    check_last_dim_contiguous("value_cache", value_cache)
    check_last_dim_contiguous("slot_mapping", slot_mapping)
    check_scales(key_cache.dtype, k_scale, v_scale)
    run = store_kv_reference
    if choose_implementation(backend, device) == "triton":
        from nv_kernels.triton.store_kv import store_kv as run
    run(key, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
