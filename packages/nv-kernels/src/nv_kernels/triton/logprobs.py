"""Log-probabilities as two Triton kernels.

The first reads each part of each row once: it leaves the part's maximum and mass, how many of its
tokens come before the chosen one, and its own most probable tokens, taken out one after the other.
The second joins the parts of a row in the same way.

A packed token is an int64 with the logit's key (see `logits.py`) above the inverted token id, so
that one maximum finds the best token and the lowest id among equals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from nv_kernels.reference.logprobs import TokenLogprobs
from nv_kernels.triton.device import device_of
from nv_kernels.triton.group_draw import load_parts
from nv_kernels.triton.logits import Parts, key_of

if TYPE_CHECKING:
    from torch import Tensor

_PART_SIZE = 4096


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """Implements `nv_kernels.ops.logprobs.token_logprobs`."""
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, _PART_SIZE)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    result = TokenLogprobs(
        logprobs=empty(dtype=torch.float32),
        ranks=empty(dtype=torch.int64),
        top_logprobs=empty(num_top, dtype=torch.float32),
        top_token_ids=empty(num_top, dtype=torch.int64),
    )
    if num_rows == 0:
        return result
    maxima = empty(num_parts, dtype=torch.float32)
    masses = empty(num_parts, dtype=torch.float32)
    parts = Parts(num_parts, maxima=maxima, masses=masses)
    num_before = empty(num_parts, dtype=torch.int32)
    best = empty(num_parts, num_top, dtype=torch.int64)
    with device_of(logits):
        _weigh_parts_kernel[(num_rows, num_parts)](
            logits,
            logits.stride(0),
            logits.shape[1],
            token_ids,
            token_ids.stride(0),
            parts,
            num_before,
            best,
            part_size=_PART_SIZE,
            num_top=num_top,
            num_warps=8,
        )
        _join_parts_kernel[(num_rows,)](
            logits,
            logits.stride(0),
            token_ids,
            token_ids.stride(0),
            parts,
            num_before,
            best,
            result.logprobs,
            result.ranks,
            result.top_logprobs,
            result.top_token_ids,
            block_parts=triton.next_power_of_2(num_parts),
            block_best=triton.next_power_of_2(max(num_parts * num_top, 1)),
            num_top=num_top,
        )
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _weigh_parts_kernel(
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    token_ids_ptr: tl.tensor,
    token_ids_stride: tl.tensor,
    parts: Parts,
    num_before_ptr: tl.tensor,
    best_ptr: tl.tensor,
    part_size: tl.constexpr,
    num_top: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    place = row * parts.num_parts + part
    token = part * part_size + tl.arange(0, part_size)
    is_token = token < vocab_size
    value = tl.load(logits_ptr + row * row_stride + token, mask=is_token, other=float("-inf"))
    value = value.to(tl.float32)
    best = tl.max(value, axis=0)
    zero = tl.where(best == float("-inf"), 0.0, best)
    tl.store(parts.maxima + place, best)
    tl.store(parts.masses + place, tl.sum(tl.exp(value - zero), axis=0))

    chosen = tl.load(token_ids_ptr + row * token_ids_stride)
    chosen_value = tl.load(logits_ptr + row * row_stride + chosen).to(tl.float32)
    is_before = (value > chosen_value) | ((value == chosen_value) & (token < chosen))
    tl.store(num_before_ptr + place, tl.sum((is_before & is_token).to(tl.int32), axis=0))

    if num_top > 0:
        packed = (key_of(value).to(tl.int64) << 32) | (4294967295 - token.to(tl.int64))
        packed = tl.where(is_token, packed, -9223372036854775807)
        for index in range(num_top):
            first = tl.max(packed, axis=0)
            tl.store(best_ptr + place * num_top + index, first)
            packed = tl.where(packed == first, -9223372036854775807, packed)


@triton.jit  # type: ignore[untyped-decorator]
def _join_parts_kernel(
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    token_ids_ptr: tl.tensor,
    token_ids_stride: tl.tensor,
    parts: Parts,
    num_before_ptr: tl.tensor,
    best_ptr: tl.tensor,
    logprobs_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    top_logprobs_ptr: tl.tensor,
    top_token_ids_ptr: tl.tensor,
    block_parts: tl.constexpr,
    block_best: tl.constexpr,
    num_top: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    maxima, masses = load_parts(parts, row, block_parts)
    best = tl.max(maxima, axis=0)
    log_sum = best + tl.log(tl.sum(masses * tl.exp(maxima - best), axis=0))
    chosen = tl.load(token_ids_ptr + row * token_ids_stride)
    chosen_value = tl.load(logits_ptr + row * row_stride + chosen).to(tl.float32)
    tl.store(logprobs_ptr + row, chosen_value - log_sum)
    part = tl.arange(0, block_parts)
    is_part = part < parts.num_parts
    num_before = tl.load(num_before_ptr + row * parts.num_parts + part, mask=is_part, other=0)
    tl.store(ranks_ptr + row, (1 + tl.sum(num_before, axis=0)).to(tl.int64))

    if num_top > 0:
        index = tl.arange(0, block_best)
        num_best = parts.num_parts * num_top
        packed = tl.load(
            best_ptr + row * num_best + index, mask=index < num_best, other=-9223372036854775807
        )
        for place in range(num_top):
            first = tl.max(packed, axis=0)
            packed = tl.where(packed == first, -9223372036854775807, packed)
            key = (first >> 32).to(tl.int32)
            value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            tl.store(top_logprobs_ptr + row * num_top + place, value - log_sum)
            tl.store(top_token_ids_ptr + row * num_top + place, 4294967295 - (first & 4294967295))
