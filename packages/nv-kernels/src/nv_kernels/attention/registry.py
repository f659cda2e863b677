"""Which attention backends exist, which can run, and which one "auto" takes."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, NamedTuple

from nv_kernels.attention import (
    flash_attn_3_backend,
    flash_attn_backend,
    torch_backend,
    triton_backend,
)
from nv_kernels.attention.backend import AttentionBackend, AttentionShape
from nv_kernels.errors import KernelInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class _Entry(NamedTuple):
    make: Callable[[], AttentionBackend]
    unavailable_reason: Callable[[AttentionShape], str | None]


_ENTRIES = {
    "torch": _Entry(torch_backend.TorchAttention, torch_backend.unavailable_reason),
    "triton": _Entry(triton_backend.TritonAttention, triton_backend.unavailable_reason),
    "flash_attn": _Entry(flash_attn_backend.FlashAttention2, flash_attn_backend.unavailable_reason),
    "flash_attn_3": _Entry(
        flash_attn_3_backend.FlashAttention3, flash_attn_3_backend.unavailable_reason
    ),
}

# Best first, as measured on an H200 (docs/kernels.md): Triton is ahead of flash-attn in every case
# there, by 2 to 41 % in decoding and by half in prefill, and takes every block size and dtype.
# FlashAttention 3, measured elsewhere, takes 7 to 74 % longer than Triton in decoding and 7 to 10 %
# less in prefill. An engine's time is decoding, and a prompt's is mostly matrix products, so
# Triton stays first. "auto" takes FlashAttention 3 only where neither of the others runs, because
# our adapter to it has not been run yet.
# PyTorch waits for the host. Elsewhere Triton runs only in its interpreter, which is for tests.
_PREFERENCE_CUDA = ("triton", "flash_attn", "flash_attn_3", "torch")
_PREFERENCE_ELSEWHERE = ("torch",)


def available_attention_backends(
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    cache_dtype: torch.dtype | None = None,
) -> dict[str, str | None]:
    """Tells for each backend why it cannot run here.

    Args:
        device: Where query and cache will be.
        dtype: Of the query.
        head_dim: Elements per head; a multiple of 8.
        num_heads: Query heads on this device.
        num_kv_heads: Key heads on this device; divides `num_heads`.
        block_size: Tokens per block of the cache.
        cache_dtype: Of the cache, float8_e4m3fn or `dtype`, which None stands for.

    Returns:
        Name of each backend -> the reason as a clause, or None when it can run.

    Raises:
        KernelInputError: The numbers describe no attention at all.
    """
    shape = AttentionShape(
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype or dtype,
        head_dim=head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
    )
    return {name: entry.unavailable_reason(shape) for name, entry in _ENTRIES.items()}


def select_attention_backend(
    name: str = "auto",
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    cache_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """Picks the backend for a model: the named one, or the best that can run.

    Args:
        name: "auto", "torch", "triton", "flash_attn" or "flash_attn_3".
        device: Where query and cache will be.
        dtype: Of the query.
        head_dim: Elements per head; a multiple of 8.
        num_heads: Query heads on this device.
        num_kv_heads: Key heads on this device; divides `num_heads`.
        block_size: Tokens per block of the cache.
        cache_dtype: Of the cache, float8_e4m3fn or `dtype`, which None stands for.

    Returns:
        A backend for every layer of the model.

    Raises:
        KernelInputError: The name is unknown, the named backend cannot run here (the message says
            why), or no backend can.
    """
    shape = AttentionShape(
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype or dtype,
        head_dim=head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
    )

    def can_run(known: str) -> bool:
        return _ENTRIES[known].unavailable_reason(shape) is None

    # Backends are asked one by one: the question alone may import a library, which takes time.
    if name == "auto":
        order = _PREFERENCE_CUDA if device.type == "cuda" else _PREFERENCE_ELSEWHERE
        name = next(filter(can_run, order), order[-1])
    if name not in _ENTRIES:
        near = get_close_matches(name, _ENTRIES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise KernelInputError(
            f"attention backend is {name!r}, but must be 'auto' or one of {list(_ENTRIES)}.{hint}"
        )
    reason = _ENTRIES[name].unavailable_reason(shape)
    if reason is not None:
        usable = ", ".join(filter(can_run, _ENTRIES))
        raise KernelInputError(
            f"attention backend {name!r} cannot run here: {reason}. "
            f"Backends that can: {usable or 'none'}."
        )
    return _ENTRIES[name].make()
