"""Host to device without waiting: a plain `torch.tensor(..., device=...)` would stop the stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Tensor | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copies values to a device in stream order.

    Args:
        values: A list of numbers, or a tensor on the host.
        dtype: Of the result.
        device: Where it goes.

    Returns:
        The tensor on the device; on CUDA its content is there for everything launched later on the
        current stream.
    """
    host = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
