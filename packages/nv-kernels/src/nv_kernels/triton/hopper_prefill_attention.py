"""Attention of prompts on Hopper: one warp loads, two groups of four warps compute.

Triton gives all warps of a program the same work, so they wait together: for keys, for a product,
for a softmax. This kernel is written in Gluon, the layer of Triton in which each warp may have a
part of its own. A program has three:

    loader      1 warp     has the copy engine (TMA) bring queries, keys and values
    consumer 0  4 warps    the first 64 rows of the query tile
    consumer 1  4 warps    the other 64

They meet at barriers in shared memory, of which each buffer has two: `full`, at which the loader's
copy arrives, and `empty`, at which its readers do. A consumer starts the product of its queries
with the next keys and that of its weights with the last values together, and takes the softmax of
the first while the second runs; meanwhile the other consumer keeps the tensor cores busy, too.

A program takes one query tile of the batch's list (`prefill_items.py`) for one key head.

Legend: m rows of a consumer's share of a query tile, n keys of a key tile, d dimensions of a head.
A row is a query token and one of the `group` query heads that share the key head. A `ring` is a
tuple (tiles, full, empty) of a few places; tile i of keys or values lies in place i % places.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-untyped]
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-untyped]

from nv_kernels.triton.prefill_items import ITEM_SIZE, list_prefill_items

if TYPE_CHECKING:
    from torch import Tensor

    from nv_kernels.metadata import AttentionMetadata, LayerKVCache

_NUM_CONSUMERS = gl.constexpr(2)
_ROWS = gl.constexpr(64)
"""Rows of one consumer: as many as one instruction of four warps takes."""
_BLOCK_N = gl.constexpr(128)
"""Keys of a tile."""
_HEAD_DIM = gl.constexpr(128)
_STAGES = gl.constexpr(2)
"""Tiles of keys, and as many of values, in shared memory."""
_CONSUMER_REGISTERS = gl.constexpr(240)
_LOADER_REGISTERS = gl.constexpr(24)
_ALIGNMENT_BYTES = 16  # of what the copy engine reads
_MIN_BLOCK_SIZE = 16  # smaller copies are not worth the engine's while
# Triton 3.8 renamed it.
_copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def can_attend_to_prompts(query: Tensor, kv_cache: LayerKVCache) -> bool:
    """Tells whether this kernel takes such tensors, given a Hopper GPU.

    Args:
        query: [num_tokens, num_heads, head_dim].
        kv_cache: One layer's cache.

    Returns:
        A function of dtypes, sizes, strides and alignment: an engine's steps all get the same
        answer, and with it the same bits for the same prompt, however it is cut into chunks.
    """
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = kv_cache.key.shape
    group = num_heads // num_kv_heads
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and head_dim == _HEAD_DIM.value
        and _ROWS.value % group == 0
        and block_size >= _MIN_BLOCK_SIZE
        and (block_size % _BLOCK_N.value == 0 or _BLOCK_N.value % block_size == 0)
        and _can_be_copied(query)
        and kv_cache.key.dtype == kv_cache.value.dtype == query.dtype
        and _is_rows(kv_cache.key)
        and _is_rows(kv_cache.value)
    )


def attend_to_prompts(
    query: Tensor,
    kv_cache: LayerKVCache,
    metadata: AttentionMetadata,
    output: Tensor,
    *,
    scale_log2: float,
    min_query_len: int,
) -> None:
    """Attends from every sequence whose query is long enough; the host never waits.

    Args:
        query: [num_tokens, num_heads, head_dim]; see `can_attend_to_prompts`.
        kv_cache: One layer's cache.
        metadata: The batch; sequences with shorter queries are passed over.
        output: Shape of `query`, contiguous; the rows of those sequences are written, and those
            after the last sequence become zero.
        scale_log2: Factor of the scores, times log2(e); positive.
        min_query_len: Shortest query to attend from, in tokens.
    """
    num_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = kv_cache.key.shape[1:3]
    group = num_heads // num_kv_heads
    block_q = _NUM_CONSUMERS.value * _ROWS.value // group
    items = list_prefill_items(metadata, block_q=block_q, min_query_len=min_query_len)
    _hopper_prefill_kernel[((len(items) - 1) * num_kv_heads,)](
        _describe_query(query, group),
        _describe_rows(kv_cache.key),
        _describe_rows(kv_cache.value),
        output,
        items,
        metadata.block_table,
        scale_log2,
        metadata.block_table.stride(0),
        kv_cache.key.stride(0) // head_dim,
        kv_cache.key.stride(2) // head_dim,
        kv_cache.value.stride(0) // head_dim,
        kv_cache.value.stride(2) // head_dim,
        num_kv_heads=num_kv_heads,
        group=group,
        block_size=block_size,
        num_warps=4,
    )


def _is_rows(cache: Tensor) -> bool:
    """Whether tokens of one head and block lie in adjacent rows, as in the runtime's pool."""
    head_dim = cache.shape[3]
    return (
        cache.stride(1) == head_dim
        and cache.stride(0) % head_dim == 0
        and cache.stride(2) % head_dim == 0
        and _can_be_copied(cache)
    )


def _can_be_copied(tensor: Tensor) -> bool:
    """Whether the copy engine can address a tensor: everything starts at multiples of 16 bytes."""
    itemsize = tensor.element_size()
    steps = [stride * itemsize for stride in tensor.stride()[:-1]]
    return all(number % _ALIGNMENT_BYTES == 0 for number in (tensor.data_ptr(), *steps))


def _describe_query(query: Tensor, group: int) -> TensorDescriptor:
    """Describes queries to the copy engine: a share of a tile is [tokens, heads of a group, d]."""
    block_shape = [_ROWS.value // group, group, query.shape[2]]
    return TensorDescriptor(
        query, list(query.shape), list(query.stride()), block_shape, _tile_layout(3)
    )


def _describe_rows(cache: Tensor) -> TensorDescriptor:
    """Describes keys or values to the copy engine as the rows of one matrix, [num_rows, d]."""
    block_size, head_dim = cache.shape[1], cache.shape[3]
    last = sum(
        (size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True)
    )
    num_rows = (last + 1) // head_dim
    block_shape = [min(_BLOCK_N.value, block_size), head_dim]
    return TensorDescriptor(
        cache, [num_rows, head_dim], [head_dim, 1], block_shape, _tile_layout(2)
    )


@cache
def _tile_layout(rank: int) -> gl.NVMMASharedLayout:
    """How tiles lie in shared memory: as both the copy engine and the tensor cores want it."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


@gluon.jit(do_not_specialize=["block_table_stride"])  # type: ignore[untyped-decorator]
def _hopper_prefill_kernel(
    query_desc: tma.tensor_descriptor,
    key_desc: tma.tensor_descriptor,
    value_desc: tma.tensor_descriptor,
    output_ptr: gl.tensor,
    items_ptr: gl.tensor,
    block_table_ptr: gl.tensor,
    scale_log2: gl.tensor,
    block_table_stride: gl.tensor,
    key_block_rows: gl.tensor,
    key_head_rows: gl.tensor,
    value_block_rows: gl.tensor,
    value_head_rows: gl.tensor,
    num_kv_heads: gl.constexpr,
    group: gl.constexpr,
    block_size: gl.constexpr,
    num_warps: gl.constexpr,
) -> None:
    if gl.program_id(0) >= gl.load(items_ptr) * num_kv_heads:
        return
    dtype: gl.constexpr = output_ptr.dtype.element_ty
    query_shape: gl.constexpr = [_NUM_CONSUMERS, _ROWS // group, group, _HEAD_DIM]
    key_shape: gl.constexpr = [_STAGES, _BLOCK_N, _HEAD_DIM]
    query_layout: gl.constexpr = query_desc.layout
    key_layout: gl.constexpr = key_desc.layout
    queries = _make_ring(dtype, query_shape, query_layout, 1)
    keys = _make_ring(dtype, key_shape, key_layout, _STAGES)
    values = _make_ring(dtype, key_shape, key_layout, _STAGES)
    fence_async_shared()
    rings = (queries, keys, values)
    gl.warp_specialize(
        [
            (_consume, (0, rings, output_ptr, items_ptr, scale_log2, num_kv_heads, group)),
            (_consume, (1, rings, output_ptr, items_ptr, scale_log2, num_kv_heads, group)),
            (
                _load,
                (
                    rings,
                    (query_desc, key_desc, value_desc),
                    (key_block_rows, key_head_rows, value_block_rows, value_head_rows),
                    items_ptr,
                    block_table_ptr,
                    block_table_stride,
                    num_kv_heads,
                    group,
                    block_size,
                ),
            ),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _LOADER_REGISTERS],
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _make_ring(
    dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr, stages: gl.constexpr
) -> gl.tuple:
    """Allocates buffers, and for each of the `stages` a pair of barriers."""
    tiles = gl.allocate_shared_memory(dtype, shape, layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=_NUM_CONSUMERS)
    return tiles, full, empty


@gluon.jit  # type: ignore[untyped-decorator]
def _tile(ring: gl.tuple, i: gl.tensor) -> gl.shared_memory_descriptor:
    """The place of tile i."""
    return ring[0].index(i % ring[1].shape[0])


@gluon.jit  # type: ignore[untyped-decorator]
def _wait_for(ring: gl.tuple, i: gl.tensor, pred: gl.tensor) -> None:
    """Waits until tile i has been copied, if `pred`."""
    stages: gl.constexpr = ring[1].shape[0]
    mbarrier.wait(ring[1].index(i % stages), (i // stages) & 1, pred=pred)


@gluon.jit  # type: ignore[untyped-decorator]
def _give_back(ring: gl.tuple, i: gl.tensor) -> None:
    """Tells the loader that this consumer has read tile i."""
    mbarrier.arrive(ring[2].index(i % ring[1].shape[0]), count=1)


@gluon.jit  # type: ignore[untyped-decorator]
def _expect(ring: gl.tuple, i: gl.tensor, num_rows: gl.constexpr) -> None:
    """Waits until the place of tile i is free, and announces what will be copied there."""
    stages: gl.constexpr = ring[1].shape[0]
    # The first time round no one has to give a place back: its barrier counts as passed.
    mbarrier.wait(ring[2].index(i % stages), ((i // stages) & 1) ^ 1)
    mbarrier.expect(ring[1].index(i % stages), num_rows * _HEAD_DIM * 2)


@gluon.jit  # type: ignore[untyped-decorator]
def _read_item(items_ptr: gl.tensor, num_kv_heads: gl.constexpr, group: gl.constexpr) -> gl.tuple:
    """Reads which item of the list this program has.

    Returns:
        The sequence's first query token, its number of queries, its context length, the tile's
        first query, the sequence, the key head, how many keys the tile sees, and in how many tiles.
    """
    number = gl.program_id(0)
    item_ptr = items_ptr + (1 + number // num_kv_heads) * ITEM_SIZE
    query_start = gl.load(item_ptr)
    query_len = gl.load(item_ptr + 1)
    context_len = gl.load(item_ptr + 2)
    first_query = gl.load(item_ptr + 3)
    seq = gl.load(item_ptr + 4)
    # The mask is aligned to the bottom right: the last query sees the whole context.
    last_query = gl.minimum(first_query + _NUM_CONSUMERS * _ROWS // group, query_len)
    end = gl.maximum(context_len - query_len + last_query, 0)
    num_tiles = (end + _BLOCK_N - 1) // _BLOCK_N
    kv_head = number % num_kv_heads
    return query_start, query_len, context_len, first_query, seq, kv_head, end, num_tiles


@gluon.jit  # type: ignore[untyped-decorator]
def _load(
    rings: gl.tuple,
    descriptors: gl.tuple,
    steps: gl.tuple,
    items_ptr: gl.tensor,
    block_table_ptr: gl.tensor,
    block_table_stride: gl.tensor,
    num_kv_heads: gl.constexpr,
    group: gl.constexpr,
    block_size: gl.constexpr,
) -> None:
    """The loader's part."""
    queries, keys, values = rings
    query_desc, key_desc, value_desc = descriptors
    key_block_rows, key_head_rows, value_block_rows, value_head_rows = steps
    share: gl.constexpr = _ROWS // group
    query_start, _, _, first_query, seq, kv_head, end, num_tiles = _read_item(
        items_ptr, num_kv_heads, group
    )
    if num_tiles > 0:
        _expect(queries, 0, _NUM_CONSUMERS * _ROWS)
        for which in gl.static_range(_NUM_CONSUMERS):
            # Rows behind the sequence's last query are another's; nobody looks at them.
            token = query_start + first_query + which * share
            _copy_tile(
                query_desc,
                [token, kv_head * group, 0],
                queries[1].index(0),
                queries[0].index(which),
            )
        table_ptr = block_table_ptr + seq.to(gl.int64) * block_table_stride
        key_row, value_row = kv_head * key_head_rows, kv_head * value_head_rows
        for i in range(num_tiles):
            _copy_blocks(keys, i, key_desc, table_ptr, end, key_block_rows, key_row, block_size)
            _copy_blocks(
                values, i, value_desc, table_ptr, end, value_block_rows, value_row, block_size
            )


@gluon.jit  # type: ignore[untyped-decorator]
def _copy_blocks(
    ring: gl.tuple,
    i: gl.tensor,
    desc: tma.tensor_descriptor,
    table_ptr: gl.tensor,
    end: gl.tensor,
    block_rows: gl.tensor,
    first_row: gl.tensor,
    block_size: gl.constexpr,
) -> None:
    """Starts the copy of tile i of the keys or values to its place."""
    size: gl.constexpr = min(block_size, _BLOCK_N)
    _expect(ring, i, _BLOCK_N)
    for piece in gl.static_range(_BLOCK_N // size):
        position = i * _BLOCK_N + piece * size
        # Blocks behind the last key are not in the table; any block will do for them.
        block = gl.load(table_ptr + gl.minimum(position, end - 1) // block_size)
        row = block * block_rows + first_row + position % block_size
        full = ring[1].index(i % ring[1].shape[0])
        _copy_tile(desc, [row, 0], full, _tile(ring, i).slice(piece * size, size, 0))


@gluon.jit  # type: ignore[untyped-decorator]
def _consume(
    which: gl.constexpr,
    rings: gl.tuple,
    output_ptr: gl.tensor,
    items_ptr: gl.tensor,
    scale_log2: gl.tensor,
    num_kv_heads: gl.constexpr,
    group: gl.constexpr,
) -> None:
    """One consumer's part."""
    products: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HEAD_DIM, 16])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])  # 16 bytes a thread
    query_start, query_len, context_len, first_query, _, kv_head, end, num_tiles = _read_item(
        items_ptr, num_kv_heads, group
    )
    first_row = first_query + which * (_ROWS // group)
    result = gl.zeros([_ROWS, _HEAD_DIM], gl.float32, products)
    if num_tiles > 0:
        first_visible = context_len - query_len + first_row
        result = _attend(which, rings, num_tiles, end, first_visible, scale_log2, result, group)
    m = gl.arange(0, _ROWS, gl.SliceLayout(1, rows))
    d = gl.arange(0, _HEAD_DIM, gl.SliceLayout(0, rows))
    query_index = first_row + m // group
    # int64: a large batch times the width of its heads passes 2^31 elements.
    token = (query_start + query_index).to(gl.int64)
    head = kv_head * group + m % group
    first_element = (token * num_kv_heads * group + head) * _HEAD_DIM
    gl.store(
        output_ptr + first_element[:, None] + d[None, :],
        gl.convert_layout(result.to(output_ptr.dtype.element_ty), rows),
        mask=(query_index < query_len)[:, None],
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _attend(
    which: gl.constexpr,
    rings: gl.tuple,
    num_tiles: gl.tensor,
    end: gl.tensor,
    first_visible: gl.tensor,
    scale_log2: gl.tensor,
    accumulator: gl.tensor,
    group: gl.constexpr,
) -> gl.tensor:
    """Attends from this consumer's rows to the keys before `end`.

    `first_visible` is the last key that the first row sees. Returns [m, d], normalised.
    """
    queries, keys, values = rings
    query = queries[0].index(which).reshape([_ROWS, _HEAD_DIM])
    products: gl.constexpr = accumulator.type.layout
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_N, 16])
    m = gl.arange(0, _ROWS, gl.SliceLayout(1, narrow))
    last_visible = first_visible + m // group
    zeros = gl.zeros([_ROWS, _BLOCK_N], gl.float32, narrow)
    row_max = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, narrow))
    row_sum = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, narrow))

    _wait_for(queries, 0, pred=True)
    _wait_for(keys, 0, pred=True)
    first_keys = _tile(keys, 0).permute((1, 0))
    scores = warpgroup_mma(query, first_keys, zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    _give_back(keys, 0)
    row_max, row_sum, _, wide_weights = _take_softmax(
        scores, row_max, row_sum, scale_log2, last_visible, 0, masked=True
    )
    weights = gl.convert_layout(wide_weights.to(query.dtype), gl.DotOperandLayout(0, products, 2))
    _wait_for(keys, 1, pred=num_tiles > 1)
    # Tiles that all rows see whole, then those on the diagonal.
    num_full = gl.maximum((first_visible + 1) // _BLOCK_N, 1)
    for i in range(1, num_full):
        accumulator, weights, row_max, row_sum = _attend_to_tile(
            query,
            keys,
            values,
            i,
            i + 1 < num_tiles,
            last_visible,
            scale_log2,
            zeros,
            row_max,
            row_sum,
            weights,
            accumulator,
            masked=False,
        )
    for i in range(num_full, num_tiles):
        accumulator, weights, row_max, row_sum = _attend_to_tile(
            query,
            keys,
            values,
            i,
            i + 1 < num_tiles,
            last_visible,
            scale_log2,
            zeros,
            row_max,
            row_sum,
            weights,
            accumulator,
            masked=True,
        )
    last = num_tiles - 1
    _wait_for(values, last, pred=True)
    _clear_rows(_tile(values, last), end - last * _BLOCK_N)
    accumulator = warpgroup_mma(weights, _tile(values, last), accumulator, is_async=True)
    accumulator = warpgroup_mma_wait(0, deps=[accumulator])
    _give_back(values, last)
    # Rows that saw no key have a sum of zero and become zeros.
    row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, products))
    return accumulator / gl.where(row_sum == 0.0, 1.0, row_sum)[:, None]


@gluon.jit  # type: ignore[untyped-decorator]
def _attend_to_tile(
    query: gl.shared_memory_descriptor,
    keys: gl.tuple,
    values: gl.tuple,
    i: gl.tensor,
    has_next: gl.tensor,
    last_visible: gl.tensor,
    scale_log2: gl.tensor,
    zeros: gl.tensor,
    row_max: gl.tensor,
    row_sum: gl.tensor,
    weights: gl.tensor,
    accumulator: gl.tensor,
    masked: gl.constexpr,
) -> gl.tuple:
    """Scores tile i, whose keys are there, and adds the values of tile i - 1 meanwhile."""
    tile_keys = _tile(keys, i).permute((1, 0))
    scores = warpgroup_mma(query, tile_keys, zeros, use_acc=False, is_async=True)
    _wait_for(values, i - 1, pred=True)
    accumulator = warpgroup_mma(weights, _tile(values, i - 1), accumulator, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    _give_back(keys, i)
    row_max, row_sum, rescale, wide_weights = _take_softmax(
        scores, row_max, row_sum, scale_log2, last_visible, i * _BLOCK_N, masked
    )
    # Here, though the next keys are not needed yet: a wait is a loop, which keeps the assembler
    # from moving the wait for the product up before the softmax.
    _wait_for(keys, i + 1, pred=has_next)
    accumulator = warpgroup_mma_wait(0, deps=[accumulator])
    _give_back(values, i - 1)
    products: gl.constexpr = accumulator.type.layout
    accumulator = accumulator * gl.convert_layout(rescale, gl.SliceLayout(1, products))[:, None]
    # Rounded now, because the product has read its weights from the same registers.
    weights = gl.convert_layout(wide_weights.to(query.dtype), gl.DotOperandLayout(0, products, 2))
    return accumulator, weights, row_max, row_sum


@gluon.jit  # type: ignore[untyped-decorator]
def _take_softmax(
    scores: gl.tensor,
    row_max: gl.tensor,
    row_sum: gl.tensor,
    scale_log2: gl.tensor,
    last_visible: gl.tensor,
    start: gl.tensor,
    masked: gl.constexpr,
) -> gl.tuple:
    """One step of the online softmax, as in `prefill_attention.py`."""
    if masked:
        narrow: gl.constexpr = scores.type.layout
        position = start + gl.arange(0, _BLOCK_N, gl.SliceLayout(0, narrow))
        scores = gl.where(position[None, :] <= last_visible[:, None], scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, axis=1) * scale_log2)
    shift = new_max
    if masked:
        # A row that has seen no key yet has no maximum; -inf minus -inf would be NaN.
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = gl.exp2(row_max - shift)
    weights = gl.exp2(gl.fma(scores, scale_log2, -shift[:, None]))
    row_sum = row_sum * rescale + gl.sum(weights, axis=1)
    return new_max, row_sum, rescale, weights


@gluon.jit  # type: ignore[untyped-decorator]
def _clear_rows(tile: gl.shared_memory_descriptor, num_rows: gl.tensor) -> None:
    """Zeroes all but the first rows of a tile of values.

    Behind a sequence's last token the cache may hold NaN, and a weight of 0 times NaN is NaN. Both
    consumers do this, each before it reads; they write the same bits.
    """
    size: gl.constexpr = 32
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    if num_rows < _BLOCK_N:
        row = gl.arange(0, size, gl.SliceLayout(1, rows))
        for piece in gl.static_range(_BLOCK_N // size):
            part = tile.slice(piece * size, size, 0)
            kept = part.load(rows)
            part.store(gl.where((piece * size + row < num_rows)[:, None], kept, 0.0))
        fence_async_shared()
