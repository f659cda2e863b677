"""The FlashAttention-2 backend: the `flash-attn` package, from version 2.8."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

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

_MIN_CAPABILITY = (8, 0)
_BLOCK_SIZE_MULTIPLE = 256


class FlashAttention2:
    """Paged attention by the `flash-attn` package."""

    @property
    def name(self) -> str:
        """The name in the registry."""
        return "flash_attn"

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
    if capability < _MIN_CAPABILITY:
        return f"it needs compute capability 8.0 or higher, and this device has {capability}"
    reason = unsupported_shape_reason(shape)
    if reason is not None:
        return reason
    if shape.block_size % _BLOCK_SIZE_MULTIPLE:
        return f"it needs a block_size that is a multiple of 256, not {shape.block_size}"
    # Asked last, so that nobody installs what could not be used anyway.
    error = _import_error()
    if error is not None:
        return (
            f"the flash-attn package cannot be imported here ({error}); "
            "install it with: pip install 'nv-kernels[flash-attn]'"
        )
    return None


def _attend_decode(
    query: Tensor, kv_cache: LayerKVCache, metadata: AttentionMetadata, scale: float
) -> Tensor:
    from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found]

    num_rows = num_decode_rows(metadata)
    output: Tensor = flash_attn_with_kvcache(
        query[:num_rows].unsqueeze(1),
        kv_cache.key,
        kv_cache.value,
        cache_seqlens=metadata.context_lens[:num_rows],
        block_table=metadata.block_table[:num_rows],
        softmax_scale=scale,
        causal=True,
    )
    return append_padding(output.squeeze(1), metadata)


def _attend_mixed(
    query: Tensor, kv_cache: LayerKVCache, metadata: AttentionMetadata, scale: float
) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    # With a block table the kernel takes only the differences of `cu_seqlens_k`, the context
    # lengths. They are summed up here on every call because a captured graph must do so again on
    # every replay.
    cu_seqlens_k = pad(metadata.context_lens.cumsum(0, dtype=torch.int32), (1, 0))
    output: Tensor = flash_attn_varlen_func(
        query,
        kv_cache.key,
        kv_cache.value,
        metadata.cu_seqlens_q,
        cu_seqlens_k,
        metadata.max_query_len,
        metadata.max_context_len,
        softmax_scale=scale,
        causal=True,
        block_table=metadata.block_table,
    )
    return clear_padding(output, metadata)


@cache
def _import_error() -> str | None:
    # Cached because a failing import searches the whole path again on every call.
    try:
        import flash_attn  # noqa: F401
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None
