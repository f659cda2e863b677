"""Sampling with keyed Gumbel noise, in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.logit_rules import FREQUENCY, PRESENCE, REPETITION

if TYPE_CHECKING:
    from torch import Tensor

    from nv_kernels.logit_rules import LogitAdjustments, TokenFilters

GROUP_SIZE = 16
"""Tokens of a group; it decides which draw a seed gives, so it is the same everywhere."""

TOKEN_MASK = 0xFFFFFFFF
"""Low half of a packed draw: this minus the token id, so that the lowest of equal ones wins."""

# SplitMix64's increment and the two multipliers of its mixing function, as int64.
INCREMENT = 0x9E3779B97F4A7C15 - 2**64
MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
MULTIPLIER_2 = 0x94D049BB133111EB - 2**64


def sample_tokens(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    adjustments: LogitAdjustments | None,
    filters: TokenFilters | None,
) -> Tensor:
    """Implements `nv_kernels.ops.sampling.sample_tokens`."""
    scores = adjusted_logits(logits, adjustments)
    _, tokens = _draw_by_groups(scores, temperatures, seeds, positions, first_token=0)
    if filters is None:
        return tokens
    is_filtered = (filters.top_k > 0) | (filters.top_p < 1) | (filters.min_p > 0)
    rows = (is_filtered & (temperatures > 0)).nonzero().flatten()
    if rows.numel():
        scaled = scaled_logits(scores[rows], temperatures[rows])
        kept = keep_probable(
            scaled, top_k=filters.top_k[rows], top_p=filters.top_p[rows], min_p=filters.min_p[rows]
        )
        ids = torch.arange(scores.shape[1], device=scores.device)
        noise = gumbel_noise(seeds[rows], positions[rows], ids.expand_as(scaled))
        tokens[rows] = (scaled + noise).masked_fill(~kept, -torch.inf).argmax(dim=-1)
    return tokens


def sample_shard(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, *, first_token: int
) -> Tensor:
    """Implements `nv_kernels.ops.sampling.sample_shard`."""
    scores, tokens = _draw_by_groups(
        logits.float(), temperatures, seeds, positions, first_token=first_token
    )
    # The order of floats is that of their bits, once those of negative ones are turned around.
    # The sum turns -0.0 into 0.0, which ranks with it.
    bits = (scores + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (TOKEN_MASK - tokens)


def adjusted_logits(logits: Tensor, adjustments: LogitAdjustments | None) -> Tensor:
    """Applies steps 1 to 3 of `sample_tokens`; returns [num_rows, vocab_size] fp32, a copy."""
    scores = logits.to(torch.float32, copy=True)
    if adjustments is None:
        return scores
    table_rows = adjustments.table_rows.long()
    if adjustments.allowed_mask is not None:
        ids = torch.arange(scores.shape[1], device=scores.device)
        words = adjustments.allowed_mask[table_rows][:, ids // 32]
        scores.masked_fill_((words >> (ids % 32)) & 1 == 0, -torch.inf)
    if adjustments.logit_bias is not None:
        scores += adjustments.logit_bias[table_rows]
    if adjustments.token_counts is not None and adjustments.penalties is not None:
        seen = adjustments.token_counts[table_rows]
        count = seen >> 1
        repetition = adjustments.penalties[:, REPETITION, None]
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(seen > 0, repeated, scores)
        scores -= adjustments.penalties[:, FREQUENCY, None] * count
        scores -= adjustments.penalties[:, PRESENCE, None] * (count > 0)
    return scores


def scaled_logits(scores: Tensor, temperatures: Tensor) -> Tensor:
    """Divides the distance to each row's best by the temperature; the best becomes 0."""
    return (scores - scores.amax(dim=-1, keepdim=True)) / temperatures[:, None]


def keep_probable(scaled: Tensor, *, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Applies steps 5 to 7 of `sample_tokens`.

    Args:
        scaled: What `scaled_logits` returns, [num_rows, vocab_size].
        top_k: [num_rows], 0 for off.
        top_p: [num_rows], from 1 on off.
        min_p: [num_rows], 0 for off.

    Returns:
        Which tokens stay, [num_rows, vocab_size] bool; the best ones always do.
    """
    ordered = scaled.sort(dim=-1, descending=True).values
    last = scaled.shape[1] - 1
    kth = ordered.gather(1, (top_k.long()[:, None] - 1).clamp(0, last))
    least_probable = min_p.clamp(0, 1).log()[:, None]
    lowest = torch.where(top_k[:, None] > 0, kth, -torch.inf).maximum(least_probable)
    weights = ordered.exp().masked_fill(ordered < lowest, 0)
    # Probability of the tokens before each one; among equals the first of them decides for all.
    before = weights.cumsum(dim=-1) - weights
    is_before = before < top_p[:, None] * weights.sum(dim=-1, keepdim=True)
    reaching = ordered.gather(1, (is_before.sum(dim=-1, keepdim=True) - 1).clamp(min=0))
    lowest = lowest.maximum(torch.where(top_p[:, None] < 1, reaching, -torch.inf))
    return scaled >= lowest


def _draw_by_groups(
    scores: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, *, first_token: int
) -> tuple[Tensor, Tensor]:
    """Draws a group and a token of it, or takes the best token.

    Returns:
        The group's score, [num_rows] fp32, and the token id, [num_rows] int64.
    """
    num_rows, num_tokens = scores.shape
    if scores.device.type == "cpu" and num_tokens and not bool((temperatures > 0).any()):
        # Greedy rows alone need no groups: 0.3 instead of 4 ms for 8 rows of 49,152 tokens. On a
        # GPU the host would have to wait to know.
        best, tokens = scores.max(dim=-1)
        return best, first_token + tokens
    # Groups begin at multiples of their size, wherever the first column is.
    before = first_token % GROUP_SIZE
    padding = (before, -(before + num_tokens) % GROUP_SIZE)
    groups = torch.nn.functional.pad(scores, padding, value=-torch.inf)
    groups = torch.unflatten(groups, 1, (-1, GROUP_SIZE))
    starts = torch.arange(groups.shape[1], device=scores.device) * GROUP_SIZE - before
    is_drawn = (temperatures > 0)[:, None]
    scale = torch.where(is_drawn, 1 / temperatures[:, None], 1)

    maxima = groups.amax(dim=-1)
    best = maxima.amax(dim=-1, keepdim=True)
    best = torch.where(best == -torch.inf, 0, best)
    masses = (groups - best[:, :, None]).mul_(scale[:, :, None]).exp_().sum(dim=-1).log()
    counters = (-1 - first_token - starts.clamp(min=0)).expand(num_rows, -1)
    drawn = best * scale + masses + gumbel_noise(seeds, positions, counters)
    group_scores = torch.where(is_drawn, drawn, maxima)
    chosen = group_scores.argmax(dim=-1, keepdim=True)

    ids = starts[chosen] + torch.arange(GROUP_SIZE, device=scores.device)
    values = groups.gather(1, chosen[:, :, None].expand(-1, 1, GROUP_SIZE))[:, 0]
    noise = gumbel_noise(seeds, positions, first_token + ids)
    values = torch.where(is_drawn, (values - best) * scale + noise, values)
    tokens = ids.gather(1, values.argmax(dim=-1, keepdim=True)).clamp(0, num_tokens - 1)
    return group_scores.gather(1, chosen)[:, 0], first_token + tokens[:, 0]


def gumbel_noise(seeds: Tensor, positions: Tensor, counters: Tensor) -> Tensor:
    """Makes the noise of rows and counters.

    Args:
        seeds: [num_rows] int64.
        positions: [num_rows] int64.
        counters: Token ids, or -1 - a group's first one, [num_rows, any] int64.

    Returns:
        Standard Gumbel noise, [num_rows, any] fp32.
    """
    keys = _mix(_mix(seeds) + positions * INCREMENT)
    bits = _mix(keys[:, None] + (counters + 1) * INCREMENT)
    # 32 random bits as a float in (0, 1). The exponential variate -log(1 - u) keeps its relative
    # precision near 0, where the winners are; only its far tail is cut.
    uniform = (_shift_right(bits, 32).float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24)))


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift_right(value, 30)) * MULTIPLIER_1
    value = (value ^ _shift_right(value, 27)) * MULTIPLIER_2
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Shifts int64 right and fills with zeros; torch's own shift copies the sign."""
    return (value >> bits).bitwise_and(2 ** (64 - bits) - 1)
