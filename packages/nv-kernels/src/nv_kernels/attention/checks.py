"""The argument checks that all attention backends share."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from nv_kernels.checks import FLOAT_DTYPES, check_last_dim_contiguous, check_tensor
from nv_kernels.errors import KernelInputError
from nv_kernels.kv_quantisation import FP8, check_scales, read_dtypes

if TYPE_CHECKING:
    from torch import Tensor

    from nv_kernels.metadata import AttentionMetadata, FreshKV, LayerKVCache


def check_attention_inputs(
    query: Tensor,
    kv_cache: LayerKVCache,
    metadata: AttentionMetadata,
    scale: float,
    fresh: FreshKV | None = None,
) -> None:
    """Raises unless query, cache, metadata, scale and fresh keys and values fit together.

    Args:
        query: See `nv_kernels.ops.attention.paged_attention`.
        kv_cache: See there.
        metadata: See there.
        scale: See there.
        fresh: See there.

    Raises:
        KernelInputError: A shape, dtype, device or stride disagrees, the block table is too narrow
            for the longest context, or the scale is not positive.
    """
    layout = "[num_tokens, num_heads, head_dim]"
    check_tensor("query", query, layout, [metadata.num_tokens, None, None], dtypes=FLOAT_DTYPES)
    _, num_heads, head_dim = query.shape
    device = query.device
    key_cache, value_cache = kv_cache.key, kv_cache.value
    cache_layout = "[num_blocks, block_size, num_kv_heads, head_dim]"
    cache_sizes = [None, None, None, head_dim]
    check_tensor(
        "kv_cache.key",
        key_cache,
        cache_layout,
        cache_sizes,
        dtypes=read_dtypes(query.dtype),
        device=device,
    )
    check_tensor(
        "kv_cache.value",
        value_cache,
        cache_layout,
        key_cache.shape,
        dtypes=(key_cache.dtype,),
        device=device,
    )
    check_scales(key_cache.dtype, kv_cache.k_scale, kv_cache.v_scale)
    if key_cache.dtype == FP8:
        _check_even("kv_cache.value", value_cache)
    check_last_dim_contiguous("query", query)
    check_last_dim_contiguous("kv_cache.key", key_cache)
    check_last_dim_contiguous("kv_cache.value", value_cache)
    if metadata.context_lens.device != device:
        raise KernelInputError(
            f"metadata is on {metadata.context_lens.device}, but query is on {device}. "
            f"Build the metadata on '{device}'."
        )
    _, block_size, num_kv_heads, _ = key_cache.shape
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise KernelInputError(
            f"query has {num_heads} heads and kv_cache {num_kv_heads}, but each key head must "
            "serve the same number of query heads. Make num_heads a multiple of num_kv_heads."
        )
    if head_dim == 0:
        raise KernelInputError(
            "query and kv_cache have head_dim 0, but a head must have dimensions. Pass whole heads."
        )
    if not isinstance(scale, (int, float)) or not 0 < scale < inf:
        raise KernelInputError(
            f"scale is {scale!r}, but must be a positive number. Pass head_dim ** -0.5, or what "
            "the model's config says instead; for a negative one, negate the query."
        )
    reach = metadata.block_table.shape[1] * block_size
    if metadata.num_seqs > 0 and metadata.max_context_len > reach:
        raise KernelInputError(
            f"metadata.block_table has {metadata.block_table.shape[1]} blocks of {block_size} "
            f"tokens per sequence, but max_context_len is {metadata.max_context_len} tokens. "
            "Widen the block table, or pass the true longest context."
        )
    if fresh is not None:
        layout = "[num_tokens, num_kv_heads, head_dim]"
        sizes = [metadata.num_tokens, num_kv_heads, head_dim]
        for name, tensor in (("fresh.key", fresh.key), ("fresh.value", fresh.value)):
            check_tensor(name, tensor, layout, sizes, dtypes=(query.dtype,), device=device)
            check_last_dim_contiguous(name, tensor)


def _check_even(name: str, cache: Tensor) -> None:
    """Raises unless values can be read in pairs, as the Triton kernel does."""
    if any(stride % 2 for stride in cache.stride()[:-1]) or cache.storage_offset() % 2:
        raise KernelInputError(
            f"{name} is fp8 and has strides {list(cache.stride())} and storage offset "
            f"{cache.storage_offset()}, but all of these must be even but the last stride. Pad "
            "tokens and heads to an even number of elements."
        )
