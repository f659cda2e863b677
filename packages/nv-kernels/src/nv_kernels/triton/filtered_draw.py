"""Drawing with top-k, top-p and min-p, without sorting.

All three keep the tokens from some logit upwards, so a row needs one threshold. One program per row
looks for it among few candidates: it opens only the tiles of 64 tokens whose maxima are among the
highest few hundred, and gathers the tokens that reach the lowest of these maxima. Whatever is not
gathered lies below that bound. Usually the threshold lies above it, and all that is left happens in
registers. If not, the program tries again with more tiles, and at last searches the whole row,
which is slow (a flat distribution with top-p, for example) and gives the same tokens.

A threshold is built bit by bit on keys (see `logits.py`): the largest key from which on the tokens'
weights sum up to a target, where a weight is 1 for top-k and a probability for top-p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from nv_kernels.triton.group_draw import draw_from_best_group, load_parts
from nv_kernels.triton.logits import (
    Draw,
    Filters,
    Logits,
    Parts,
    gumbel_noise,
    inverse_temperature,
    key_of,
    load_logits,
    load_value,
    lowest_best,
    noise_key,
)

if TYPE_CHECKING:
    from torch import Tensor

TILE_SIZE = 64
"""Neighbouring tokens that are opened together."""
_MAX_CANDIDATES = 4096
_MIN_OPENED = 256
"""Tiles to open at the first try; four times as many at the second."""


def draw_filtered(
    logits: Logits,
    draw: Draw,
    parts: Parts,
    filters: Filters,
    tile_maxima: Tensor,
    output: Tensor,
    *,
    part_size: int,
    group_size: int,
    block_parts: int,
) -> None:
    """Launches the kernel that draws from weighed parts.

    Args:
        logits: The logits.
        draw: See `Draw`.
        parts: What the first kernel has left.
        filters: What to leave out.
        tile_maxima: Maximum of each tile of tokens, [num_rows, num_tiles] fp32, whole parts.
        output: Token ids, [num_rows] int64; written.
        part_size: Tokens of a part.
        group_size: Tokens of a group, which rows without filters draw among.
        block_parts: Power of two that holds the parts of a row.
    """
    num_rows, num_tiles = tile_maxima.shape
    device = output.device
    tile_ids = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=device)
    candidates = torch.empty((num_rows, _MAX_CANDIDATES), dtype=torch.int32, device=device)
    _draw_filtered_kernel[(num_rows,)](
        logits,
        draw,
        parts,
        filters,
        tile_maxima,
        tile_ids,
        candidates,
        output,
        num_tiles,
        part_size=part_size,
        block_parts=block_parts,
        block_tiles=triton.next_power_of_2(num_tiles),
        tile_size=TILE_SIZE,
        group_size=group_size,
        max_candidates=_MAX_CANDIDATES,
        min_opened=_MIN_OPENED,
        num_warps=8,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _load_top_p(filters: Filters, row: tl.tensor) -> tl.tensor:
    """Reads a row's top_p; always above 0, so that no target is reached by no token at all."""
    return tl.maximum(load_value(filters.top_p, row), 1e-30)


@triton.jit  # type: ignore[untyped-decorator]
def _largest_key_reaching(keys: tl.tensor, weights: tl.tensor, target: tl.tensor) -> tl.tensor:
    """The largest key from which on the weights reach a target; the smallest int32 if none does."""
    reached = tl.sum(tl.where(keys >= 0, weights, 0.0), axis=0)
    key = tl.where(reached >= target, 0, -2147483648)
    bit = 1073741824
    for _bit in range(31):
        reached = tl.sum(tl.where(keys >= key + bit, weights, 0.0), axis=0)
        key = tl.where(reached >= target, key + bit, key)
        bit = bit >> 1
    return key


@triton.jit  # type: ignore[untyped-decorator]
def _gather_candidates(
    logits: Logits,
    row: tl.tensor,
    bound: tl.tensor,
    tile_keys: tl.tensor,
    tile_ids_ptr: tl.tensor,
    candidates_ptr: tl.tensor,
    num_tiles: tl.tensor,
    block_tiles: tl.constexpr,
    tile_size: tl.constexpr,
    max_candidates: tl.constexpr,
) -> tl.tensor:
    """Lists the tokens whose keys reach a bound; returns their number, which may pass the list."""
    is_open = tile_keys >= bound
    tile_place = tl.cumsum(is_open.to(tl.int32), axis=0) - 1
    tile_ids_ptr += row * num_tiles
    tl.store(tile_ids_ptr + tile_place, tl.arange(0, block_tiles), mask=is_open)
    num_open = tl.sum(is_open.to(tl.int32), axis=0)
    # What one thread stores another one reads.
    tl.debug_barrier()
    step_tiles: tl.constexpr = max_candidates // tile_size
    count = 0
    for first in range(0, num_open, step_tiles):
        index = first + tl.arange(0, step_tiles)
        tile = tl.load(tile_ids_ptr + index, mask=index < num_open, other=0)
        token = tile[:, None] * tile_size + tl.arange(0, tile_size)[None, :]
        is_wanted = (index < num_open)[:, None] & (token < logits.vocab_size)
        value = load_logits(logits, row, token, is_wanted)
        is_candidate = is_wanted & (key_of(value) >= bound)
        is_candidate = tl.reshape(is_candidate.to(tl.int32), (max_candidates,))
        place = count + tl.cumsum(is_candidate, axis=0) - 1
        tl.store(
            candidates_ptr + row * max_candidates + place,
            tl.reshape(token, (max_candidates,)),
            mask=(is_candidate > 0) & (place < max_candidates),
        )
        count += tl.sum(is_candidate, axis=0)
    tl.debug_barrier()
    return count


@triton.jit  # type: ignore[untyped-decorator]
def _row_weight(
    logits: Logits,
    row: tl.tensor,
    key: tl.tensor,
    best: tl.tensor,
    scale: tl.tensor,
    num_parts: tl.tensor,
    part_size: tl.constexpr,
    counts: tl.constexpr,
) -> tl.tensor:
    """Sums up the weights of all tokens of a row from a key on: probabilities, or 1 each."""
    total = 0.0
    for part in range(num_parts):
        token = part * part_size + tl.arange(0, part_size)
        value = load_logits(logits, row, token, token < logits.vocab_size)
        weight = tl.exp((value - best) * scale)
        if counts:
            weight = tl.where(value > float("-inf"), 1.0, 0.0)
        total += tl.sum(tl.where(key_of(value) >= key, weight, 0.0), axis=0)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _row_key_reaching(
    logits: Logits,
    row: tl.tensor,
    target: tl.tensor,
    best: tl.tensor,
    scale: tl.tensor,
    num_parts: tl.tensor,
    part_size: tl.constexpr,
    counts: tl.constexpr,
) -> tl.tensor:
    """Does over a whole row what `_largest_key_reaching` does over a few keys."""
    reached = _row_weight(logits, row, 0, best, scale, num_parts, part_size, counts)
    key = tl.where(reached >= target, 0, -2147483648)
    bit = 1073741824
    for _bit in range(31):
        reached = _row_weight(logits, row, key + bit, best, scale, num_parts, part_size, counts)
        key = tl.where(reached >= target, key + bit, key)
        bit = bit >> 1
    return key


@triton.jit  # type: ignore[untyped-decorator]
def _draw_from_row(
    logits: Logits,
    draw: Draw,
    filters: Filters,
    row: tl.tensor,
    best: tl.tensor,
    threshold: tl.tensor,
    num_parts: tl.tensor,
    part_size: tl.constexpr,
) -> tl.tensor:
    """Finds the threshold among all tokens of a row, from that of min-p on, and draws."""
    scale = inverse_temperature(draw, row)
    top_k = load_value(filters.top_k, row)
    top_p = _load_top_p(filters, row)
    if top_k > 0:
        kth = _row_key_reaching(
            logits, row, top_k.to(tl.float32), best, scale, num_parts, part_size, counts=True
        )
        threshold = tl.maximum(threshold, kth)
    if top_p < 1:
        mass = _row_weight(logits, row, threshold, best, scale, num_parts, part_size, counts=False)
        reaching = _row_key_reaching(
            logits, row, top_p * mass, best, scale, num_parts, part_size, counts=False
        )
        threshold = tl.maximum(threshold, reaching)
    best_score = float("-inf")
    best_token = 0
    for part in range(num_parts):
        token = part * part_size + tl.arange(0, part_size)
        value = load_logits(logits, row, token, token < logits.vocab_size)
        score = (value - best) * scale + gumbel_noise(noise_key(draw, row), token)
        score = tl.where(key_of(value) >= threshold, score, float("-inf"))
        part_score = tl.max(score, axis=0)
        part_token = lowest_best(score, token)
        best_token = tl.where(part_score > best_score, part_token, best_token)
        best_score = tl.maximum(part_score, best_score)
    return best_token


@triton.jit  # type: ignore[untyped-decorator]
def _draw_filtered_kernel(
    logits: Logits,
    draw: Draw,
    parts: Parts,
    filters: Filters,
    tile_maxima_ptr: tl.tensor,
    tile_ids_ptr: tl.tensor,
    candidates_ptr: tl.tensor,
    output_ptr: tl.tensor,
    num_tiles: tl.tensor,
    part_size: tl.constexpr,
    block_parts: tl.constexpr,
    block_tiles: tl.constexpr,
    tile_size: tl.constexpr,
    group_size: tl.constexpr,
    max_candidates: tl.constexpr,
    min_opened: tl.constexpr,
) -> None:
    """Draws one row's token, with its filters if it has any."""
    row = tl.program_id(0).to(tl.int64)
    top_k = load_value(filters.top_k, row)
    top_p = _load_top_p(filters, row)
    min_p = load_value(filters.min_p, row)
    is_drawn = load_value(draw.temperatures, row) > 0
    result = -1
    if is_drawn & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        scale = inverse_temperature(draw, row)
        maxima, masses = load_parts(parts, row, block_parts)
        best = tl.max(maxima, axis=0)
        lowest = -2147483648
        if min_p > 0:
            lowest = key_of(best + tl.log(tl.minimum(min_p, 1.0)) / scale)
        tile = tl.arange(0, block_tiles)
        tile_max = tl.load(
            tile_maxima_ptr + row * num_tiles + tile,
            mask=tile < num_tiles,
            other=float("-inf"),
        )
        # Tiles of which nothing may be drawn are never opened.
        tile_keys = tl.where(tile_max > float("-inf"), key_of(tile_max), -2147483648)
        ones = tl.full([block_tiles], 1.0, tl.float32)
        wanted = min_opened
        for _attempt in range(2):
            if result < 0:
                num_wanted = tl.maximum(wanted, top_k)
                bound = _largest_key_reaching(tile_keys, ones, num_wanted.to(tl.float32))
                # Where there are fewer tiles, all their tokens are candidates.
                bound = tl.maximum(bound, -2139095040)  # the key above that of -inf
                count = _gather_candidates(
                    logits, row, bound, tile_keys, tile_ids_ptr, candidates_ptr, num_tiles,
                    block_tiles, tile_size, max_candidates,
                )  # fmt: skip
                if count <= max_candidates:
                    index = tl.arange(0, max_candidates)
                    is_there = index < count
                    place = candidates_ptr + row * max_candidates + index
                    token = tl.load(place, mask=is_there, other=0)
                    value = load_logits(logits, row, token, is_there)
                    keys = tl.where(is_there, key_of(value), -2147483648)
                    weights = tl.where(is_there, tl.exp((value - best) * scale), 0.0)
                    # What is gathered is all there is from the bound on; nothing is known below.
                    threshold = lowest
                    if top_k > 0:
                        ones_there = tl.where(is_there, 1.0, 0.0)
                        kth = _largest_key_reaching(keys, ones_there, top_k.to(tl.float32))
                        threshold = tl.maximum(threshold, kth)
                    is_all = bound == -2139095040
                    if top_p < 1:
                        gathered = tl.sum(tl.where(keys >= threshold, weights, 0.0), axis=0)
                        mass = gathered
                        if (threshold < bound) & (lowest == -2147483648):
                            mass = tl.sum(masses * tl.exp((maxima - best) * scale), axis=0)
                        is_mass_known = is_all | (threshold >= bound) | (lowest == -2147483648)
                        target = top_p * mass
                        if is_mass_known & (is_all | (gathered >= target)):
                            reaching = _largest_key_reaching(keys, weights, target)
                            threshold = tl.maximum(threshold, reaching)
                    if is_all | (threshold >= bound):
                        score = (value - best) * scale + gumbel_noise(noise_key(draw, row), token)
                        score = tl.where(is_there & (keys >= threshold), score, float("-inf"))
                        result = lowest_best(score, token)
                wanted = 4 * wanted
        if result < 0:
            result = _draw_from_row(
                logits, draw, filters, row, best, lowest, parts.num_parts, part_size
            )
    else:
        _score, result = draw_from_best_group(logits, draw, parts, row, 0, group_size, block_parts)
    tl.store(output_ptr + row, tl.minimum(result, logits.vocab_size - 1).to(tl.int64))
