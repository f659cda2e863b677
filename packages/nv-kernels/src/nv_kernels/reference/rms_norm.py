"""RMSNorm, alone and with a residual, in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Implements `nv_kernels.ops.rms_norm.rms_norm`."""
    # Without the weight, which is to meet the rounded row; PyTorch's own norm computes in fp32.
    normed = torch.nn.functional.rms_norm(x, x.shape[-1:], eps=eps)
    # PyTorch keeps the layout of a transposed `x`; the contract is a contiguous result.
    return (weight * normed).contiguous()


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Implements `nv_kernels.ops.rms_norm.add_rms_norm`."""
    if x.dim() > residual.dim():
        x = x.sum(dim=0).to(residual.dtype)
    total = (x + residual).contiguous()
    return rms_norm(total, weight, eps=eps), total
