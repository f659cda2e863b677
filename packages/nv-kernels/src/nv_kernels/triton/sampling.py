"""Sampling with keyed Gumbel noise as two Triton kernels.

The first reads the logits once, weighs groups of 16 tokens and draws one of each part's groups; the
second draws among these groups, and then a token of the best. Rows with top-k, top-p or min-p have
a second kernel of their own, in `filtered_draw.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from nv_kernels.reference.sampling import GROUP_SIZE
from nv_kernels.triton.device import device_of
from nv_kernels.triton.filtered_draw import TILE_SIZE, draw_filtered
from nv_kernels.triton.group_draw import best_group, draw_from_best_group
from nv_kernels.triton.launch import launch_options, wait_for_previous
from nv_kernels.triton.logits import (
    Column,
    Draw,
    Filters,
    Logits,
    Parts,
    key_of,
    load_logits,
)

if TYPE_CHECKING:
    from torch import Tensor

    from nv_kernels.logit_rules import LogitAdjustments, TokenFilters

_PART_SIZE = 4096
"""Tokens that a program of the first kernel reads; it changes no draw."""


def sample_tokens(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    adjustments: LogitAdjustments | None,
    filters: TokenFilters | None,
) -> Tensor:
    """Implements `nv_kernels.ops.sampling.sample_tokens`."""
    view = Logits.of(logits, adjustments)
    draw = Draw(Column.of(temperatures), Column.of(seeds), Column.of(positions))
    return _sample(view, draw, filters, first_token=0, packs_score=False)


def sample_shard(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, *, first_token: int
) -> Tensor:
    """Implements `nv_kernels.ops.sampling.sample_shard`."""
    draw = Draw(Column.of(temperatures), Column.of(seeds), Column.of(positions))
    return _sample(Logits.of(logits, None), draw, None, first_token=first_token, packs_score=True)


def _sample(
    logits: Logits,
    draw: Draw,
    filters: TokenFilters | None,
    *,
    first_token: int,
    packs_score: bool,
) -> Tensor:
    values: Tensor = logits.raw.data
    num_rows, num_tokens = values.shape
    output = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    if num_rows == 0:
        return output
    # Groups begin at multiples of their size, wherever the first column is.
    before = first_token % GROUP_SIZE
    num_parts = triton.cdiv(before + num_tokens, _PART_SIZE)

    def scratch(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((num_rows, width), dtype=dtype, device=values.device)

    parts = Parts(num_parts, scratch(num_parts), scratch(num_parts, torch.int32))
    tile_maxima = None
    if filters is not None:
        parts = parts._replace(maxima=scratch(num_parts), masses=scratch(num_parts))
        tile_maxima = scratch(num_parts * _PART_SIZE // TILE_SIZE)
    sizes: dict[str, Any] = {
        "group_size": GROUP_SIZE,
        "block_parts": triton.next_power_of_2(num_parts),
    }
    with device_of(values):
        _weigh_parts_kernel[(num_rows, num_parts)](
            logits,
            draw,
            parts,
            tile_maxima,
            first_token,
            before,
            part_size=_PART_SIZE,
            group_size=GROUP_SIZE,
            tile_size=TILE_SIZE,
            num_warps=4,
            **launch_options(values),
        )
        if filters is not None and tile_maxima is not None:
            draw_filtered(
                logits,
                draw,
                parts,
                Filters.of(filters),
                tile_maxima,
                output,
                part_size=_PART_SIZE,
                **sizes,
            )
        else:
            _draw_kernel[(num_rows,)](
                logits,
                draw,
                parts,
                output,
                first_token,
                packs_score,
                **sizes,
                num_warps=1,
                **launch_options(values),
            )
    return output


@triton.jit  # type: ignore[untyped-decorator]
def _weigh_parts_kernel(
    logits: Logits,
    draw: Draw,
    parts: Parts,
    tile_maxima_ptr: tl.tensor,
    first_token: tl.tensor,
    before: tl.tensor,
    part_size: tl.constexpr,
    group_size: tl.constexpr,
    tile_size: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """Draws a group of one part; leaves what `Parts` says, and the maxima of tiles if asked for."""
    wait_for_previous(overlaps)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first_column = part * part_size - before
    column = first_column + tl.arange(0, part_size)
    value = load_logits(logits, row, column, (column >= 0) & (column < logits.vocab_size))
    place = row * parts.num_parts + part
    if tile_maxima_ptr is not None:
        # First, so that the logits need not be kept in registers until the end.
        num_tiles: tl.constexpr = part_size // tile_size
        highest = tl.max(tl.reshape(value, (num_tiles, tile_size)), axis=1)
        tl.store(tile_maxima_ptr + place * num_tiles + tl.arange(0, num_tiles), highest)
    best, mass, score, group = best_group(
        draw, row, value, first_column, first_token, part_size, group_size
    )
    tl.store(parts.scores + place, score)
    tl.store(parts.groups + place, group)
    if tile_maxima_ptr is not None:
        tl.store(parts.maxima + place, best)
        tl.store(parts.masses + place, mass)


@triton.jit  # type: ignore[untyped-decorator]
def _draw_kernel(
    logits: Logits,
    draw: Draw,
    parts: Parts,
    output_ptr: tl.tensor,
    first_token: tl.tensor,
    packs_score: tl.constexpr,
    group_size: tl.constexpr,
    block_parts: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    wait_for_previous(overlaps)
    row = tl.program_id(0).to(tl.int64)
    score, column = draw_from_best_group(
        logits, draw, parts, row, first_token, group_size, block_parts
    )
    result = (first_token + column).to(tl.int64)
    if packs_score:
        result = (key_of(score).to(tl.int64) << 32) | (0xFFFFFFFF - result)
    tl.store(output_ptr + row, result)
