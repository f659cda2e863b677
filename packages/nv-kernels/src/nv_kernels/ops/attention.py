"""Paged attention: the contract that every attention backend fulfils."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nv_kernels.attention.checks import check_attention_inputs
from nv_kernels.attention.registry import select_attention_backend

if TYPE_CHECKING:
    from torch import Tensor

    from nv_kernels.metadata import AttentionMetadata, FreshKV, LayerKVCache


def paged_attention(
    query: Tensor,
    kv_cache: LayerKVCache,
    metadata: AttentionMetadata,
    *,
    scale: float,
    fresh: FreshKV | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attends from each query token to its sequence's cached tokens up to and with itself.

    The query tokens of a sequence are the last of its context, so the causal mask is aligned to
    the bottom right: the last query sees the whole context. Query head i reads key head
    `i // (num_heads / num_kv_heads)`. Products are accumulated and the softmax is taken in fp32.

    Only slots that hold tokens of a sequence are read: whatever else is in the cache (NaN too)
    cannot reach a result.

    Engines select a backend once and call its `attend`; this function selects on each call.

    Args:
        query: [num_tokens, num_heads, head_dim], fp32, fp16 or bf16; not changed. Any strides but
            a contiguous last dimension, so a slice of a fused projection will do.
        kv_cache: One layer's cache, dtype of `query` or float8_e4m3fn with scales, with this
            step's keys and values already stored (see `store_kv`); not changed. num_kv_heads must
            divide num_heads.
        metadata: The batch, on the same device.
        scale: Factor of the scores before the softmax, usually head_dim ** -0.5; positive.
        fresh: This step's keys and values once more, outside the cache: only if the context of
            every sequence is its query, so that nothing else is cached. A backend reads them where
            that is the faster way; results are the same, to the last bit.
        backend: "auto" or the name of a backend, see `select_attention_backend`.

    Returns:
        A new contiguous tensor, shape and dtype of `query`. Rows of tokens that belong to no
        sequence, or see no cached token, are zero.

    Raises:
        KernelInputError: A shape, dtype, device or stride disagrees, the scale is not positive, or
            the backend cannot run.

    Source: "PagedAttention" (arXiv:2309.06180), "FlashAttention-2" (arXiv:2307.08691).
    """
    check_attention_inputs(query, kv_cache, metadata, scale, fresh)
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = kv_cache.key.shape
    chosen = select_attention_backend(
        backend,
        device=query.device,
        dtype=query.dtype,
        cache_dtype=kv_cache.key.dtype,
        head_dim=head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
    )
    return chosen.attend(query, kv_cache, metadata, scale=scale, fresh=fresh)
