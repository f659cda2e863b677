"""The FlashAttention-3 backend: the module `flash_attn_interface`, for Hopper GPUs.

It comes from the folder `hopper` of FlashAttention's repository and is built from source; no
package index offers it, so this file has been checked against its signature and documentation, not
by running it. Unlike the flash-attn package it has one function that takes a block table, for
decode steps and prompts alike, and takes blocks of any size.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from nv_kernels.attention.checks import check_attention_inputs
from nv_kernels.attention.flash_attn_common import (
    append_padding,
    clear_padding,
    has_no_context,
    num_decode_rows,
    unsupported_shape_reason,
)

if TYPE_CHECKING:
    from torch import Tensor

    from nv_kernels.attention.backend import AttentionShape
    from nv_kernels.metadata import AttentionMetadata, FreshKV, LayerKVCache

_CAPABILITY_MAJOR = 9


class FlashAttention3:
    """Paged attention by `flash_attn_interface`.

    Into how many parts it splits a context depends on the whole batch, and with it the last bits of
    a result.
    """

    @property
    def name(self) -> str:
        """The name in the registry."""
        return "flash_attn_3"

    @property
    def waits_for_host(self) -> bool:
        """Whether no CUDA graph can capture it."""
        return False

    def attend(
        self,
        query: Tensor,
        kv_cache: LayerKVCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        fresh: FreshKV | None = None,
    ) -> Tensor:
        """Computes attention; see `nv_kernels.ops.attention.paged_attention`."""
        check_attention_inputs(query, kv_cache, metadata, scale, fresh)
        if has_no_context(metadata):
            return query.new_zeros(query.shape)
        attend = _attend_decode if metadata.max_query_len == 1 else _attend_mixed
        return attend(query, kv_cache, metadata, scale)


def unavailable_reason(shape: AttentionShape) -> str | None:
    """Says why this backend cannot run, as a clause; None when it can."""
    if shape.device.type != "cuda":
        return f"it needs a CUDA device, not {shape.device.type}"
    capability = torch.cuda.get_device_capability(shape.device)
    if capability[0] != _CAPABILITY_MAJOR:
        return f"it needs compute capability 9.x (Hopper), and this device has {capability}"
    reason = unsupported_shape_reason(shape)
    if reason is not None:
        return reason
    # Asked last, so that nobody installs what could not be used anyway.
    error = _import_error()
    if error is not None:
        return (
            f"the module flash_attn_interface cannot be imported here ({error}); build "
            "FlashAttention-3 from the folder hopper of FlashAttention's repository, which needs "
            "CUDA 12.3 or newer"
        )
    return None


def _attend_decode(
    query: Tensor, kv_cache: LayerKVCache, metadata: AttentionMetadata, scale: float
) -> Tensor:
    from flash_attn_interface import flash_attn_with_kvcache  # type: ignore[import-not-found]

    num_rows = num_decode_rows(metadata)
    output: Tensor = flash_attn_with_kvcache(
        query[:num_rows].unsqueeze(1),
        kv_cache.key,
        kv_cache.value,
        cache_seqlens=metadata.context_lens[:num_rows],
        page_table=metadata.block_table[:num_rows],
        softmax_scale=scale,
        causal=True,
    )
    return append_padding(output.squeeze(1), metadata)


def _attend_mixed(
    query: Tensor, kv_cache: LayerKVCache, metadata: AttentionMetadata, scale: float
) -> Tensor:
    from flash_attn_interface import flash_attn_with_kvcache

    output: Tensor = flash_attn_with_kvcache(
        query,
        kv_cache.key,
        kv_cache.value,
        cache_seqlens=metadata.context_lens,
        page_table=metadata.block_table,
        cu_seqlens_q=metadata.cu_seqlens_q,
        max_seqlen_q=metadata.max_query_len,
        softmax_scale=scale,
        causal=True,
    )
    return clear_padding(output, metadata)


@cache
def _import_error() -> str | None:
    # Cached because a failing import searches the whole path again on every call.
    try:
        import flash_attn_interface  # noqa: F401
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None
