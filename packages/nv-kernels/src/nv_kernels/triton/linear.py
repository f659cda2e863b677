"""A matrix product with few rows as Triton kernels: one kernel for a row, one for several.

Both do little but read the weight, so both are built to have much of it on its way at all times.
Each starts its reading while the kernel before still runs (`nv_kernels.triton.launch`): the weight
is there already, and only the rows have to be waited for.

Legend: m rows, n outputs, k inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from nv_kernels.triton.device import device_of
from nv_kernels.triton.launch import launch_options, wait_for_previous

if TYPE_CHECKING:
    from torch import Tensor

_OUTPUTS_PER_TILE = 64
"""Outputs of a program of the kernel for several rows: what one tensor core instruction takes."""
_ENOUGH_PROGRAMS = 96
"""With fewer, some of a large GPU's processors would have nothing to read."""
_MAX_PARTS = 8
_MIN_INPUTS_PER_PART = 256
_PREFETCHED_INPUTS = 512


class RowTile(NamedTuple):
    """How the work of the kernel for one row is cut."""

    block_n: int
    block_k: int
    num_warps: int


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Implements `nv_kernels.ops.linear.linear` for any number of rows."""
    if x.shape[0] == 1:
        return multiply_row(x, weight, bias)
    return multiply_rows(x, weight, bias, num_parts=1)[0]


def linear_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Implements `nv_kernels.ops.linear.linear_parts` for any number of rows."""
    num_parts = choose_num_parts(*weight.shape)
    if x.shape[0] == 1 or num_parts == 1:
        return linear(x, weight, None)[None]
    return multiply_rows(x, weight, None, num_parts=num_parts)


def choose_num_parts(out_features: int, in_features: int) -> int:
    """Picks into how many parts to cut the inputs, so that enough programs share the reading.

    It depends on the weight alone, so that the order in which a row is summed does too.
    """
    num_parts = 1
    while (
        triton.cdiv(out_features, _OUTPUTS_PER_TILE) * num_parts < _ENOUGH_PROGRAMS
        and num_parts < _MAX_PARTS
        and in_features >= 2 * num_parts * _MIN_INPUTS_PER_PART
        and in_features % (2 * num_parts * 64) == 0
    ):
        num_parts *= 2
    return num_parts


def choose_row_tile(out_features: int, in_features: int) -> RowTile:
    """Picks the tile for one row: the best, or nearly, of a sweep on an H200."""
    if out_features <= 2048:
        tile = RowTile(4, 2048, 8) if in_features <= 2048 else RowTile(2, 2048, 4)
    elif in_features <= 1024:
        if out_features <= 4096:
            tile = RowTile(8, 1024, 2)
        else:
            tile = RowTile(4, 512, 4) if out_features <= 16384 else RowTile(4, 1024, 1)
    elif out_features > 65536:
        tile = RowTile(8, 4096, 8) if in_features < 4096 else RowTile(4, 2048, 4)
    else:
        tile = RowTile(4, 512, 4 if out_features <= 4096 else 1)
    return tile._replace(block_k=min(tile.block_k, triton.next_power_of_2(in_features)))


def multiply_row(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, tile: RowTile | None = None
) -> Tensor:
    """Multiplies one row, [1, k], by a weight, [n, k]; returns [1, n]."""
    out_features, in_features = weight.shape
    output = torch.empty((1, out_features), dtype=x.dtype, device=x.device)
    if tile is None:
        tile = choose_row_tile(out_features, in_features)
    with device_of(x):
        _row_kernel[(triton.cdiv(out_features, tile.block_n),)](
            x,
            weight,
            weight if bias is None else bias,
            output,
            out_features,
            weight.stride(0),
            k=in_features,
            has_bias=bias is not None,
            block_n=tile.block_n,
            block_k=tile.block_k,
            num_warps=tile.num_warps,
            **launch_options(x),
        )
    return output


def multiply_rows(x: Tensor, weight: Tensor, bias: Tensor | None, *, num_parts: int) -> Tensor:
    """Multiplies rows, [m, k], by a weight, [n, k], on tensor cores.

    Args:
        x: The rows.
        weight: The weight.
        bias: [n], or None; only with one part.
        num_parts: Into how many parts the inputs are cut.

    Returns:
        [num_parts, m, n]: one part in the dtype of `x`, or several in fp32 that add up.
    """
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    dtype = x.dtype if num_parts == 1 else torch.float32
    output = torch.empty((num_parts, num_rows, out_features), dtype=dtype, device=x.device)
    if output.numel() == 0:
        return output
    block_m = max(16, min(128, triton.next_power_of_2(num_rows)))
    part_k = triton.cdiv(in_features, num_parts)
    block_k = 128 if part_k >= 1024 and block_m <= 64 and x.element_size() == 2 else 64
    num_stages = 4 if part_k <= 1024 and block_k == 128 else 6
    with device_of(x):
        _rows_kernel[
            (
                triton.cdiv(out_features, _OUTPUTS_PER_TILE),
                num_parts,
                triton.cdiv(num_rows, block_m),
            )
        ](
            x,
            weight,
            weight if bias is None else bias,
            output,
            num_rows,
            out_features,
            x.stride(0),
            weight.stride(0),
            k=in_features,
            part_k=part_k,
            is_n_whole=out_features % _OUTPUTS_PER_TILE == 0,
            has_bias=bias is not None,
            prefetches=part_k <= _PREFETCHED_INPUTS and x.is_cuda,
            block_m=block_m,
            block_n=_OUTPUTS_PER_TILE,
            block_k=block_k,
            num_warps=4,
            num_stages=num_stages if x.element_size() == 2 else 2,
            **launch_options(x),
        )
    return output


@triton.jit  # type: ignore[untyped-decorator]
def _row_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    output_ptr: tl.tensor,
    out_features: tl.tensor,
    weight_stride: tl.tensor,
    k: tl.constexpr,
    has_bias: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """Computes block_n outputs: walks along k, one tile of weights ahead, and sums at the end.

    Tensor cores would idle: a row does two operations for each weight element that is read.
    """
    column = tl.program_id(0) * block_n + tl.arange(0, block_n)
    inside = column < out_features
    element = tl.arange(0, block_k)
    # int64: a head of 150,000 rows of 16,384 has more elements than int32 can count.
    weight_row_ptr = weight_ptr + column.to(tl.int64)[:, None] * weight_stride + element[None, :]
    weight = _load_weights(weight_row_ptr, inside, 0, k, block_k)
    wait_for_previous(overlaps)
    total = tl.zeros([block_n, block_k], tl.float32)
    for start in range(0, k, block_k):
        next_weight = _load_weights(weight_row_ptr, inside, start + block_k, k, block_k)
        x = tl.load(x_ptr + start + element, mask=element < k - start, other=0.0)
        total += weight.to(tl.float32) * x.to(tl.float32)[None, :]
        weight = next_weight
    output = tl.sum(total, axis=1)
    if has_bias:
        output += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output_ptr + column, output.to(output_ptr.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _load_weights(
    row_ptr: tl.tensor,
    inside: tl.tensor,
    start: tl.tensor,
    k: tl.constexpr,
    block_k: tl.constexpr,
) -> tl.tensor:
    """Loads [n, k] weights from column `start` on; zero where there are none."""
    left = tl.arange(0, block_k) < k - start
    return tl.load(row_ptr + start, mask=inside[:, None] & left[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _rows_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    output_ptr: tl.tensor,
    num_rows: tl.tensor,
    out_features: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    k: tl.constexpr,
    part_k: tl.constexpr,
    is_n_whole: tl.constexpr,
    has_bias: tl.constexpr,
    prefetches: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """Computes block_n outputs of block_m rows from one part of the inputs.

    The weight is the left operand: tensor cores take 64 rows there, but as few as eight columns on
    the right, so that few rows waste little.
    """
    column = tl.program_id(0) * block_n + tl.arange(0, block_n)
    first = tl.program_id(1) * part_k
    row = tl.program_id(2) * block_m + tl.arange(0, block_m)
    element = tl.arange(0, block_k)
    inside_n = column < out_features
    inside_m = row < num_rows
    # int64: a head of 150,000 rows of 16,384 has more elements than int32 can count.
    weight_row_ptr = weight_ptr + column.to(tl.int64)[:, None] * weight_stride + first
    if prefetches and overlaps:
        line = tl.arange(0, block_k // 64) * 64  # of the L2 cache, 128 bytes
        for start in tl.static_range(0, part_k, block_k):
            _prefetch(weight_row_ptr + (start + line)[None, :])
    wait_for_previous(overlaps)
    weight_ptrs = weight_row_ptr + element[None, :]
    x_ptrs = x_ptr + row.to(tl.int64)[None, :] * x_stride + first + element[:, None]
    total = tl.zeros([block_n, block_m], tl.float32)
    for start in range(0, part_k, block_k):
        if part_k % block_k == 0 and k % part_k == 0:
            x = tl.load(x_ptrs + start, mask=inside_m[None, :], other=0.0)
            if is_n_whole:
                weight = tl.load(weight_ptrs + start)
            else:
                weight = tl.load(weight_ptrs + start, mask=inside_n[:, None], other=0.0)
        else:
            inside_k = element < tl.minimum(part_k, k - first) - start
            mask = inside_m[None, :] & inside_k[:, None]
            x = tl.load(x_ptrs + start, mask=mask, other=0.0)
            mask = inside_n[:, None] & inside_k[None, :]
            weight = tl.load(weight_ptrs + start, mask=mask, other=0.0)
        total = tl.dot(weight, x, total, input_precision="ieee")
    if has_bias:
        total += tl.load(bias_ptr + column, mask=inside_n, other=0.0).to(tl.float32)[:, None]
    place = (tl.program_id(1).to(tl.int64) * num_rows + row)[None, :] * out_features
    tl.store(
        output_ptr + place + column[:, None],
        total.to(output_ptr.dtype.element_ty),
        mask=inside_n[:, None] & inside_m[None, :],
    )


@triton.jit  # type: ignore[untyped-decorator]
def _prefetch(pointers: tl.tensor) -> None:
    """Asks for the cache lines at these addresses; waits for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
