"""Paged attention over a mixed batch as one Triton kernel, with an online softmax.

Legend: m rows of a query tile, n keys of a key tile, d dimensions of a head. A program owns one
query tile of one sequence and one key head: block_q query tokens times the `group` query heads
that share the key head, laid out as block_m >= block_q * group rows. So keys are read once for
the whole group, and a decode step (one token) fills a tile that tensor cores accept. Prompts,
chunks and decode steps differ only in numbers.

Simple before fast: long contexts are not split over programs, and every key tile is masked.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from nv_kernels.triton.device import device_of

if TYPE_CHECKING:
    from torch import Tensor

    from nv_kernels.metadata import AttentionMetadata, LayerKVCache


def paged_attention(
    query: Tensor, kv_cache: LayerKVCache, metadata: AttentionMetadata, *, scale: float
) -> Tensor:
    """Implements `nv_kernels.ops.attention.paged_attention`; the host never waits."""
    output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = kv_cache.key.shape[2]
    group = num_heads // num_kv_heads
    tile = _choose_tile(group, head_dim, query.element_size(), metadata.max_query_len)
    num_tiles = triton.cdiv(metadata.max_query_len, tile.block_q)
    if num_tiles == 0 or metadata.num_seqs == 0:
        return output
    with device_of(query):
        _paged_attention_kernel[(num_tiles, num_kv_heads, metadata.num_seqs)](
            query,
            *kv_cache,
            output,
            metadata.cu_seqlens_q,
            metadata.context_lens,
            metadata.block_table,
            scale * math.log2(math.e),
            *query.stride()[:2],
            *kv_cache.key.stride()[:3],
            *kv_cache.value.stride()[:3],
            *output.stride()[:2],
            metadata.block_table.stride(0),
            group=group,
            head_dim=head_dim,
            block_size=kv_cache.key.shape[1],
            block_q=tile.block_q,
            block_m=tile.block_m,
            block_n=tile.block_n,
            block_d=tile.block_d,
            num_warps=tile.num_warps,
            num_stages=2,
        )
    return output


class _Tile(NamedTuple):
    block_q: int
    block_m: int
    block_n: int
    block_d: int
    num_warps: int


def _choose_tile(group: int, head_dim: int, element_size: int, max_query_len: int) -> _Tile:
    """Sizes a program's tiles: they must fit 99 KB of shared memory, a consumer GPU's limit."""
    block_d = max(16, triton.next_power_of_2(head_dim))  # tl.dot takes no side under 16
    bytes_per_key = block_d * element_size
    block_n = max(16, min(64, 16384 // bytes_per_key))
    rows = group if max_query_len == 1 else max(group, 64 if bytes_per_key <= 256 else 32)
    block_m = max(16, triton.next_power_of_2(rows))
    return _Tile(
        block_q=block_m // group if max_query_len > 1 else 1,
        block_m=block_m,
        block_n=block_n,
        block_d=block_d,
        num_warps=8 if block_m * block_d > 8192 else 4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _paged_attention_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    output_ptr: tl.tensor,
    cu_seqlens_q_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    scale_log2: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    key_offset_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_offset_stride: tl.tensor,
    value_head_stride: tl.tensor,
    output_token_stride: tl.tensor,
    output_head_stride: tl.tensor,
    block_table_stride: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    block_q: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    seq = tl.program_id(2).to(tl.int64)
    query_start = tl.load(cu_seqlens_q_ptr + seq)
    query_len = tl.load(cu_seqlens_q_ptr + seq + 1) - query_start
    first_query = tl.program_id(0) * block_q
    if first_query >= query_len:
        return
    context_len = tl.load(context_lens_ptr + seq)
    kv_head = tl.program_id(1).to(tl.int64)

    row = tl.arange(0, block_m)
    query_index = first_query + row // group
    inside_m = (row < block_q * group) & (query_index < query_len)
    # The mask is aligned to the bottom right: the last query sees the whole context.
    last_visible = context_len - query_len + query_index
    dim = tl.arange(0, block_d)
    inside_d = dim < head_dim
    inside_md = inside_m[:, None] & inside_d[None, :]
    # int64: a large batch times the width of a fused projection passes 2^31 elements.
    token = (query_start + query_index).to(tl.int64)
    head = kv_head * group + row % group
    query = tl.load(
        query_ptr + (token * query_token_stride + head * query_head_stride)[:, None] + dim[None, :],
        mask=inside_md,
        other=0.0,
    )

    row_max = tl.full([block_m], float("-inf"), tl.float32)
    row_sum = tl.zeros([block_m], tl.float32)
    accumulator = tl.zeros([block_m, block_d], tl.float32)
    # Keys past the last one that this tile's last query sees are never read.
    end = context_len - query_len + tl.minimum(first_query + block_q, query_len)
    for start in range(0, end, block_n):
        position = start + tl.arange(0, block_n)
        inside_n = position < end
        block = tl.load(
            block_table_ptr + seq * block_table_stride + position // block_size,
            mask=inside_n,
            other=0,
        ).to(tl.int64)
        offset = position % block_size
        # Both loads are masked to the context, not only the scores: slots beyond it may hold NaN,
        # and a probability of zero times NaN is NaN.
        key = tl.load(
            key_ptr
            + (block * key_block_stride + offset * key_offset_stride + kv_head * key_head_stride)[
                None, :
            ]
            + dim[:, None],
            mask=inside_d[:, None] & inside_n[None, :],
            other=0.0,
        )
        scores = tl.dot(query, key, input_precision="ieee") * scale_log2
        visible = (position[None, :] <= last_visible[:, None]) & inside_n[None, :]
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A row that has seen no key yet has no maximum; -inf minus -inf would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - shift)
        weights = tl.exp2(scores - shift[:, None])
        row_max = new_max
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        value = tl.load(
            value_ptr
            + (
                block * value_block_stride
                + offset * value_offset_stride
                + kv_head * value_head_stride
            )[:, None]
            + dim[None, :],
            mask=inside_n[:, None] & inside_d[None, :],
            other=0.0,
        )
        accumulator = tl.dot(
            weights.to(value.dtype), value, accumulator * rescale[:, None], input_precision="ieee"
        )

    # Rows that saw no key have a sum of zero and become zeros.
    output = accumulator / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    tl.store(
        output_ptr
        + (token * output_token_stride + head * output_head_stride)[:, None]
        + dim[None, :],
        output.to(output_ptr.dtype.element_ty),
        mask=inside_md,
    )
