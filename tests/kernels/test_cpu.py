"""What runs faster on a CPU, against the plain reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nv_kernels import (
    AttentionMetadata,
    LayerKVCache,
    linear,
    linear_parts,
    pack_linear_weight,
)
from nv_kernels import paged_attention as paged_attention_op
from nv_kernels.cpu.decode_attention import can_attend, paged_decode_attention
from nv_kernels.reference.attention import paged_attention

BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
DTYPES = [torch.float32, torch.bfloat16]


def make_problem(
    lengths: list[int], *, heads_first: bool, dtype: torch.dtype
) -> tuple[Tensor, LayerKVCache, AttentionMetadata]:
    """Sequences whose cached tokens are random, in a cache that is NaN everywhere else."""
    generator = torch.Generator().manual_seed(sum(lengths))
    tables, next_block = [], 0
    for length in lengths:
        num_blocks = -(-length // BLOCK_SIZE)
        tables.append([next_block + 2 * number for number in reversed(range(num_blocks))])
        next_block += 2 * num_blocks
    num_blocks = next_block + 1
    shape = (num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    if not heads_first:
        shape = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    storage = torch.full((2, *shape), torch.nan, dtype=dtype)
    cache = LayerKVCache(*(half.transpose(1, 2) if heads_first else half for half in storage))
    for length, table in zip(lengths, tables, strict=True):
        for position in range(length):
            place = table[position // BLOCK_SIZE], position % BLOCK_SIZE
            for half in cache[:2]:
                half[place] = torch.randn(NUM_KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
    query_lens = [int(length > 0) for length in lengths]
    metadata = AttentionMetadata.from_lists(query_lens, lengths, tables, block_size=BLOCK_SIZE)
    query = torch.randn(sum(query_lens), 3 * NUM_KV_HEADS, HEAD_DIM, generator=generator)
    return query.to(dtype), cache, metadata


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads_first", [True, False])
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=5))
def test_batched_decoding_equals_the_loop_over_sequences(
    *, lengths: list[int], heads_first: bool, dtype: torch.dtype
) -> None:
    query, cache, metadata = make_problem(lengths, heads_first=heads_first, dtype=dtype)
    assert can_attend(cache, metadata)
    actual = paged_decode_attention(query, cache, metadata, scale=0.3)
    expected = paged_attention(query, cache, metadata, scale=0.3)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    # A second layer of the same step reads its own cache with the first one's plan.
    other = LayerKVCache(cache.value, cache.key)
    torch.testing.assert_close(
        paged_decode_attention(query, other, metadata, scale=0.3),
        paged_attention(query, other, metadata, scale=0.3),
        atol=tolerance,
        rtol=tolerance,
    )


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    lengths = [5, 130, 128, 7, 140, 190]
    query, cache, metadata = make_problem(lengths, heads_first=True, dtype=torch.float32)
    together = paged_decode_attention(query, cache, metadata, scale=0.3)
    for seq, length in enumerate(lengths):
        alone = AttentionMetadata.from_lists(
            [1], [length], [metadata.block_table[seq].tolist()], block_size=BLOCK_SIZE
        )
        row = paged_decode_attention(query[seq : seq + 1], cache, alone, scale=0.3)
        assert torch.equal(row[0], together[seq])


def test_keys_and_values_that_lie_differently() -> None:
    query, cache, metadata = make_problem([9, 6, 70], heads_first=True, dtype=torch.float32)
    assert cache.value.transpose(1, 2).is_contiguous()
    mixed = LayerKVCache(cache.key, cache.value.contiguous())
    assert_same_attention(query, mixed, cache, metadata)
    assert_same_attention(query, cache, mixed, metadata)


def assert_same_attention(
    query: Tensor, first: LayerKVCache, second: LayerKVCache, metadata: AttentionMetadata
) -> None:
    """Two layers of a step whose caches hold the same and lie differently."""
    actual, expected = (
        paged_attention_op(query, cache, metadata, scale=0.3) for cache in (first, second)
    )
    torch.testing.assert_close(actual, expected)


def test_a_batch_made_of_another_is_looked_up_anew() -> None:
    query, cache, metadata = make_problem([9, 6], heads_first=True, dtype=torch.float32)
    paged_decode_attention(query, cache, metadata, scale=0.3)
    other = replace(
        metadata,
        context_lens=metadata.context_lens.flip(0),
        block_table=metadata.block_table.flip(0),
    )
    torch.testing.assert_close(
        paged_decode_attention(query, cache, other, scale=0.3),
        paged_attention(query, cache, other, scale=0.3),
    )


def test_what_it_cannot_do_is_left_to_the_reference() -> None:
    query, cache, metadata = make_problem([9, 4], heads_first=True, dtype=torch.float32)
    assert query.shape[0] == 2
    apart = LayerKVCache(cache.key[::2], cache.value[::2])  # not one run of memory
    assert not can_attend(apart, metadata)
    prompts = AttentionMetadata.from_lists([2, 1], [2, 4], [[0], [2]], block_size=BLOCK_SIZE)
    assert not can_attend(cache, prompts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 8, 33])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_weight_gives_the_same_product(
    *, num_rows: int, has_bias: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((num_rows, 72), (50, 72), (50,))
    )
    packed = pack_linear_weight(weight)
    assert packed.shape == weight.shape
    assert packed.dtype == dtype
    given_bias = bias if has_bias else None
    expected = linear(x.double().float(), weight.float(), None if not has_bias else bias.float())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    atol = tolerance * float(expected.abs().max())
    actual = linear(x, packed, given_bias)
    torch.testing.assert_close(actual.float(), expected, atol=atol, rtol=tolerance)
    (part,) = linear_parts(x, packed)
    torch.testing.assert_close(part, linear(x, packed))


def test_weights_that_gain_nothing_stay_as_they_are() -> None:
    for weight in (torch.ones(4, 8, dtype=torch.float16), torch.ones(4, 8, device="meta")):
        assert pack_linear_weight(weight) is weight
