"""What an attention backend is, and the facts by which one is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nv_kernels.errors import KernelInputError
from nv_kernels.kv_quantisation import FP8, read_dtypes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nv_kernels.metadata import AttentionMetadata, FreshKV, LayerKVCache


class AttentionBackend(Protocol):
    """One way to compute paged attention. Has no state: one object serves every layer and step."""

    @property
    def name(self) -> str:
        """The name by which `select_attention_backend` knows it."""
        ...

    @property
    def waits_for_host(self) -> bool:
        """Whether it reads tensors back to the host, so that no CUDA graph can capture it."""
        ...

    def attend(
        self,
        query: Tensor,
        kv_cache: LayerKVCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        fresh: FreshKV | None = None,
    ) -> Tensor:
        """Computes attention; see `nv_kernels.ops.attention.paged_attention` for the contract."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What is known about a model's attention before its first step."""

    device: torch.device
    """Where query and cache will be."""
    dtype: torch.dtype
    """Of the query."""
    cache_dtype: torch.dtype
    """Of the cache: that of the query, or float8_e4m3fn."""
    head_dim: int
    """Elements per head; a multiple of 8."""
    num_heads: int
    """Query heads on this device."""
    num_kv_heads: int
    """Key heads on this device; divides `num_heads`."""
    block_size: int
    """Tokens per block of the cache."""

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            KernelInputError: A number is not positive, `head_dim` is not a multiple of 8,
                `num_kv_heads` does not divide `num_heads`, or no query of `dtype` can read a cache
                of `cache_dtype`.
        """
        if self.cache_dtype not in read_dtypes(self.dtype):
            raise KernelInputError(
                f"cache_dtype is {self.cache_dtype}, but must be {self.dtype}, the dtype of the "
                f"query, or {FP8}. Leave it out for the former."
            )
        for name, number in (
            ("head_dim", self.head_dim),
            ("num_heads", self.num_heads),
            ("num_kv_heads", self.num_kv_heads),
            ("block_size", self.block_size),
        ):
            if number < 1:
                raise KernelInputError(
                    f"{name} is {number}, but must be at least 1. Read it from the model's config."
                )
        if self.head_dim % 8:
            raise KernelInputError(
                f"head_dim is {self.head_dim}, but must be a multiple of 8. "
                "Pad the heads with zeros to the next multiple."
            )
        if self.num_heads % self.num_kv_heads:
            raise KernelInputError(
                f"num_heads is {self.num_heads} and num_kv_heads {self.num_kv_heads}, but each "
                "key head must serve the same number of query heads. Make num_heads a multiple of "
                "num_kv_heads."
            )
