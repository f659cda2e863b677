"""Sampling with keyed Gumbel noise as two Triton kernels.

The first finds the best token of each block_n tokens of each row, so that one row alone still
fills the device; the second finds the best of those. Scores never leave registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from nv_kernels.triton.device import device_of

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK_N = 4096


def sample_tokens(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Implements `nv_kernels.ops.sampling.sample_tokens`."""
    return _best(logits, temperatures, seeds, positions, first_token=0, packs_score=False)


def sample_shard(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, *, first_token: int
) -> Tensor:
    """Implements `nv_kernels.ops.sampling.sample_shard`."""
    return _best(logits, temperatures, seeds, positions, first_token=first_token, packs_score=True)


def _best(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    first_token: int,
    packs_score: bool,
) -> Tensor:
    num_rows, vocab_size = logits.shape
    output = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return output
    block_n = min(_BLOCK_N, triton.next_power_of_2(vocab_size))
    num_parts = triton.cdiv(vocab_size, block_n)
    scores = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
    with device_of(logits):
        _best_of_part_kernel[(num_rows, num_parts)](
            logits,
            temperatures,
            seeds,
            positions,
            scores,
            tokens,
            logits.stride(0),
            vocab_size,
            first_token,
            num_parts,
            block_n=block_n,
            num_warps=8,
        )
        _best_of_parts_kernel[(num_rows,)](
            scores,
            tokens,
            output,
            num_parts,
            block_parts=triton.next_power_of_2(num_parts),
            packs_score=packs_score,
        )
    return output


@triton.jit  # type: ignore[untyped-decorator]
def _mix(value: tl.tensor) -> tl.tensor:
    """SplitMix64's mixing function on uint64."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_part_kernel(
    logits_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    first_token: tl.tensor,
    num_parts: tl.tensor,
    block_n: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * block_n + tl.arange(0, block_n)
    inside = column < vocab_size
    score = tl.load(logits_ptr + row * row_stride + column, mask=inside, other=float("-inf")).to(
        tl.float32
    )
    token = first_token + column
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0:
        increment = tl.full([1], 0x9E3779B97F4A7C15, tl.uint64)
        seed = (tl.load(seeds_ptr + row) + tl.zeros([1], tl.int64)).to(tl.uint64, bitcast=True)
        position = (tl.load(positions_ptr + row) + tl.zeros([1], tl.int64)).to(
            tl.uint64, bitcast=True
        )
        key = _mix(_mix(seed) + position * increment)
        bits = _mix(key + (token + 1).to(tl.uint64) * increment)
        uniform = ((bits >> 32).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2**-32
        uniform = tl.minimum(uniform, 0.99999994)  # 1 - 2**-24
        # -log(1 - u); the series keeps the relative precision that the logarithm loses near 0.
        series = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334))
        exponential = tl.where(uniform < 0.001, series, -tl.log(1.0 - uniform))
        score = score / temperature - tl.log(exponential)
    best = tl.max(score, axis=0)
    # Of equal scores the lowest token id wins, whatever the order of the reduction.
    best_token = tl.min(tl.where((score == best) & inside, token, 2147483647), axis=0)
    tl.store(scores_ptr + row * num_parts + part, best)
    tl.store(tokens_ptr + row * num_parts + part, best_token)


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_parts_kernel(
    scores_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    output_ptr: tl.tensor,
    num_parts: tl.tensor,
    block_parts: tl.constexpr,
    packs_score: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, block_parts)
    inside = part < num_parts
    score = tl.load(scores_ptr + row * num_parts + part, mask=inside, other=float("-inf"))
    token = tl.load(tokens_ptr + row * num_parts + part, mask=inside, other=2147483647)
    best = tl.max(score, axis=0)
    best_token = tl.min(tl.where((score == best) & inside, token, 2147483647), axis=0)
    result = best_token.to(tl.int64)
    if packs_score:
        # As in the reference: the sum turns -0.0 into 0.0, which ranks with it.
        bits = (best + 0.0).to(tl.int32, bitcast=True)
        ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
        result = (ordered << 32) | (0xFFFFFFFF - result)
    tl.store(output_ptr + row, result)
