"""The gated activation of a SwiGLU MLP in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import silu

if TYPE_CHECKING:
    from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Implements `nv_kernels.ops.silu_and_mul.silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (silu(gate) * up).contiguous()
