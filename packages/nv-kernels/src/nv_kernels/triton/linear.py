"""A matrix product with few rows as a Triton kernel.

Legend: m rows, n outputs, k inputs. One program computes block_n outputs of up to four rows: it
walks along k, one tile of weights ahead, multiplies element by element and sums at the very end.
Tensor cores would idle: four rows do eight operations for each weight element that is read.
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

_MAX_ROWS = 4


class Tile(NamedTuple):
    """How a program's work is cut."""

    block_n: int
    block_k: int
    num_warps: int


def choose_tile(out_features: int, in_features: int) -> Tile:
    """Picks the tile for a weight's shape: the best, or nearly, of a sweep on an H200.

    It depends on the weight alone, so that the order in which a row is summed does too.
    """
    if out_features <= 2048:
        tile = Tile(block_n=2, block_k=1024, num_warps=4)
    elif out_features <= 4096 and in_features <= 1024:
        tile = Tile(block_n=2, block_k=512, num_warps=2)
    elif 4096 < out_features <= 8192:
        tile = Tile(block_n=4, block_k=512, num_warps=2)
    else:
        tile = Tile(block_n=4, block_k=1024, num_warps=2)
    return tile._replace(block_k=min(tile.block_k, triton.next_power_of_2(in_features)))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile | None = None) -> Tensor:
    """Implements `nv_kernels.ops.linear.linear` for any number of rows, four at a time."""
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    output = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    if output.numel() == 0:
        return output
    if tile is None:
        tile = choose_tile(out_features, in_features)
    with device_of(x):
        for first in range(0, num_rows, _MAX_ROWS):
            m = min(_MAX_ROWS, num_rows - first)
            _linear_kernel[(triton.cdiv(out_features, tile.block_n),)](
                x[first:],
                weight,
                weight if bias is None else bias,
                output[first:],
                out_features,
                x.stride(0),
                weight.stride(0),
                m=m,
                k=in_features,
                has_bias=bias is not None,
                block_m=triton.next_power_of_2(m),
                block_n=tile.block_n,
                block_k=tile.block_k,
                num_warps=tile.num_warps,
                **launch_options(x),
            )
    return output


@triton.jit  # type: ignore[untyped-decorator]
def _linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    output_ptr: tl.tensor,
    out_features: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    m: tl.constexpr,
    k: tl.constexpr,
    has_bias: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    row = tl.arange(0, block_m)
    column = tl.program_id(0) * block_n + tl.arange(0, block_n)
    inside = column < out_features
    element = tl.arange(0, block_k)
    # int64: a head of 150,000 rows of 16,384 has more elements than int32 can count.
    weight_row_ptr = weight_ptr + column.to(tl.int64)[:, None] * weight_stride + element[None, :]
    x_row_ptr = x_ptr + row[:, None] * x_stride + element[None, :]
    # Weights never change, so the first ones are fetched while the kernel before still runs.
    weight = _load_weights(weight_row_ptr, inside, 0, k, block_k)
    wait_for_previous(overlaps)
    total = tl.zeros([block_m, block_n, block_k], tl.float32)
    for start in range(0, k, block_k):
        next_weight = _load_weights(weight_row_ptr, inside, start + block_k, k, block_k)
        left = element < k - start
        x = tl.load(x_row_ptr + start, mask=(row < m)[:, None] & left[None, :], other=0.0)
        total += weight.to(tl.float32)[None, :, :] * x.to(tl.float32)[:, None, :]
        weight = next_weight
    output = tl.sum(total, axis=2)
    if has_bias:
        output += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(
        output_ptr + row.to(tl.int64)[:, None] * out_features + column[None, :],
        output.to(output_ptr.dtype.element_ty),
        mask=(row < m)[:, None] & inside[None, :],
    )


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
