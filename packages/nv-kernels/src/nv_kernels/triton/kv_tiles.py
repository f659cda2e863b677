"""How the attention kernels read a tile of keys or values from the paged cache.

Legend: n tokens of a tile, d dimensions of a head. A tile that lies inside one block is a plain
[n, d] matrix with one base address; a tile that crosses blocks looks up a block for each token.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit  # type: ignore[untyped-decorator]
def locate_tile(
    table_ptr: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    block_size: tl.constexpr,
    block_n: tl.constexpr,
) -> tl.tuple:
    """Finds block and offset of the tokens `start` to `start + block_n` of one sequence.

    Loops call it one tile ahead: a load whose address waits for another load cannot be started
    early.

    Args:
        table_ptr: The sequence's row of the block table.
        start: Position of the tile's first token, a multiple of block_n.
        end: Length of the context; later positions are looked up as the last one.
        block_size: Tokens per block.
        block_n: Tokens per tile.

    Returns:
        Block and offset, int64: two scalars if block_n divides block_size (the offset is that of
        the first token), else two [n].
    """
    last = tl.maximum(end - 1, 0)
    if block_size % block_n == 0:
        block = tl.load(table_ptr + tl.minimum(start, last) // block_size)
        offset = tl.zeros([], tl.int64) if block_size == block_n else start % block_size
    else:
        position = start + tl.arange(0, block_n)
        block = tl.load(table_ptr + tl.minimum(position, last) // block_size)
        offset = position % block_size
    # int64: a pool of a few GB has more elements than int32 can count.
    return block.to(tl.int64), offset.to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def load_tile(
    head_ptr: tl.tensor,
    block: tl.tensor,
    offset: tl.tensor,
    num_inside: tl.tensor,
    block_stride: tl.tensor,
    offset_stride: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    masked: tl.constexpr,
    as_pairs: tl.constexpr,
) -> tl.tensor:
    """Loads the tile that `locate_tile` found.

    Args:
        head_ptr: The cache, at the key head.
        block: See `locate_tile`.
        offset: See there.
        num_inside: Tokens of the tile that may be read, if masked. The load itself is masked, not
            only the scores: slots beyond the context may hold NaN, and 0 * NaN is NaN.
        block_stride: Elements from a block to the next.
        offset_stride: Elements from a token to the next. A constant, so that the addresses of a
            tile are one register and immediate offsets.
        head_dim: Elements per head.
        block_size: Tokens per block.
        block_n: Tokens per tile.
        block_d: head_dim, rounded up to a power of two.
        masked: Whether only `num_inside` tokens may be read.
        as_pairs: Whether to read pairs of fp8 elements as one uint16 each. Strides count elements
            all the same, and must be even.

    Returns:
        [n, d], or [n, d / 2] pairs; zero where nothing was read.
    """
    n = tl.arange(0, block_n)
    per_read: tl.constexpr = 2 if as_pairs else 1
    nothing: tl.constexpr = 0 if as_pairs else 0.0
    d = tl.arange(0, block_d // per_read)
    if block_size % block_n == 0:
        step = n
        if block_n * offset_stride >= 2**31:
            step = n.to(tl.int64)
        first_ptr = head_ptr + block * block_stride + offset * offset_stride
        token_ptr = first_ptr + (step * offset_stride)[:, None]
    else:
        token_ptr = head_ptr + (block * block_stride + offset * offset_stride)[:, None]
    if as_pairs:
        token_ptr = token_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
    pointers = token_ptr + d[None, :]
    inside_d = (d < head_dim // per_read)[None, :]
    if masked:
        inside = (n < num_inside)[:, None]
        if head_dim < block_d:
            inside = inside & inside_d
        tile = tl.load(pointers, mask=inside, other=nothing)
    elif head_dim < block_d:
        tile = tl.load(pointers, mask=inside_d, other=nothing)
    else:
        tile = tl.load(pointers)
    return tile
