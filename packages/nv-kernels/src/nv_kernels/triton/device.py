"""Makes a tensor's GPU the current one: Triton launches on the current device, not the tensor's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Returns a context in which kernels launch on the tensor's device.

    Args:
        tensor: Any argument of the launch.

    Returns:
        A context that restores the current device; one that does nothing off CUDA.
    """
    return torch.cuda.device(tensor.get_device()) if tensor.is_cuda else nullcontext()
