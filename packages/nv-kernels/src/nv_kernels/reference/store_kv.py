"""Writing keys and values into the paged cache, in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.kv_quantisation import FP8, FP8_MAX

if TYPE_CHECKING:
    from torch import Tensor


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float,
    v_scale: float,
) -> None:
    """Implements `nv_kernels.ops.store_kv.store_kv`; on CUDA the host waits for the device."""
    block_size = key_cache.shape[1]
    slots = slot_mapping.long()
    is_stored = slots >= 0
    if not is_stored.all():
        slots, key, value = slots[is_stored], key[is_stored], value[is_stored]
    blocks, offsets = slots // block_size, slots % block_size
    for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        stored, target = as_stored(rows, cache, scale)
        target[blocks, offsets] = stored


def as_stored(x: Tensor, cache: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Makes x what a cache takes, which is the other result, as bytes where it is fp8.

    As bytes, because not every device's PyTorch writes fp8 by index. The rounding is that of
    `kv_quantisation.py`; PyTorch alone may turn numbers beyond 448 into NaN.
    """
    if cache.dtype != FP8:
        return x, cache
    rounded = (x.float() * (1 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return rounded.view(torch.uint8), cache.view(torch.uint8)
