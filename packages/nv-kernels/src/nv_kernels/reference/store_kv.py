"""Writing keys and values into the paged cache, in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Implements `nv_kernels.ops.store_kv.store_kv`; on CUDA the host waits for the device."""
    block_size = key_cache.shape[1]
    slots = slot_mapping.long()
    is_stored = slots >= 0
    if not is_stored.all():
        slots, key, value = slots[is_stored], key[is_stored], value[is_stored]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, offsets] = key
    value_cache[blocks, offsets] = value
