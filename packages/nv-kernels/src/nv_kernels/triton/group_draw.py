"""Drawing a token in two stages: a group of 16 by its mass, then a token of the group.

A group's score and the token drawn from it depend on the group's own logits alone, bit for bit, so
it does not matter to a draw how a vocabulary is cut into pieces of whole groups. For that, sums and
fused multiply-adds are spelled out: a compiler chooses them anew for every shape.
"""

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
    noise_key,
)


@triton.jit  # type: ignore[untyped-decorator]
def weigh_groups(
    groups: tl.tensor, best: tl.tensor, scale: tl.tensor, key: tl.tensor, counter: tl.tensor
) -> tl.tensor:
    """Weighs groups for a draw.

    Args:
        groups: Logits, [num_groups, 16] of one row or [num_groups, 16, num_rows], fp32.
        best: The best of each group, [num_groups] or [num_groups, num_rows].
        scale: Inverse temperature, a scalar or [num_rows].
        key: See `noise_key`, [1] or [num_rows].
        counter: What each group's noise is keyed by, [num_groups] or [num_groups, 1].

    Returns:
        The masses, sums of exp((logit - best) * scale), and the scores, both shaped as `best`.
    """
    log2_e: tl.constexpr = 1.4426950408889634
    # Where nothing may be drawn the mass is 0, not NaN.
    zero = tl.where(best == float("-inf"), 0.0, best)
    weights = tl.exp2((groups - tl.expand_dims(zero, 1)) * (scale * log2_e))
    masses = _sum_of_16(weights)
    # log(mass) + noise, as the logarithm of a quotient.
    score = tl.fma(zero, scale, tl.log(masses / exponential_noise(key, counter)))
    return masses, score


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_16(values: tl.tensor) -> tl.tensor:
    """Sums along the second dimension in one order, whatever the layout: two by two."""
    return _sum_pairs(_sum_pairs(_sum_pairs(_sum_pairs(values, 8), 4), 2), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_pairs(values: tl.tensor, num_pairs: tl.constexpr) -> tl.tensor:
    if len(values.shape) == 2:
        pairs = tl.reshape(values, (values.shape[0], num_pairs, 2))
    else:
        pairs = tl.reshape(values, (values.shape[0], num_pairs, 2, values.shape[2]))
    sums = tl.sum(pairs, axis=2)
    if num_pairs == 1:
        sums = tl.sum(sums, axis=1)
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def draw_from_group(
    value: tl.tensor, is_drawn: tl.tensor, scale: tl.tensor, key: tl.tensor, token: tl.tensor
) -> tl.tensor:
    """Draws a token of one group, or takes its best one.

    Args:
        value: Logits, [16] of one row or [16, num_rows], fp32.
        is_drawn: Whether the temperature is above 0, a scalar or [num_rows].
        scale: Inverse temperature, a scalar or [num_rows].
        key: See `noise_key`, [1] or [num_rows].
        token: Token ids, shaped as `value`.

    Returns:
        The token id, a scalar or [num_rows]; the largest int32 where nothing can be drawn.
    """
    distance = value - tl.max(value, axis=0)
    score = tl.fma(distance, scale, gumbel_noise(key, token))
    return lowest_best(tl.where(is_drawn, score, value), token)


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
    """Draws a group among neighbouring columns of a row, or takes the one with the best token.

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
    groups = tl.reshape(value, (num_groups, group_size))
    start = first_column + group_size * tl.arange(0, num_groups)
    group_best = tl.max(groups, axis=1)
    best = tl.max(group_best, axis=0)
    score = group_best
    mass = 0.0
    if load_value(draw.temperatures, row) > 0:
        scale = inverse_temperature(draw, row)
        counter = -1 - first_token - tl.maximum(start, 0)
        masses, score = weigh_groups(groups, group_best, scale, noise_key(draw, row), counter)
        zero = tl.where(best == float("-inf"), 0.0, best)
        mass = tl.sum(masses * tl.exp((group_best - zero) * scale), axis=0)
    return best, mass, tl.max(score, axis=0), lowest_best(score, start)


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
    is_drawn = load_value(draw.temperatures, row) > 0
    scale, key = inverse_temperature(draw, row), noise_key(draw, row)
    token = draw_from_group(value, is_drawn, scale, key, first_token + column)
    column = tl.maximum(tl.minimum(token - first_token, logits.vocab_size - 1), 0)
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
