"""Sampling with keyed Gumbel noise, in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

# SplitMix64's increment and the two multipliers of its mixing function, as int64.
INCREMENT = 0x9E3779B97F4A7C15 - 2**64
MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
MULTIPLIER_2 = 0x94D049BB133111EB - 2**64

TOKEN_MASK = 0xFFFFFFFF
"""Low half of a packed draw: this minus the token id, so the lowest id wins of equal scores."""


def sample_tokens(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Implements `nv_kernels.ops.sampling.sample_tokens`."""
    return _best(logits, temperatures, seeds, positions, first_token=0)[1]


def sample_shard(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, *, first_token: int
) -> Tensor:
    """Implements `nv_kernels.ops.sampling.sample_shard`."""
    scores, columns = _best(logits, temperatures, seeds, positions, first_token=first_token)
    # The order of floats is that of their bits, once those of negative ones are turned around.
    # The sum turns -0.0 into 0.0, which ranks with it.
    bits = (scores + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (TOKEN_MASK - (columns + first_token))


def _best(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, *, first_token: int
) -> tuple[Tensor, Tensor]:
    """Finds each row's best score, [num_rows] fp32, and its column, [num_rows] int64."""
    best = logits.argmax(dim=-1)
    best_scores = logits.gather(1, best[:, None])[:, 0].float()
    drawn = (temperatures > 0).nonzero().flatten()
    if drawn.numel():
        scores = logits[drawn].float() / temperatures[drawn, None]
        scores += gumbel_noise(
            seeds[drawn], positions[drawn], logits.shape[-1], first_token=first_token
        )
        best[drawn] = scores.argmax(dim=-1)
        best_scores[drawn] = scores.gather(1, best[drawn][:, None])[:, 0]
    return best_scores, best


def gumbel_noise(
    seeds: Tensor, positions: Tensor, num_tokens: int, *, first_token: int = 0
) -> Tensor:
    """Makes the noise of every row and token.

    Args:
        seeds: [num_rows] int64.
        positions: [num_rows] int64.
        num_tokens: Number of token ids.
        first_token: The first of them.

    Returns:
        Standard Gumbel noise, [num_rows, num_tokens] fp32.
    """
    keys = _mix(_mix(seeds) + positions * INCREMENT)
    tokens = torch.arange(first_token, first_token + num_tokens, device=seeds.device)
    counters = (tokens + 1) * INCREMENT
    bits = _mix(keys[:, None] + counters)
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
