"""Paged attention over a mixed batch: decode steps and prompts by a kernel each.

Knows which launches a batch needs and how they are configured. `decode_attention.py`,
`prefill_attention.py` and `hopper_prefill_attention.py` are the kernels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-untyped]

from nv_kernels.kv_quantisation import FP8
from nv_kernels.triton.decode_attention import DecodeConfig, attend_to_decodes
from nv_kernels.triton.device import (
    device_of,
    is_hopper,
    num_processors,
    shared_memory_bytes,
)
from nv_kernels.triton.prefill_attention import PrefillConfig, attend_to_prompts

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from nv_kernels.metadata import AttentionMetadata, FreshKV, LayerKVCache


_LONG_QUERY = 2048
"""Tokens from which on a query's keys are read so often that larger tiles pay."""


def paged_attention(
    query: Tensor,
    kv_cache: LayerKVCache,
    metadata: AttentionMetadata,
    *,
    scale: float,
    fresh: FreshKV | None = None,
) -> Tensor:
    """Implements `nv_kernels.ops.attention.paged_attention`; the host never waits."""
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if metadata.num_tokens == 0:
        return output
    if metadata.num_seqs == 0 or metadata.block_table.shape[1] == 0:
        return output.zero_()  # no context anywhere, and no table to look into
    scale_log2 = scale * kv_cache.k_scale * math.log2(math.e)
    only_decodes = metadata.max_query_len <= 1
    has_decodes = metadata.min_query_len <= 1
    with device_of(query):
        if only_decodes or has_decodes:
            attend_to_decodes(
                query,
                kv_cache,
                metadata,
                output,
                scale_log2=scale_log2,
                owns_padding=only_decodes,
                config=choose_decode_config(query, kv_cache, metadata.num_seqs),
            )
        if not only_decodes:
            on_hopper = _hopper_kernel(query, kv_cache)
            if on_hopper is not None:
                on_hopper(query, kv_cache, metadata, output, scale_log2=scale_log2, min_query_len=2)
            else:
                attend_to_prompts(
                    query,
                    kv_cache,
                    metadata,
                    output,
                    scale_log2=scale_log2,
                    min_query_len=2,
                    config=choose_prefill_config(query, kv_cache, metadata.max_query_len),
                    fresh=fresh if _reads_fresh(query, kv_cache, metadata) else None,
                )
    return output


def _hopper_kernel(query: Tensor, kv_cache: LayerKVCache) -> Callable[..., None] | None:
    """The kernel for prompts on Hopper, if the device is one and the kernel takes these tensors."""
    if not is_hopper(query.device):
        return None
    # Not at the top: the language it is written in takes time to import.
    from nv_kernels.triton import hopper_prefill_attention as hopper

    return hopper.attend_to_prompts if hopper.can_attend_to_prompts(query, kv_cache) else None


def _reads_fresh(query: Tensor, kv_cache: LayerKVCache, metadata: AttentionMetadata) -> bool:
    """Whether fresh keys are read rather than cached ones: where that is faster (docs/kernels.md).

    Never for an fp8 cache: later chunks and decode steps see rounded keys, and so must these.
    """
    return kv_cache.key.dtype == query.dtype and metadata.max_query_len <= _LONG_QUERY


def choose_decode_config(query: Tensor, kv_cache: LayerKVCache, num_seqs: int) -> DecodeConfig:
    """Looks up how to decode, measured on an H200 (see docs/kernels.md).

    Args:
        query: [num_tokens, num_heads, head_dim].
        kv_cache: One layer's cache.
        num_seqs: Sequences in the batch, padding included.

    Returns:
        The configuration. A function of shapes alone, so that a captured graph may rely on it.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = kv_cache.key.shape[2]
    rows = max(16, triton.next_power_of_2(num_heads // num_kv_heads))
    num_programs = num_seqs * num_kv_heads  # of the direct kernel
    processors = num_processors(query.device)
    # With three tiles in flight a processor holds three programs, with two it holds four. Three
    # are faster unless they need a second round where four would need one. Tiles of fp8 are half
    # as large: a processor holds four programs anyway.
    one_round_of_four = (
        3 * processors < num_programs <= 4 * processors and rows == 16 and kv_cache.key.dtype != FP8
    )
    if 4 * num_programs < 3 * processors:
        longest_direct = 0
    else:
        # While a long context is walked by one program, the others must have work.
        longest_direct = 4096 if 2 * num_programs >= 3 * processors else 1024
    return DecodeConfig(
        block_n=_choose_block_n(query),
        num_warps=4 if rows * head_dim <= 8192 else 8,
        num_stages=2 if one_round_of_four else 3,
        max_registers=128 if one_round_of_four else None,
        programs_per_processor=3,
        longest_direct=longest_direct,
    )


def choose_prefill_config(
    query: Tensor, kv_cache: LayerKVCache, max_query_len: int
) -> PrefillConfig:
    """Looks up how to attend from prompts, measured on an H200 (see docs/kernels.md).

    Args:
        query: [num_tokens, num_heads, head_dim].
        kv_cache: One layer's cache.
        max_query_len: At least the longest query, in tokens.

    Returns:
        The configuration; none of it changes a result by more than rounding.
    """
    num_heads, head_dim = query.shape[1:]
    group = num_heads // kv_cache.key.shape[2]
    row_bytes = triton.next_power_of_2(head_dim) * query.element_size()
    if row_bytes <= 256:
        # Two programs of 64 rows overlap better than one of 128, until the reuse of keys counts.
        rows = 64 if max_query_len <= _LONG_QUERY else 128
        num_stages = 3 if shared_memory_bytes(query.device) >= 128 << 10 else 2
    else:
        rows = 64 if query.element_size() == 2 else 32
        num_stages = 2
    block_m = max(rows, triton.next_power_of_2(group))
    return PrefillConfig(
        block_m=block_m,
        block_n=_choose_block_n(query),
        num_warps=8 if block_m * head_dim > 8192 else 4,
        num_stages=num_stages,
    )


def _choose_block_n(query: Tensor) -> int:
    """Tokens per tile of keys: 64, or as many as fit in 16 KB."""
    row_bytes = triton.next_power_of_2(query.shape[2]) * query.element_size()
    return int(max(16, min(64, 16384 // row_bytes)))
