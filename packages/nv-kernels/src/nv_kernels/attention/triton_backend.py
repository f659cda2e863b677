"""The Triton backend: our own kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.attention.checks import check_attention_inputs
from nv_kernels.checks import FLOAT_DTYPES
from nv_kernels.dispatch import triton_unavailable_reason
from nv_kernels.kv_quantisation import FP8

if TYPE_CHECKING:
    from torch import Tensor

    from nv_kernels.attention.backend import AttentionShape
    from nv_kernels.metadata import AttentionMetadata, FreshKV, LayerKVCache

_MAX_HEAD_DIM = 256  # the accumulator of one tile has to fit in registers
_MAX_GROUP = 128
_MIN_CAPABILITY_FP8 = (8, 9)  # the first that converts fp8


class TritonAttention:
    """Paged attention by Triton kernels for decode steps and for prompts.

    The result of a decode step does not depend on the rest of the batch, down to the last bit.
    """

    @property
    def name(self) -> str:
        """The name in the registry."""
        return "triton"

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
        from nv_kernels.triton.attention import paged_attention

        check_attention_inputs(query, kv_cache, metadata, scale, fresh)
        return paged_attention(query, kv_cache, metadata, scale=scale, fresh=fresh)


def unavailable_reason(shape: AttentionShape) -> str | None:
    """Says why this backend cannot run, as a clause; None when it can."""
    reason = triton_unavailable_reason(shape.device)
    if reason is not None:
        return reason
    if shape.dtype not in FLOAT_DTYPES:
        return f"it computes in float32, float16 and bfloat16, not {shape.dtype}"
    if shape.device.type != "cuda" and shape.cache_dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices wrongly"
    if shape.cache_dtype == FP8 and shape.device.type == "cuda":
        capability = torch.cuda.get_device_capability(shape.device)
        if capability < _MIN_CAPABILITY_FP8:
            return (
                "it reads fp8 caches from compute capability 8.9 on, and this device has "
                f"{capability}"
            )
    if shape.head_dim > _MAX_HEAD_DIM:
        return f"it supports head_dim up to {_MAX_HEAD_DIM}, not {shape.head_dim}"
    group = shape.num_heads // shape.num_kv_heads
    if group > _MAX_GROUP:
        return f"it supports up to {_MAX_GROUP} query heads per key head, not {group}"
    return None
