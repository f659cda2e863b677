"""The gated activation of a SwiGLU MLP as a Triton kernel.

Legend: one program computes block_n of the n outputs of one row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from nv_kernels.triton.device import device_of
from nv_kernels.triton.launch import launch_options, wait_for_previous
from nv_kernels.triton.rows import as_rows

if TYPE_CHECKING:
    from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Implements `nv_kernels.ops.silu_and_mul.silu_and_mul`."""
    n = gate_up.shape[-1] // 2
    output = torch.empty((*gate_up.shape[:-1], n), dtype=gate_up.dtype, device=gate_up.device)
    if output.numel() == 0:
        return output
    rows = as_rows(gate_up)
    block_n = min(triton.next_power_of_2(n), 1024)
    with device_of(gate_up):
        _silu_and_mul_kernel[(rows.num_rows, triton.cdiv(n, block_n))](
            rows.data,
            output,
            rows.num_inner,
            rows.outer_stride,
            rows.inner_stride,
            n=n,
            block_n=block_n,
            **launch_options(gate_up),
        )
    return output


@triton.jit  # type: ignore[untyped-decorator]
def _silu_and_mul_kernel(
    gate_up_ptr: tl.tensor,
    output_ptr: tl.tensor,
    num_inner: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    n: tl.constexpr,
    block_n: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    wait_for_previous(overlaps)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block_n + tl.arange(0, block_n)
    inside = column < n
    gate_ptr = (
        gate_up_ptr + (row // num_inner) * outer_stride + (row % num_inner) * inner_stride + column
    )
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + n, mask=inside, other=0.0).to(tl.float32)
    output = gate * tl.sigmoid(gate) * up
    tl.store(output_ptr + row * n + column, output.to(output_ptr.dtype.element_ty), mask=inside)
