"""Attention of decode steps (one query token per sequence) over the paged cache.

Legend: m query heads that share a key head, n keys of a tile, d dimensions of a head. Decoding
reads every key and value once and computes little, so these kernels are built to keep the memory
busy. A program attends to a run of tiles of block_n tokens, in one of two ways:

- direct: one program per sequence and key head walks the whole context. Best when the batch alone
  fills the GPU.
- split: contexts are cut into splits; a fixed number of programs share out the splits of the whole
  batch, leave partial results in a workspace, and a second kernel combines them. Best for few
  sequences, and for contexts so long that one program would hold up the rest.

Both add up in the same order: each split has a softmax of its own, and splits are merged one after
the other, in registers or from the workspace. The split length depends on the sequence's own length
and nothing else. So a sequence's result is the same to the last bit, whichever way it is computed
and whatever the rest of the batch is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from nv_kernels.kv_quantisation import FP8
from nv_kernels.triton.device import num_processors
from nv_kernels.triton.fp8 import prepare_query, split_pairs
from nv_kernels.triton.kv_tiles import load_tile, locate_tile
from nv_kernels.triton.launch import launch_options, let_next_start, wait_for_previous

if TYPE_CHECKING:
    from torch import Tensor

    from nv_kernels.metadata import AttentionMetadata, LayerKVCache

MIN_SPLIT_LEN: int = 256
"""Tokens per split, as long as 32 splits cover the context; else the next power of two with which
they do."""

MAX_SPLITS: int = 32
"""Most splits per sequence; bounds the workspace and the time to combine."""

# Numbers that change from step to step must not compile a kernel of their own (Triton makes one for
# 1 and one for multiples of 16).
_COUNTS = ["num_seqs", "num_tokens", "longest_direct", "max_splits", "block_table_stride"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How the kernels are compiled and launched; only block_n changes the last bits of a result."""

    block_n: int
    """Tokens per tile; a power of two."""
    num_warps: int
    num_stages: int
    """Tiles that a program holds: one in use, the others being loaded."""
    max_registers: int | None
    """Per thread, where more programs at once are worth it; None: the compiler's choice."""
    programs_per_processor: int
    """Programs that share out the splits, for each of the GPU's processors."""
    longest_direct: int
    """Contexts of up to this many tokens are walked by one program; at most
    `MAX_SPLITS * MIN_SPLIT_LEN`. 0: all are split."""


def attend_to_decodes(
    query: Tensor,
    kv_cache: LayerKVCache,
    metadata: AttentionMetadata,
    output: Tensor,
    *,
    scale_log2: float,
    owns_padding: bool,
    config: DecodeConfig,
) -> None:
    """Attends from every sequence whose query is one token; the host never waits.

    Args:
        query: [num_tokens, num_heads, head_dim].
        kv_cache: One layer's cache.
        metadata: The batch; sequences with other query lengths are passed over.
        output: Shape of `query`, contiguous; the rows of those sequences are written.
        scale_log2: Factor of the scores, that of cached keys included, times log2(e); positive.
        owns_padding: Whether to write zeros to the tokens after the last sequence.
        config: How to compile and launch.
    """
    num_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = kv_cache.key.shape[1:3]
    group = num_heads // num_kv_heads
    is_fp8 = kv_cache.key.dtype == FP8
    shape = {
        "num_kv_heads": num_kv_heads,
        "group": group,
        "head_dim": head_dim,
        "block_size": block_size,
        "key_offset_stride": kv_cache.key.stride(1),
        "value_offset_stride": kv_cache.value.stride(1),
        "block_m": max(16, triton.next_power_of_2(group)),  # tl.dot takes no side under 16
        "block_n": config.block_n,
        # No side under 16 either, and fp8 cuts it in two.
        "block_d": max(32 if is_fp8 else 16, triton.next_power_of_2(head_dim)),
        "is_fp8": is_fp8,
        "is_settled": metadata.is_settled,
    }
    options = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "maxnreg": config.max_registers,
        **launch_options(query),
    }
    tensors = (query, kv_cache.key, kv_cache.value)
    lengths = (metadata.cu_seqlens_q, metadata.context_lens, metadata.block_table)
    strides = (
        *query.stride()[:2],
        kv_cache.key.stride(0),
        kv_cache.key.stride(2),
        kv_cache.value.stride(0),
        kv_cache.value.stride(2),
        metadata.block_table.stride(0),
    )
    num_rows = max(metadata.num_seqs, metadata.num_tokens) if owns_padding else metadata.num_seqs
    longest_direct = config.longest_direct or -1  # contexts of 0 tokens are somebody's, too
    if config.longest_direct:
        _direct_kernel[(num_kv_heads * num_rows,)](
            *tensors,
            output,
            *lengths,
            scale_log2,
            kv_cache.v_scale,
            metadata.num_seqs,
            metadata.num_tokens,
            longest_direct,
            *strides,
            owns_padding=owns_padding,
            min_split_len=MIN_SPLIT_LEN,
            **shape,
            **options,
        )
        if metadata.max_context_len <= longest_direct:
            return
    max_splits = min(MAX_SPLITS, triton.cdiv(max(metadata.max_context_len, 1), MIN_SPLIT_LEN))
    partial = torch.empty(
        (metadata.num_seqs, num_heads, max_splits, head_dim),
        dtype=torch.float32,
        device=query.device,
    )
    # Per head and split: the largest score, and the sum of the weights taken against it.
    partial_stats = torch.empty(
        (metadata.num_seqs, num_heads, max_splits, 2), dtype=torch.float32, device=query.device
    )
    num_programs = min(
        num_processors(query.device) * config.programs_per_processor,
        metadata.num_seqs * num_kv_heads * max_splits,
    )
    _split_kernel[(num_programs,)](
        *tensors,
        partial,
        partial_stats,
        *lengths,
        scale_log2,
        metadata.num_seqs,
        longest_direct,
        max_splits,
        *strides,
        min_split_len=MIN_SPLIT_LEN,
        max_num_splits=MAX_SPLITS,
        block_seqs=_list_length(metadata.num_seqs),
        **shape,
        **options,
    )
    owns_padding = owns_padding and not config.longest_direct
    _combine_kernel[(num_heads * (num_rows if owns_padding else metadata.num_seqs),)](
        partial,
        partial_stats,
        output,
        metadata.cu_seqlens_q,
        metadata.context_lens,
        kv_cache.v_scale,
        metadata.num_seqs,
        metadata.num_tokens,
        longest_direct,
        max_splits,
        owns_padding=owns_padding,
        num_heads=num_heads,
        head_dim=head_dim,
        min_split_len=MIN_SPLIT_LEN,
        max_num_splits=MAX_SPLITS,
        block_d=shape["block_d"],
        is_fp8=is_fp8,
        is_settled=metadata.is_settled,
        num_warps=1,
        **launch_options(query),
    )


def _list_length(num_seqs: int) -> int:
    """A length that holds a list of all sequences; few ones, since each is compiled on its own."""
    length = 16
    while length < num_seqs:
        length *= 8
    return length


@triton.jit  # type: ignore[untyped-decorator]
def _attend_to_run(
    query: tl.tensor,
    key_head_ptr: tl.tensor,
    value_head_ptr: tl.tensor,
    table_ptr: tl.tensor,
    block: tl.tensor,
    offset: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    row_scale: tl.tensor,
    key_block_stride: tl.tensor,
    value_block_stride: tl.tensor,
    key_offset_stride: tl.constexpr,
    value_offset_stride: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    split_len: tl.constexpr,
    is_fp8: tl.constexpr,
) -> tl.tuple:
    """Attends to the positions from `first` (a multiple of block_n) up to `end`.

    `block` and `offset` are where `locate_tile` found the first tile; `row_scale`, [m], is the
    factor of each row's scores, times log2(e). Splits of `split_len` tokens
    are attended to on their own and then merged; 0 means that the run is a single split.

    Returns:
        The largest scaled score [m], the sum of the weights taken against it [m], and the values'
        sum under these weights [m, d].
    """
    run_max = tl.full([block_m], float("-inf"), tl.float32)
    run_sum = tl.zeros([block_m], tl.float32)
    run_accumulators = _start_accumulators(block_m, block_d, is_fp8)
    row_max, row_sum, accumulators = run_max, run_sum, run_accumulators
    # The last tile is no special case: outside of the loop its loads would not be started early,
    # which costs more than the masks do.
    for start in range(first, end, block_n):
        num_inside = end - start
        key = load_tile(
            key_head_ptr,
            block,
            offset,
            num_inside,
            key_block_stride,
            key_offset_stride,
            head_dim,
            block_size,
            block_n,
            block_d,
            masked=True,
            as_pairs=False,
        )
        value = load_tile(
            value_head_ptr,
            block,
            offset,
            num_inside,
            value_block_stride,
            value_offset_stride,
            head_dim,
            block_size,
            block_n,
            block_d,
            masked=True,
            as_pairs=is_fp8,
        )
        scores = tl.dot(query, tl.trans(key).to(query.dtype), input_precision="ieee")
        inside_n = tl.arange(0, block_n) < num_inside
        scores = tl.where(inside_n[None, :], scores, float("-inf"))
        # Every tile has a token, so its maximum is finite.
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * row_scale)
        factor = tl.exp2(row_max - new_max)
        weights = tl.exp2(tl.fma(scores, row_scale[:, None], -new_max[:, None]))
        row_sum = tl.fma(row_sum, factor, tl.sum(weights, axis=1))
        accumulators = _accumulate(accumulators, factor, weights.to(query.dtype), value)
        row_max = new_max
        block, offset = locate_tile(table_ptr, start + block_n, end, block_size, block_n)
        if split_len > 0:
            # Selected, not branched on: a branch would keep loads from being started early.
            closes = ((start + block_n) % split_len == 0) | (start + block_n >= end)
            merged_max, merged_sum, merged_accumulators = _merge(
                run_max, run_sum, run_accumulators, row_max, row_sum, accumulators
            )
            run_max = tl.where(closes, merged_max, run_max)
            run_sum = tl.where(closes, merged_sum, run_sum)
            run_accumulators = _select(closes, merged_accumulators, run_accumulators)
            row_max = tl.where(closes, float("-inf"), row_max)
            row_sum = tl.where(closes, 0.0, row_sum)
            accumulators = _select(
                closes, _start_accumulators(block_m, block_d, is_fp8), accumulators
            )
    if split_len > 0:
        row_max, row_sum, accumulators = run_max, run_sum, run_accumulators
    accumulator = tl.interleave(accumulators[0], accumulators[1]) if is_fp8 else accumulators[0]
    return row_max, row_sum, accumulator


@triton.jit  # type: ignore[untyped-decorator]
def _start_accumulators(
    block_m: tl.constexpr, block_d: tl.constexpr, is_fp8: tl.constexpr
) -> tl.tuple:
    """Makes the sum of no values: one [m, d], or for fp8 one of even and one of odd dimensions."""
    if is_fp8:
        half = tl.zeros([block_m, block_d // 2], tl.float32)
        return half, half
    else:  # noqa: RET505 - Triton compiles both branches of a plain return
        return (tl.zeros([block_m, block_d], tl.float32),)


@triton.jit  # type: ignore[untyped-decorator]
def _accumulate(
    accumulators: tl.tuple, factor: tl.tensor, weights: tl.tensor, value: tl.tensor
) -> tl.tuple:
    """Multiplies the sums by `factor`, [m], and adds a tile of values (or of pairs) by weight."""
    if len(accumulators) == 2:
        even, odd = split_pairs(value, weights.dtype)
        return (
            tl.dot(weights, even, accumulators[0] * factor[:, None], input_precision="ieee"),
            tl.dot(weights, odd, accumulators[1] * factor[:, None], input_precision="ieee"),
        )
    else:  # noqa: RET505 - see above
        accumulator = accumulators[0] * factor[:, None]
        return (tl.dot(weights, value, accumulator, input_precision="ieee"),)


@triton.jit  # type: ignore[untyped-decorator]
def _select(condition: tl.tensor, chosen: tl.tuple, other: tl.tuple) -> tl.tuple:
    """Applies `tl.where` to each of several tensors."""
    if len(chosen) == 2:
        return tl.where(condition, chosen[0], other[0]), tl.where(condition, chosen[1], other[1])
    else:  # noqa: RET505 - see above
        return (tl.where(condition, chosen[0], other[0]),)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(
    old_max: tl.tensor,
    old_sum: tl.tensor,
    old_accumulators: tl.tuple,
    new_max: tl.tensor,
    new_sum: tl.tensor,
    new_accumulators: tl.tuple,
) -> tl.tuple:
    """Adds one split's softmax to that of splits before.

    Maximum and sum are [m] and the accumulators [m, ...], or scalars and [d].

    The fused multiply-adds are written out: were it left to the compiler, two kernels might round
    differently.
    """
    merged_max = tl.maximum(old_max, new_max)
    old_factor = tl.exp2(old_max - merged_max)
    new_factor = tl.exp2(new_max - merged_max)
    merged_sum = tl.fma(old_sum, old_factor, new_sum * new_factor)
    first = _mix(old_accumulators[0], old_factor, new_accumulators[0], new_factor)
    if len(old_accumulators) == 2:
        second = _mix(old_accumulators[1], old_factor, new_accumulators[1], new_factor)
        return merged_max, merged_sum, (first, second)
    else:  # noqa: RET505 - see above
        return merged_max, merged_sum, (first,)


@triton.jit  # type: ignore[untyped-decorator]
def _mix(old: tl.tensor, old_factor: tl.tensor, new: tl.tensor, new_factor: tl.tensor) -> tl.tensor:
    """Computes old * old_factor + new * new_factor, for rows of a matrix or for a vector."""
    if len(old.shape) == 2:
        old_factor = tl.broadcast_to(old_factor[:, None], old.shape)
        new_factor = tl.broadcast_to(new_factor[:, None], old.shape)
    return tl.fma(old, old_factor, new * new_factor)


@triton.jit  # type: ignore[untyped-decorator]
def _load_query(
    query_ptr: tl.tensor,
    token: tl.tensor,
    kv_head: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    scale_log2: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_m: tl.constexpr,
    block_d: tl.constexpr,
    is_fp8: tl.constexpr,
) -> tl.tuple:
    """Loads the query heads that share a key head, [m, d], and the factor of their scores, [m]."""
    m = tl.arange(0, block_m)
    d = tl.arange(0, block_d)
    heads_ptr = query_ptr + token.to(tl.int64) * token_stride
    pointers = heads_ptr + ((kv_head * group + m) * head_stride)[:, None] + d[None, :]
    query = tl.load(pointers, mask=(m < group)[:, None] & (d < head_dim)[None, :], other=0.0)
    return prepare_query(query, scale_log2, is_fp8)


@triton.jit  # type: ignore[untyped-decorator]
def _choose_split_len(
    context_len: tl.tensor, min_split_len: tl.constexpr, max_num_splits: tl.constexpr
) -> tl.tensor:
    """The least power of two times min_split_len of which max_num_splits cover the context."""
    reach = min_split_len * max_num_splits
    least = (context_len + (reach - 1)) // reach
    bits = tl.maximum(least, 1) - 1
    bits |= bits >> 1
    bits |= bits >> 2
    bits |= bits >> 4
    bits |= bits >> 8
    bits |= bits >> 16
    return (bits + 1) * min_split_len


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _direct_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    output_ptr: tl.tensor,
    cu_seqlens_q_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    scale_log2: tl.tensor,
    v_scale: tl.tensor,
    num_seqs: tl.tensor,
    num_tokens: tl.tensor,
    longest_direct: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_head_stride: tl.tensor,
    block_table_stride: tl.tensor,
    owns_padding: tl.constexpr,
    min_split_len: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    key_offset_stride: tl.constexpr,
    value_offset_stride: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    is_fp8: tl.constexpr,
    is_settled: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    wait_for_previous(overlaps and not is_settled, lets_next_start=False)
    kv_head = tl.program_id(0) % num_kv_heads
    index = tl.program_id(0).to(tl.int64) // num_kv_heads
    seq = tl.minimum(index, num_seqs - 1)
    # All at once, whatever the sequence turns out to be: each read takes as long as all of them.
    token = tl.load(cu_seqlens_q_ptr + seq)
    query_len = tl.load(cu_seqlens_q_ptr + seq + 1) - token
    context_len = tl.load(context_lens_ptr + seq)
    table_ptr = block_table_ptr + seq * block_table_stride
    block, offset = locate_tile(table_ptr, 0, context_len, block_size, block_n)
    if owns_padding:
        num_real_tokens = tl.load(cu_seqlens_q_ptr + num_seqs)
    wait_for_previous(overlaps and is_settled, lets_next_start=False)
    m = tl.arange(0, block_m)
    d = tl.arange(0, block_d)
    inside_md = (m < group)[:, None] & (d < head_dim)[None, :]
    head_offset = ((kv_head * group + m) * head_dim)[:, None] + d[None, :]
    token_stride = num_kv_heads * group * head_dim
    if owns_padding:
        # Program i also looks after token i, which is padding if no sequence has it.
        if (index >= num_real_tokens) & (index < num_tokens):
            zeros = tl.zeros([block_m, block_d], output_ptr.dtype.element_ty)
            tl.store(output_ptr + index * token_stride + head_offset, zeros, mask=inside_md)
        if index >= num_seqs:
            return
    if (query_len != 1) | (context_len > longest_direct):
        return
    query, row_scale = _load_query(
        query_ptr,
        token,
        kv_head,
        query_token_stride,
        query_head_stride,
        scale_log2,
        group,
        head_dim,
        block_m,
        block_d,
        is_fp8,
    )
    _, row_sum, accumulator = _attend_to_run(
        query,
        key_ptr + kv_head.to(tl.int64) * key_head_stride,
        value_ptr + kv_head.to(tl.int64) * value_head_stride,
        table_ptr,
        block,
        offset,
        0,
        context_len,
        row_scale,
        key_block_stride,
        value_block_stride,
        key_offset_stride,
        value_offset_stride,
        head_dim,
        block_size,
        block_m,
        block_n,
        block_d,
        min_split_len,
        is_fp8,
    )
    # Not before: sequences are spread evenly only over processors without other programs.
    let_next_start(overlaps)
    # A sequence without context has a sum of zero and becomes zeros.
    result = accumulator / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if is_fp8:
        result *= v_scale
    tl.store(
        output_ptr + token.to(tl.int64) * token_stride + head_offset,
        result.to(output_ptr.dtype.element_ty),
        mask=inside_md,
    )


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _split_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    partial_stats_ptr: tl.tensor,
    cu_seqlens_q_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    scale_log2: tl.tensor,
    num_seqs: tl.tensor,
    longest_direct: tl.tensor,
    max_splits: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_head_stride: tl.tensor,
    block_table_stride: tl.tensor,
    min_split_len: tl.constexpr,
    max_num_splits: tl.constexpr,
    block_seqs: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    key_offset_stride: tl.constexpr,
    value_offset_stride: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    is_fp8: tl.constexpr,
    is_settled: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    wait_for_previous(overlaps and not is_settled)
    # Every program lists all splits of the batch, and takes every num_programs-th of them.
    index = tl.arange(0, block_seqs)
    inside = index < num_seqs
    lens = tl.load(context_lens_ptr + index, mask=inside, other=0)
    tokens = tl.load(cu_seqlens_q_ptr + index, mask=inside, other=0)
    next_tokens = tl.load(cu_seqlens_q_ptr + index + 1, mask=inside, other=0)
    lens = tl.where((next_tokens - tokens == 1) & (lens > longest_direct), lens, 0)
    split_lens = _choose_split_len(lens, min_split_len, max_num_splits)
    num_splits = (lens + split_lens - 1) // split_lens
    ends = tl.cumsum(num_splits, axis=0)
    num_items = tl.sum(num_splits, axis=0) * num_kv_heads
    wait_for_previous(overlaps and is_settled)

    m = tl.arange(0, block_m)
    d = tl.arange(0, block_d)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = item % num_kv_heads
        rank = item // num_kv_heads
        seq = tl.sum((ends <= rank).to(tl.int32), axis=0)
        here = index == seq
        split = rank - tl.sum(tl.where(here, ends - num_splits, 0), axis=0)
        split_len = tl.sum(tl.where(here, split_lens, 0), axis=0)
        context_len = tl.sum(tl.where(here, lens, 0), axis=0)
        token = tl.sum(tl.where(here, tokens, 0), axis=0)

        query, row_scale = _load_query(
            query_ptr,
            token,
            kv_head,
            query_token_stride,
            query_head_stride,
            scale_log2,
            group,
            head_dim,
            block_m,
            block_d,
            is_fp8,
        )
        first = split * split_len
        end = tl.minimum(first + split_len, context_len)
        table_ptr = block_table_ptr + seq.to(tl.int64) * block_table_stride
        block, offset = locate_tile(table_ptr, first, end, block_size, block_n)
        row_max, row_sum, accumulator = _attend_to_run(
            query,
            key_ptr + kv_head.to(tl.int64) * key_head_stride,
            value_ptr + kv_head.to(tl.int64) * value_head_stride,
            table_ptr,
            block,
            offset,
            first,
            end,
            row_scale,
            key_block_stride,
            value_block_stride,
            key_offset_stride,
            value_offset_stride,
            head_dim,
            block_size,
            block_m,
            block_n,
            block_d,
            0,
            is_fp8,
        )
        head = (seq.to(tl.int64) * num_kv_heads + kv_head) * group + m
        place = head * max_splits + split
        tl.store(
            partial_ptr + (place * head_dim)[:, None] + d[None, :],
            accumulator,
            mask=(m < group)[:, None] & (d < head_dim)[None, :],
        )
        tl.store(partial_stats_ptr + 2 * place, row_max, mask=m < group)
        tl.store(partial_stats_ptr + 2 * place + 1, row_sum, mask=m < group)


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _combine_kernel(
    partial_ptr: tl.tensor,
    partial_stats_ptr: tl.tensor,
    output_ptr: tl.tensor,
    cu_seqlens_q_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    v_scale: tl.tensor,
    num_seqs: tl.tensor,
    num_tokens: tl.tensor,
    longest_direct: tl.tensor,
    max_splits: tl.tensor,
    owns_padding: tl.constexpr,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    min_split_len: tl.constexpr,
    max_num_splits: tl.constexpr,
    block_d: tl.constexpr,
    is_fp8: tl.constexpr,
    is_settled: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    wait_for_previous(overlaps and not is_settled)
    head = tl.program_id(0) % num_heads
    index = tl.program_id(0).to(tl.int64) // num_heads
    seq = tl.minimum(index, num_seqs - 1)
    token = tl.load(cu_seqlens_q_ptr + seq)
    query_len = tl.load(cu_seqlens_q_ptr + seq + 1) - token
    context_len = tl.load(context_lens_ptr + seq)
    if owns_padding:
        num_real_tokens = tl.load(cu_seqlens_q_ptr + num_seqs)
    split_len = _choose_split_len(context_len, min_split_len, max_num_splits)
    num_splits = (context_len + split_len - 1) // split_len
    wait_for_previous(overlaps and is_settled)
    d = tl.arange(0, block_d)
    inside_d = d < head_dim
    if owns_padding:
        if (index >= num_real_tokens) & (index < num_tokens):
            zeros = tl.zeros([block_d], output_ptr.dtype.element_ty)
            place = output_ptr + (index * num_heads + head) * head_dim
            tl.store(place + d, zeros, mask=inside_d)
        if index >= num_seqs:
            return
    if (query_len != 1) | (context_len <= longest_direct):
        return
    first = (seq * num_heads + head) * max_splits

    row_max = tl.full([], float("-inf"), tl.float32)
    row_sum = tl.zeros([], tl.float32)
    accumulators = (tl.zeros([block_d], tl.float32),)
    # Eight at a time, so that their loads are in flight together. Splits beyond the last change
    # nothing: their factor is exp2(-inf) = 0, and the other one exp2(0) = 1.
    for start in range(0, num_splits, 8):
        for i in tl.static_range(8):
            inside = start + i < num_splits
            place = first + start + i
            new_max = tl.load(partial_stats_ptr + 2 * place, mask=inside, other=float("-inf"))
            new_sum = tl.load(partial_stats_ptr + 2 * place + 1, mask=inside, other=0.0)
            inside_split_d = d < tl.where(inside, head_dim, 0)
            partial = tl.load(partial_ptr + place * head_dim + d, mask=inside_split_d, other=0.0)
            row_max, row_sum, accumulators = _merge(
                row_max, row_sum, accumulators, new_max, new_sum, (partial,)
            )
    result = accumulators[0] / tl.where(row_sum == 0.0, 1.0, row_sum)
    if is_fp8:
        result *= v_scale
    tl.store(
        output_ptr + (token.to(tl.int64) * num_heads + head) * head_dim + d,
        result.to(output_ptr.dtype.element_ty),
        mask=inside_d,
    )
