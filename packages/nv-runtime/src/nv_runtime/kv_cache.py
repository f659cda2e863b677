"""The KV pool: how many blocks fit, and their storage.

It turns bytes into blocks. Which block holds what is nv-core's business.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from nv_core import CapacityError
from nv_core.config import MAX_NUM_BLOCKS
from nv_kernels import LayerKVCache
from nv_models import KVScales, ModelConfig
from nv_runtime.step_memory import StepMemory

logger = logging.getLogger(__name__)

GIB = 1024**3
CPU_DEFAULT_BYTES = 4 * GIB
"""Largest default pool on a CPU, unless one sequence of `max_model_len` needs more."""


@dataclass(frozen=True)
class KVCacheSpec:
    """Shape of the KV pool.

    Args:
        num_layers: Layers that keep keys and values.
        num_kv_heads: Key/value heads of this rank.
        head_dim: Elements per head.
        block_size: Tokens per block.
        dtype: Of keys and values in the cache.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes that one token's keys and values take in all layers."""
        elements = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return elements * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.token_bytes * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold that many tokens."""
        return -(-num_tokens // self.block_size)


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token's keys and values take in all layers of a whole model.

    Args:
        config: The model.
        dtype: Of the cache.
    """
    spec = KVCacheSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=1,
        dtype=dtype,
    )
    return spec.token_bytes


def size_kv_cache(
    spec: KVCacheSpec,
    *,
    device: torch.device,
    max_model_len: int,
    max_num_seqs: int,
    step_memory: StepMemory,
    gpu_memory_utilization: float,
    kv_cache_memory_bytes: int | None,
    num_blocks: int | None,
    may_shorten: bool = False,
) -> int:
    """Decides how many blocks the pool has.

    Args:
        spec: Shape of the pool.
        device: Where it will be; the weights must be there already.
        max_model_len: Longest sequence, in tokens; the pool must hold at least one.
        max_num_seqs: Most sequences at once; a pool never needs more than all of them at full
            length.
        step_memory: Everything else that a step allocates.
        gpu_memory_utilization: Share of the device's memory to fill; CUDA only.
        kv_cache_memory_bytes: Explicit size; None to size from memory.
        num_blocks: Explicit number of blocks, which nothing else overrides.
        may_shorten: Whether a pool for less than `max_model_len` will do.

    Returns:
        The number of blocks.

    Raises:
        CapacityError: The memory does not hold one sequence of `max_model_len`.
    """
    if num_blocks is not None:
        return num_blocks
    needed = spec.num_blocks_for(max_model_len)
    useful = needed * max_num_seqs
    if kv_cache_memory_bytes is not None:
        available = kv_cache_memory_bytes
        source = f"kv_cache_memory_bytes={kv_cache_memory_bytes}"
        remedy = "raise kv_cache_memory_bytes"
    elif device.type == "cuda":
        available = _available_cuda_bytes(device, gpu_memory_utilization, step_memory)
        source = f"gpu_memory_utilization={gpu_memory_utilization}"
        remedy = "raise gpu_memory_utilization, lower max_num_batched_tokens or free the device"
    else:
        free = available_cpu_bytes() // 2
        available = min(free, max(CPU_DEFAULT_BYTES, needed * spec.block_bytes))
        source = "half of the free memory"
        remedy = "set kv_cache_memory_bytes"
    count = min(max(available, 0) // spec.block_bytes, useful, MAX_NUM_BLOCKS)
    if count < (1 if may_shorten else needed):
        fits = max(count, 0) * spec.block_size
        # A sequence has a prompt and an output token at least.
        advice = f"lower max_model_len to {fits} or less, or {remedy}" if fits >= 2 else remedy
        raise CapacityError(
            f"max_model_len={max_model_len} needs {needed * spec.block_bytes / GIB:.2f} GiB of KV "
            f"cache for one sequence, {max(available, 0) / GIB:.2f} GiB are available "
            f"({source}); {advice}"
        )
    logger.info(
        "KV cache: %.2f GiB of %.2f GiB available, %d blocks of %d tokens = %d tokens; maximum "
        "concurrency for %d tokens per request: %.2fx",
        count * spec.block_bytes / GIB,
        available / GIB,
        count,
        spec.block_size,
        count * spec.block_size,
        max_model_len,
        count / needed,
    )
    return count


def allocate_kv_cache(
    spec: KVCacheSpec, num_blocks: int, *, device: torch.device, scales: KVScales | None = None
) -> tuple[LayerKVCache, ...]:
    """Allocates the pool.

    The content is undefined: every slot is written before it is read. Keys and values of one
    block and head lie together, so that attention reads long runs of memory.

    Args:
        spec: Shape of the pool.
        num_blocks: Number of blocks.
        device: Where it goes.
        scales: Factors of each layer's keys and values, if the pool is fp8; None for 1.

    Returns:
        One cache per layer, each [num_blocks, block_size, num_kv_heads, head_dim] (a view of
        storage in which heads come before tokens).

    Raises:
        CapacityError: The device cannot allocate that much.
    """
    shape = (
        spec.num_layers,
        2,
        num_blocks,
        spec.num_kv_heads,
        spec.block_size,
        spec.head_dim,
    )
    try:
        storage = torch.empty(shape, dtype=spec.dtype, device=device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        raise CapacityError(
            f"the device cannot allocate {num_blocks} KV blocks of {spec.block_bytes} bytes; "
            "lower num_gpu_blocks_override, kv_cache_memory_bytes or gpu_memory_utilization"
        ) from error
    return tuple(
        LayerKVCache(key.transpose(1, 2), value.transpose(1, 2), k_scale, v_scale)
        for (key, value), (k_scale, v_scale) in zip(
            storage, scales or ((1.0, 1.0),) * spec.num_layers, strict=True
        )
    )


def _available_cuda_bytes(
    device: torch.device, gpu_memory_utilization: float, step_memory: StepMemory
) -> int:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # What is in use counts whoever uses it: the share is of the device, not of this process.
    used = total - free
    available = int(total * gpu_memory_utilization) - used - step_memory.total_bytes
    logger.info(
        "device memory: %.2f GiB in all, %.2f in use; kept for activations %.2f, sampling %.2f, "
        "graphs %.2f, libraries %.2f",
        total / GIB,
        used / GIB,
        step_memory.activation_bytes / GIB,
        step_memory.sampling_bytes / GIB,
        step_memory.graph_bytes / GIB,
        step_memory.workspace_bytes / GIB,
    )
    return available


def available_cpu_bytes() -> int:
    """Returns the memory that is free on this machine, as far as the system tells."""
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        return page * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError):
        # macOS does not tell the available pages.
        return page * os.sysconf("SC_PHYS_PAGES") // 2
