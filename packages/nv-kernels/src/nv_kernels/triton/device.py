"""The GPU under a launch: making it the current one, and its sizes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from torch import Tensor


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Returns a context in which kernels launch on the tensor's device.

    Triton launches on the current device, which need not be the tensors'.

    Args:
        tensor: Any argument of the launch.

    Returns:
        A context that restores the current device; one that does nothing off CUDA.
    """
    return torch.cuda.device(tensor.get_device()) if tensor.is_cuda else nullcontext()


@cache
def num_processors(device: torch.device) -> int:
    """Counts a GPU's processors; a few for a CPU, where only the interpreter runs."""
    if device.type != "cuda":
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Tells how much shared memory a program may have; for a CPU, what consumer GPUs have."""
    if device.type != "cuda":
        return 99 << 10
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@cache
def is_hopper(device: torch.device) -> bool:
    """Tells whether a device is a Hopper GPU, whose instructions no other family has."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
