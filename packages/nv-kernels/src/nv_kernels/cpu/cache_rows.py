"""A KV cache as the rows that lie in memory, head_dim elements each.

Reading and writing rows by number takes one operator, whatever order the cache's dimensions have in
memory; the numbers are the same for every layer of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def is_dense(cache: Tensor) -> bool:
    """Whether a permutation of the dimensions makes the tensor contiguous, head_dim the last."""
    expected = 1
    for stride, size in sorted(zip(cache.stride(), cache.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return cache.stride(-1) == 1


def rows_in_memory(cache: Tensor) -> Tensor:
    """The cache's memory as rows, [num_rows, head_dim]; a view.

    Args:
        cache: [num_blocks, block_size, num_kv_heads, head_dim], dense.
    """
    head_dim = cache.shape[-1]
    return cache.as_strided((cache.numel() // head_dim, head_dim), (head_dim, 1))


def row_numbers(cache: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
    """Numbers of the rows of tokens.

    Args:
        cache: As for `rows_in_memory`; only its layout is read.
        blocks: Block of each token, [...] int64.
        offsets: Its place in the block, [...] int64.

    Returns:
        [..., num_kv_heads] int64.
    """
    block_step, offset_step, head_step = (stride // cache.shape[3] for stride in cache.stride()[:3])
    heads = torch.arange(cache.shape[2]) * head_step
    return (blocks * block_step + offsets * offset_step)[..., None] + heads
