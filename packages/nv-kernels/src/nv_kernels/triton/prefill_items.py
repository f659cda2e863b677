"""The query tiles of a ragged batch as a list on the device, for kernels that walk a list.

A batch is known to the host by its sizes only. One small kernel writes down which tiles there are;
it runs once per step, for all layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from nv_kernels.triton.launch import launch_options, wait_for_previous

if TYPE_CHECKING:
    from torch import Tensor

    from nv_kernels.metadata import AttentionMetadata

ITEM_SIZE = tl.constexpr(5)
"""Numbers per item: where the sequence's queries start, how many they are, the length of its
context, the tile's first query, and the sequence."""
_SEQS_PER_LOAD = tl.constexpr(256)
_TILES_PER_STORE = tl.constexpr(64)


def list_prefill_items(metadata: AttentionMetadata, *, block_q: int, min_query_len: int) -> Tensor:
    """Lists the query tiles of a batch, once for all layers of a step; the host never waits.

    Args:
        metadata: The batch; keeps the list for the next layer.
        block_q: Query tokens per tile.
        min_query_len: Sequences with shorter queries have no tile.

    Returns:
        [1 + most tiles, 5] int32. Row 0 begins with the number of tiles, whose rows follow: the
        last sequence first, and within a sequence the last tile first, which sees the most keys.
        Tokens after the last sequence are one with an empty context, number num_seqs.
    """
    # A graph must make its own list when it is replayed, not keep one from before its capture.
    is_captured = metadata.context_lens.is_cuda and torch.cuda.is_current_stream_capturing()
    key = f"prefill items {block_q} {min_query_len} {is_captured}"
    if key not in metadata.derived:
        most_tiles = metadata.num_tokens // block_q + metadata.num_seqs + 1
        items = torch.empty(
            (1 + most_tiles, ITEM_SIZE.value),
            dtype=torch.int32,
            device=metadata.context_lens.device,
        )
        _list_items_kernel[(metadata.num_seqs + 1,)](
            metadata.cu_seqlens_q,
            metadata.context_lens,
            items,
            metadata.num_seqs,
            metadata.num_tokens,
            block_q=block_q,
            min_query_len=min_query_len,
            num_warps=4,
            **launch_options(items),
        )
        metadata.derived[key] = items
    return cast("Tensor", metadata.derived[key])


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])  # type: ignore[untyped-decorator]
def _list_items_kernel(
    cu_seqlens_q_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    items_ptr: tl.tensor,
    num_seqs: tl.tensor,
    num_tokens: tl.tensor,
    block_q: tl.constexpr,
    min_query_len: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """One program per sequence, and one for the tokens after the last."""
    wait_for_previous(overlaps)
    seq = tl.program_id(0)
    num_before = tl.zeros([], tl.int32)  # tiles of later sequences, which stand before ours
    for first_index in range(seq + 1, num_seqs + 1, _SEQS_PER_LOAD):
        index = first_index + tl.arange(0, _SEQS_PER_LOAD)
        num_before += tl.sum(
            _count_tiles(cu_seqlens_q_ptr, index, num_seqs, num_tokens, block_q, min_query_len),
            axis=0,
        )
    num_tiles = _count_tiles(cu_seqlens_q_ptr, seq, num_seqs, num_tokens, block_q, min_query_len)
    if seq == 0:
        tl.store(items_ptr, num_before + num_tiles)
    query_start = tl.load(cu_seqlens_q_ptr + seq)
    query_end = tl.load(cu_seqlens_q_ptr + seq + 1, mask=seq < num_seqs, other=num_tokens)
    context_len = tl.load(context_lens_ptr + seq, mask=seq < num_seqs, other=0)
    for first_tile in range(0, num_tiles, _TILES_PER_STORE):
        tile = first_tile + tl.arange(0, _TILES_PER_STORE)
        inside = tile < num_tiles
        item_ptr = items_ptr + (num_before + num_tiles - tile) * ITEM_SIZE
        zero = tl.zeros_like(tile)
        tl.store(item_ptr, query_start + zero, mask=inside)
        tl.store(item_ptr + 1, query_end - query_start + zero, mask=inside)
        tl.store(item_ptr + 2, context_len + zero, mask=inside)
        tl.store(item_ptr + 3, tile * block_q, mask=inside)
        tl.store(item_ptr + 4, seq + zero, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _count_tiles(
    cu_seqlens_q_ptr: tl.tensor,
    seq: tl.tensor,
    num_seqs: tl.tensor,
    num_tokens: tl.tensor,
    block_q: tl.constexpr,
    min_query_len: tl.constexpr,
) -> tl.tensor:
    """Counts the tiles of sequences; those with num_seqs are the tokens after the last one."""
    start = tl.load(cu_seqlens_q_ptr + seq, mask=seq <= num_seqs, other=num_tokens)
    end = tl.load(cu_seqlens_q_ptr + seq + 1, mask=seq < num_seqs, other=num_tokens)
    query_len = end - start
    query_len = tl.where((query_len >= min_query_len) | (seq == num_seqs), query_len, 0)
    return (query_len + block_q - 1) // block_q
