"""Paged attention of decode steps on a CPU: many sequences in one product.

A loop over sequences, as in the reference, spends more time between operators than in them when
contexts are short. Here sequences of similar length are gathered into one padded batch. What pads
it is a copy of the sequence's own last token, masked: no unused memory of the cache is ever read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch.nn.functional import scaled_dot_product_attention

from nv_kernels.cpu.cache_rows import is_dense, row_numbers, rows_in_memory
from nv_kernels.reference.attention import select_rows

if TYPE_CHECKING:
    from torch import Tensor

    from nv_kernels.metadata import AttentionMetadata, LayerKVCache


def can_attend(kv_cache: LayerKVCache, metadata: AttentionMetadata) -> bool:
    """Whether each sequence has one token and no other token is there, in one run of memory."""
    return (
        metadata.max_query_len == 1
        and metadata.num_tokens == metadata.num_seqs > 0
        and kv_cache.key.device.type == "cpu"
        and is_dense(kv_cache.key)
        and is_dense(kv_cache.value)
        and kv_cache.key.stride() == kv_cache.value.stride()
        and _has_one_query_each(metadata)
    )


def paged_decode_attention(
    query: Tensor, kv_cache: LayerKVCache, metadata: AttentionMetadata, *, scale: float
) -> Tensor:
    """Implements `nv_kernels.ops.attention.paged_attention` where `can_attend` holds."""
    num_kv_heads, head_dim = kv_cache.key.shape[2:]
    # All layers have the same layout, so the numbers of the rows are worked out once per step.
    key = f"cpu decode, {kv_cache.key.shape[1:]}, {kv_cache.key.stride()}"
    groups = cast("list[_Group] | None", metadata.derived.get(key))
    if groups is None:
        groups = _plan(kv_cache.key, metadata)
        metadata.derived[key] = groups

    output = query.new_zeros(query.shape)
    for group in groups:
        rows_of_query = query if group.seqs is None else query[group.seqs]
        # The query heads that share a key head stand as rows of one product.
        result = scaled_dot_product_attention(
            rows_of_query.view(rows_of_query.shape[0], num_kv_heads, -1, head_dim),
            _gather(kv_cache.key, group, query.dtype),
            _gather(kv_cache.value, group, query.dtype),
            attn_mask=group.mask,
            scale=scale * kv_cache.k_scale,
        ).reshape(rows_of_query.shape)
        if kv_cache.v_scale != 1.0:
            result *= kv_cache.v_scale
        if group.seqs is None:
            return result
        output[group.seqs] = result
    return output


def _has_one_query_each(metadata: AttentionMetadata) -> bool:
    """Whether token i is sequence i's; sequences without a token may hide behind padding."""
    key = "cpu decode, one query each"
    if key not in metadata.derived:
        starts = metadata.cu_seqlens_q
        metadata.derived[key] = torch.equal(starts, torch.arange(len(starts), dtype=starts.dtype))
    return bool(metadata.derived[key])


class _Group(NamedTuple):
    """Sequences of similar length that are attended to at once.

    Attributes:
        seqs: Their numbers, [num_seqs] int64; None for the whole batch.
        rows: Where their tokens lie: numbers of rows of head_dim elements of the cache's memory,
            [num_seqs * num_kv_heads * padded_length] int64.
        mask: True for tokens that there are, [num_seqs, 1, 1, padded_length].
        shape: (num_seqs, num_kv_heads, padded_length, head_dim).
    """

    seqs: Tensor | None
    rows: Tensor
    mask: Tensor
    shape: tuple[int, int, int, int]


def _plan(cache: Tensor, metadata: AttentionMetadata) -> list[_Group]:
    """Groups the sequences that have a context by the length that they are padded to."""
    members: dict[int, list[int]] = {}
    for seq, length in enumerate(metadata.context_lens.tolist()):
        if length:
            members.setdefault(_padded_length(length), []).append(seq)
    return [
        _plan_group(cache, metadata, seqs, padded_length) for padded_length, seqs in members.items()
    ]


def _padded_length(length: int) -> int:
    """The length that a context is padded to: 64, 128, 192, 256, 384, 512, 768, ...

    It depends on the sequence's own length alone, and with it the order in which its products are
    summed: a sequence's result does not depend on the others of its batch.
    """
    power = 1 << max((length - 1).bit_length(), 6)
    return power * 3 // 4 if power > 128 and length <= power * 3 // 4 else power


def _plan_group(
    cache: Tensor, metadata: AttentionMetadata, seqs: list[int], padded_length: int
) -> _Group:
    lengths, block_table, index = metadata.context_lens, metadata.block_table, None
    if len(seqs) < metadata.num_seqs:
        index = torch.tensor(seqs)
        lengths, block_table = lengths[index], block_table[index]
    _, block_size, num_kv_heads, head_dim = cache.shape
    position = torch.arange(padded_length)
    last = lengths[:, None] - 1
    clamped = torch.minimum(position, last)  # [num_seqs, padded_length]
    blocks = block_table.gather(1, clamped // block_size)
    rows = row_numbers(cache, blocks, clamped % block_size).transpose(1, 2)
    return _Group(
        seqs=index,
        rows=rows.flatten(),
        mask=(position <= last)[:, None, None],
        shape=(len(seqs), num_kv_heads, padded_length, head_dim),
    )


def _gather(cache: Tensor, group: _Group, dtype: torch.dtype) -> Tensor:
    """Copies a group's tokens together, [num_seqs, num_kv_heads, padded_length, head_dim]."""
    return select_rows(rows_in_memory(cache), group.rows, dtype).view(group.shape)
