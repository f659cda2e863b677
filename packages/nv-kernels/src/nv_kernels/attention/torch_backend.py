"""The PyTorch backend: runs everywhere, serves on a CPU.

Steps with prompts run the reference, one sequence at a time; decode steps on a CPU run batched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nv_kernels.attention.checks import check_attention_inputs
from nv_kernels.checks import FLOAT_DTYPES
from nv_kernels.cpu.decode_attention import can_attend, paged_decode_attention
from nv_kernels.reference.attention import paged_attention

if TYPE_CHECKING:
    from torch import Tensor

    from nv_kernels.attention.backend import AttentionShape
    from nv_kernels.metadata import AttentionMetadata, FreshKV, LayerKVCache


class TorchAttention:
    """Paged attention by `scaled_dot_product_attention`."""

    @property
    def name(self) -> str:
        """The name in the registry."""
        return "torch"

    @property
    def waits_for_host(self) -> bool:
        """Whether no CUDA graph can capture it."""
        return True

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
        attend = paged_decode_attention if can_attend(kv_cache, metadata) else paged_attention
        return attend(query, kv_cache, metadata, scale=scale)


def unavailable_reason(shape: AttentionShape) -> str | None:
    """Says why this backend cannot run, as a clause; None when it can."""
    if shape.dtype not in FLOAT_DTYPES:
        return f"it computes in float32, float16 and bfloat16, not {shape.dtype}"
    return None
