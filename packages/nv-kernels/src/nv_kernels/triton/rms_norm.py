"""RMSNorm, alone and with a residual, as Triton kernels.

Legend: a tile is [block_rows, block_n] elements; row = outer * num_inner + inner, see `rows.py`.
The tile's shape depends on the row length alone, so that a row's result never depends on how many
rows there are.
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

_TILE_ELEMENTS = 2048  # 16 fp32 values per thread of four warps: enough loads in flight, no spills


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Implements `nv_kernels.ops.rms_norm.rms_norm`."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return output
    rows, n = as_rows(x), x.shape[-1]
    block_rows, block_n = _tile(n)
    with device_of(x):
        _rms_norm_kernel[(triton.cdiv(rows.num_rows, block_rows),)](
            rows.data,
            weight,
            output,
            rows.num_rows,
            rows.num_inner,
            rows.outer_stride,
            rows.inner_stride,
            eps,
            n=n,
            block_rows=block_rows,
            block_n=block_n,
            num_warps=_num_warps(block_n),
            **launch_options(x),
        )
    return output


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Implements `nv_kernels.ops.rms_norm.add_rms_norm`."""
    output = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    total = torch.empty_like(output)
    if residual.numel() == 0:
        return output, total
    num_parts = x.shape[0] if x.dim() > residual.dim() else 1
    first_part = x[0] if num_parts > 1 else x
    rows, residual_rows, n = as_rows(first_part), as_rows(residual), residual.shape[-1]
    block_rows, block_n = _tile(n)
    with device_of(x):
        _add_rms_norm_kernel[(triton.cdiv(rows.num_rows, block_rows),)](
            rows.data,
            residual_rows.data,
            weight,
            output,
            total,
            rows.num_rows,
            rows.num_inner,
            rows.outer_stride,
            rows.inner_stride,
            residual_rows.outer_stride,
            residual_rows.inner_stride,
            residual.numel(),
            eps,
            num_parts=num_parts,
            n=n,
            block_rows=block_rows,
            block_n=block_n,
            num_warps=_num_warps(block_n),
            **launch_options(x),
        )
    return output, total


def _tile(n: int) -> tuple[int, int]:
    block_n = triton.next_power_of_2(n)
    return max(1, _TILE_ELEMENTS // block_n), block_n


def _num_warps(block_n: int) -> int:
    """Enough that a long row, too, is only 16 values per thread."""
    return max(4, min(16, block_n // 512))


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    output_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_inner: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    eps: tl.tensor,
    n: tl.constexpr,
    block_rows: tl.constexpr,
    block_n: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    column = tl.arange(0, block_n)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < n, other=0.0)
    wait_for_previous(overlaps)
    row = (tl.program_id(0) * block_rows + tl.arange(0, block_rows)).to(tl.int64)[:, None]
    inside = (row < num_rows) & (column < n)
    offset = (row // num_inner) * outer_stride + (row % num_inner) * inner_stride + column
    x = tl.load(x_ptr + offset, mask=inside, other=0.0)
    tl.store(output_ptr + row * n + column, _normalize(x, weight, eps, n), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "part_stride"])  # type: ignore[untyped-decorator]
def _add_rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    output_ptr: tl.tensor,
    total_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_inner: tl.tensor,
    x_outer_stride: tl.tensor,
    x_inner_stride: tl.tensor,
    residual_outer_stride: tl.tensor,
    residual_inner_stride: tl.tensor,
    part_stride: tl.tensor,
    eps: tl.tensor,
    num_parts: tl.constexpr,
    n: tl.constexpr,
    block_rows: tl.constexpr,
    block_n: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    column = tl.arange(0, block_n)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < n, other=0.0)
    wait_for_previous(overlaps)
    row = (tl.program_id(0) * block_rows + tl.arange(0, block_rows)).to(tl.int64)[:, None]
    inside = (row < num_rows) & (column < n)
    outer, inner = row // num_inner, row % num_inner
    x_offset = outer * x_outer_stride + inner * x_inner_stride + column
    residual_offset = outer * residual_outer_stride + inner * residual_inner_stride + column
    x = tl.load(x_ptr + x_offset, mask=inside, other=0.0)
    residual = tl.load(residual_ptr + residual_offset, mask=inside, other=0.0)
    for part in tl.static_range(1, num_parts):
        # int64: parts of a long prompt have more elements than int32 can count.
        part_ptr = x_ptr + part * part_stride.to(tl.int64)
        x += tl.load(part_ptr + x_offset, mask=inside, other=0.0)
    x = x.to(residual.dtype)
    # The norm sees the sum as it is stored, rounded to its dtype, as transformers does.
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
    output_offset = row * n + column
    tl.store(total_ptr + output_offset, total, mask=inside)
    tl.store(output_ptr + output_offset, _normalize(total, weight, eps, n), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _normalize(x: tl.tensor, weight: tl.tensor, eps: tl.tensor, n: tl.constexpr) -> tl.tensor:
    wide = x.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=1)[:, None] / n
    normal = (wide * tl.rsqrt(mean_square + eps)).to(x.dtype)
    return (normal.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
