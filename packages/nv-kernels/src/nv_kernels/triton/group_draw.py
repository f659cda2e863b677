"""Drawing a token in two stages: a group of 16 by its mass, then a token of the group."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from nv_kernels.triton.logits import (
    Draw,
    Logits,
    Parts,
    exponential_noise,
    gumbel_noise,
    inverse_temperature,
    load_logits,
    load_value,
    lowest_best,
)


@triton.jit  # type: ignore[untyped-decorator]
def best_group(
    draw: Draw,
    row: tl.tensor,
    value: tl.tensor,
    first_column: tl.tensor,
    first_token: tl.tensor,
    num_columns: tl.constexpr,
    group_size: tl.constexpr,
) -> tl.tensor:
    """Draws a group among neighbouring columns, or takes the one with the best token.

    Args:
        draw: See `Draw`.
        row: The row.
        value: Logits of `num_columns` columns, fp32, -inf outside the row.
        first_column: The first of them; negative if its group begins before the row does.
        first_token: Token id of column 0.
        num_columns: A multiple of `group_size`.
        group_size: Tokens of a group.

    Returns:
        The best logit, the mass of all columns, the group's score and its first column.
    """
    num_groups: tl.constexpr = num_columns // group_size
    best = tl.max(value, axis=0)
    # Where nothing may be drawn the mass is 0, not NaN.
    zero = tl.where(best == float("-inf"), 0.0, best)
    scale = inverse_temperature(draw, row)
    groups = tl.reshape(value, (num_groups, group_size))
    start = first_column + group_size * tl.arange(0, num_groups)
    mass = 0.0
    if load_value(draw.temperatures, row) > 0:
        log2_e: tl.constexpr = 1.4426950408889634
        masses = tl.sum(tl.exp2((groups - zero) * (scale * log2_e)), axis=1)
        mass = tl.sum(masses, axis=0)
        counter = -1 - first_token - tl.maximum(start, 0)
        # log(mass) + noise, as the logarithm of a quotient, which the best alone is taken of.
        quotient = masses / exponential_noise(draw, row, counter)
        score = zero * scale + tl.log(tl.max(quotient, axis=0))
        chosen = lowest_best(quotient, start)
    else:
        score = best
        chosen = lowest_best(tl.max(groups, axis=1), start)
    return best, mass, score, chosen


@triton.jit  # type: ignore[untyped-decorator]
def draw_from_best_group(
    logits: Logits,
    draw: Draw,
    parts: Parts,
    row: tl.tensor,
    first_token: tl.tensor,
    group_size: tl.constexpr,
    block_parts: tl.constexpr,
) -> tl.tensor:
    """Draws a token of the best part's best group; returns the group's score and the column."""
    part = tl.arange(0, block_parts)
    place = row * parts.num_parts + part
    is_part = part < parts.num_parts
    score = tl.load(parts.scores + place, mask=is_part, other=float("-inf"))
    # Nothing wins among NaN; what is read then must still lie inside the row.
    chosen = tl.minimum(lowest_best(score, part), parts.num_parts - 1)
    start = tl.load(parts.groups + row * parts.num_parts + chosen)
    column = tl.minimum(start, logits.vocab_size - 1) + tl.arange(0, group_size)
    value = load_logits(logits, row, column, (column >= 0) & (column < logits.vocab_size))
    if load_value(draw.temperatures, row) > 0:
        best = tl.max(value, axis=0)
        noise = gumbel_noise(draw, row, first_token + column)
        value = (value - best) * inverse_temperature(draw, row) + noise
    column = tl.maximum(tl.minimum(lowest_best(value, column), logits.vocab_size - 1), 0)
    return tl.max(score, axis=0), column


@triton.jit  # type: ignore[untyped-decorator]
def load_parts(parts: Parts, row: tl.tensor, block_parts: tl.constexpr) -> tl.tensor:
    """Reads maxima and masses of a row's parts; -inf and 0 behind the last one."""
    part = tl.arange(0, block_parts)
    place = row * parts.num_parts + part
    is_part = part < parts.num_parts
    maxima = tl.load(parts.maxima + place, mask=is_part, other=float("-inf"))
    masses = tl.load(parts.masses + place, mask=is_part, other=0.0)
    return maxima, masses
