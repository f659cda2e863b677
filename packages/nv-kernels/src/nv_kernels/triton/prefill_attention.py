"""Attention of prompts and chunks of prompts over the paged cache.

Legend: m rows of a query tile, n keys of a key tile, d dimensions of a head. A program owns one
query tile of one sequence and one key head: block_q query tokens times the `group` query heads
that share the key head, laid out as block_m >= block_q * group rows. So keys are read once for
the whole group. It walks the key tiles that all its rows see without a mask, then those on the
diagonal with one, and never those beyond.

The batch is ragged, and the host knows only how many tokens and sequences there are. Tiles are
therefore numbered so that a program can find its sequence: sequence i starts at tile number
`cu_seqlens_q[i] // block_q + i`, which leaves room for all its tiles and wastes at most one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from nv_kernels.kv_quantisation import FP8
from nv_kernels.triton.fp8 import prepare_query
from nv_kernels.triton.kv_tiles import load_tile, locate_tile
from nv_kernels.triton.launch import launch_options, wait_for_previous

if TYPE_CHECKING:
    from torch import Tensor

    from nv_kernels.metadata import AttentionMetadata, FreshKV, LayerKVCache

SEQS_PER_LOAD = tl.constexpr(256)
"""How many sequences a program looks at together when it searches its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """How the kernel is compiled."""

    block_m: int
    """Rows per query tile; a power of two, at least the number of query heads per key head."""
    block_n: int
    """Tokens per key tile; a power of two."""
    num_warps: int
    num_stages: int
    """Key tiles in flight."""


def attend_to_prompts(
    query: Tensor,
    kv_cache: LayerKVCache,
    metadata: AttentionMetadata,
    output: Tensor,
    *,
    scale_log2: float,
    min_query_len: int,
    config: PrefillConfig,
    fresh: FreshKV | None = None,
) -> None:
    """Attends from every sequence whose query is long enough; the host never waits.

    Args:
        query: [num_tokens, num_heads, head_dim].
        kv_cache: One layer's cache.
        metadata: The batch; sequences with shorter queries are passed over.
        output: Shape of `query`, contiguous; the rows of those sequences are written, and those
            after the last sequence become zero.
        scale_log2: Factor of the scores, that of cached keys included, times log2(e); positive.
        min_query_len: Shortest query to attend from, in tokens.
        config: How to compile.
        fresh: Where to read instead of in the cache, if nothing else is cached.
    """
    num_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = kv_cache.key.shape[1:3]
    key, value = kv_cache.key, kv_cache.value
    if fresh is not None:
        # To the kernel, one endless block.
        key, value = fresh.key.unsqueeze(0), fresh.value.unsqueeze(0)
        block_size = config.block_n
    group = num_heads // num_kv_heads
    block_q = config.block_m // group
    num_tiles = metadata.num_tokens // block_q + metadata.num_seqs + 1
    _prefill_kernel[(num_tiles * num_kv_heads,)](
        query,
        key,
        value,
        output,
        metadata.cu_seqlens_q,
        metadata.context_lens,
        metadata.block_table,
        scale_log2,
        kv_cache.v_scale,
        metadata.num_seqs,
        metadata.num_tokens,
        *query.stride()[:2],
        key.stride(0),
        key.stride(2),
        value.stride(0),
        value.stride(2),
        metadata.block_table.stride(0),
        min_query_len=min_query_len,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        key_offset_stride=key.stride(1),
        value_offset_stride=value.stride(1),
        is_fresh=fresh is not None,
        block_q=block_q,
        block_m=config.block_m,
        block_n=config.block_n,
        block_d=max(16, triton.next_power_of_2(head_dim)),  # tl.dot takes no side under 16
        is_fp8=kv_cache.key.dtype == FP8,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(query),
    )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_seqs", "num_tokens", "block_table_stride"]
)
def _prefill_kernel(
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
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_head_stride: tl.tensor,
    block_table_stride: tl.tensor,
    min_query_len: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    key_offset_stride: tl.constexpr,
    value_offset_stride: tl.constexpr,
    is_fresh: tl.constexpr,
    block_q: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    is_fp8: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    wait_for_previous(overlaps)
    # Late tiles see the most keys, so they start first and the light ones fill the end.
    number = tl.num_programs(0) // num_kv_heads - 1 - tl.program_id(0) // num_kv_heads
    kv_head = tl.program_id(0) % num_kv_heads
    # A loop, not one load as wide as the batch: each width would be compiled on its own, in the
    # middle of serving.
    seq = tl.full([], -1, tl.int32)
    for first_index in range(0, num_seqs + 1, SEQS_PER_LOAD):
        index = first_index + tl.arange(0, SEQS_PER_LOAD)
        starts = tl.load(cu_seqlens_q_ptr + index, mask=index <= num_seqs, other=0)
        is_before = (index <= num_seqs) & (starts // block_q + index <= number)
        seq += tl.sum(is_before.to(tl.int32), axis=0)
    query_start = tl.load(cu_seqlens_q_ptr + seq)
    first_query = (number - query_start // block_q - seq) * block_q
    if seq < num_seqs:
        query_len = tl.load(cu_seqlens_q_ptr + seq + 1) - query_start
        query_len = tl.where(query_len >= min_query_len, query_len, 0)
        context_len = tl.load(context_lens_ptr + seq)
    else:  # padding: tokens of no sequence, which see nothing
        query_len = num_tokens - query_start
        context_len = 0
    if first_query >= query_len:
        return

    m = tl.arange(0, block_m)
    d = tl.arange(0, block_d)
    query_index = first_query + m // group
    inside_m = (m < block_q * group) & (query_index < query_len)
    inside_md = inside_m[:, None] & (d < head_dim)[None, :]
    # The mask is aligned to the bottom right: the last query sees the whole context.
    last_visible = context_len - query_len + query_index
    # int64: a large batch times the width of a fused projection passes 2^31 elements.
    token = (query_start + query_index).to(tl.int64)
    head = kv_head * group + m % group
    query = tl.load(
        query_ptr + (token * query_token_stride + head * query_head_stride)[:, None] + d[None, :],
        mask=inside_md,
        other=0.0,
    )
    query, row_scale = prepare_query(query, scale_log2, is_fp8)
    key_head_ptr = key_ptr + kv_head.to(tl.int64) * key_head_stride
    value_head_ptr = value_ptr + kv_head.to(tl.int64) * value_head_stride
    table_ptr = block_table_ptr + seq.to(tl.int64) * block_table_stride

    row_max = tl.full([block_m], float("-inf"), tl.float32)
    row_sum = tl.zeros([block_m], tl.float32)
    accumulator = tl.zeros([block_m, block_d], tl.float32)
    # Keys past the last one that this tile's last query sees are never read.
    end = context_len - query_len + tl.minimum(first_query + block_q, query_len)
    full_end = tl.maximum(context_len - query_len + first_query + 1, 0) // block_n * block_n
    block, offset = _locate_tile(table_ptr, query_start, 0, end, block_size, block_n, is_fresh)
    for start in range(0, full_end, block_n):
        row_max, row_sum, accumulator = _attend_to_tile(
            query,
            key_head_ptr,
            value_head_ptr,
            block,
            offset,
            start,
            end,
            last_visible,
            row_scale,
            row_max,
            row_sum,
            accumulator,
            key_block_stride,
            value_block_stride,
            key_offset_stride,
            value_offset_stride,
            head_dim,
            block_size,
            block_n,
            block_d,
            masked=False,
        )
        block, offset = _locate_tile(
            table_ptr, query_start, start + block_n, end, block_size, block_n, is_fresh
        )
    for start in range(full_end, end, block_n):
        row_max, row_sum, accumulator = _attend_to_tile(
            query,
            key_head_ptr,
            value_head_ptr,
            block,
            offset,
            start,
            end,
            last_visible,
            row_scale,
            row_max,
            row_sum,
            accumulator,
            key_block_stride,
            value_block_stride,
            key_offset_stride,
            value_offset_stride,
            head_dim,
            block_size,
            block_n,
            block_d,
            masked=True,
        )
        block, offset = _locate_tile(
            table_ptr, query_start, start + block_n, end, block_size, block_n, is_fresh
        )
    # Rows that saw no key have a sum of zero and become zeros.
    result = accumulator / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if is_fp8:
        result *= v_scale
    tl.store(
        output_ptr + ((token * num_kv_heads * group + head) * head_dim)[:, None] + d[None, :],
        result.to(output_ptr.dtype.element_ty),
        mask=inside_md,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _locate_tile(
    table_ptr: tl.tensor,
    query_start: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    block_size: tl.constexpr,
    block_n: tl.constexpr,
    is_fresh: tl.constexpr,
) -> tl.tuple:
    """Finds a tile in the cache, or among the step's own keys, where no table is needed."""
    if is_fresh:
        block = tl.zeros([], tl.int64)
        offset = (query_start + start).to(tl.int64)
    else:
        block, offset = locate_tile(table_ptr, start, end, block_size, block_n)
    return block, offset


@triton.jit  # type: ignore[untyped-decorator]
def _attend_to_tile(
    query: tl.tensor,
    key_head_ptr: tl.tensor,
    value_head_ptr: tl.tensor,
    block: tl.tensor,
    offset: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    last_visible: tl.tensor,
    row_scale: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    accumulator: tl.tensor,
    key_block_stride: tl.tensor,
    value_block_stride: tl.tensor,
    key_offset_stride: tl.constexpr,
    value_offset_stride: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    masked: tl.constexpr,
) -> tl.tuple:
    """One step of the online softmax: attends to block_n keys from `start`."""
    key = load_tile(
        key_head_ptr,
        block,
        offset,
        end - start,
        key_block_stride,
        key_offset_stride,
        head_dim,
        block_size,
        block_n,
        block_d,
        masked,
        as_pairs=False,
    )
    scores = tl.dot(query, tl.trans(key).to(query.dtype), input_precision="ieee")
    if masked:
        position = start + tl.arange(0, block_n)
        visible = position[None, :] <= last_visible[:, None]
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * row_scale)
    shift = new_max
    if masked:
        # A row that has seen no key yet has no maximum; -inf minus -inf would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - shift)
    weights = tl.exp2(tl.fma(scores, row_scale[:, None], -shift[:, None]))
    row_sum = row_sum * rescale + tl.sum(weights, axis=1)
    value = load_tile(
        value_head_ptr,
        block,
        offset,
        end - start,
        value_block_stride,
        value_offset_stride,
        head_dim,
        block_size,
        block_n,
        block_d,
        masked,
        as_pairs=False,
    )
    accumulator = tl.dot(
        weights.to(query.dtype),
        value.to(query.dtype),
        accumulator * rescale[:, None],
        input_precision="ieee",
    )
    return new_max, row_sum, accumulator
