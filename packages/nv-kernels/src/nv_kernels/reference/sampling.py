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


def sample_tokens(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Implements `nv_kernels.ops.sampling.sample_tokens`."""
    best = logits.argmax(dim=-1)
    drawn = (temperatures > 0).nonzero().flatten()
    if drawn.numel():
        scores = logits[drawn].float() / temperatures[drawn, None]
        scores += gumbel_noise(seeds[drawn], positions[drawn], logits.shape[-1])
        best[drawn] = scores.argmax(dim=-1)
    return best


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Makes the noise of every row and token.

    Args:
        seeds: [num_rows] int64.
        positions: [num_rows] int64.
        vocab_size: Number of token ids.

    Returns:
        Standard Gumbel noise, [num_rows, vocab_size] fp32.
    """
    keys = _mix(_mix(seeds) + positions * INCREMENT)
    counters = torch.arange(1, vocab_size + 1, device=seeds.device) * INCREMENT
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
