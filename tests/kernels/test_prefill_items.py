"""The list of query tiles against the same list made on the host."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attention_problems import NO_LOOPS_IN_INTERPRETER, metadata_of
from kernel_oracles import HAS_CUDA, HAS_TRITON, make_batch

DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            HAS_CUDA or not HAS_TRITON or NO_LOOPS_IN_INTERPRETER,
            reason="needs Triton's interpreter, with loops",
        ),
    ),
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")],
    ),
]


def items_on_host(
    lens: list[tuple[int, int]], num_padding: int, block_q: int, min_query_len: int
) -> list[list[int]]:
    items = []
    start = 0
    for seq, (query_len, context_len) in enumerate(lens):
        if query_len >= min_query_len:
            tiles = range(0, query_len, block_q)
            items += [[start, query_len, context_len, first, seq] for first in tiles]
        start += query_len
    tiles = range(0, num_padding, block_q)
    items += [[start, num_padding, 0, first, len(lens)] for first in tiles]
    return items[::-1]


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=15)
@example(lens=[(5, 0)], num_padding=1, block_q=2, min_query_len=2)
@given(
    lens=st.lists(
        st.tuples(st.integers(0, 9) | st.integers(60, 300), st.integers(0, 40)),
        min_size=1,
        max_size=5,
    ),
    num_padding=st.integers(0, 20),
    block_q=st.sampled_from([1, 2, 8, 21, 64]),
    min_query_len=st.sampled_from([1, 2]),
)
def test_items(
    device: str, lens: list[tuple[int, int]], num_padding: int, block_q: int, min_query_len: int
) -> None:
    from nv_kernels.triton.prefill_items import list_prefill_items

    lens = [(query_len, query_len + cached) for query_len, cached in lens]
    metadata = metadata_of(make_batch(lens, 16, num_padding_tokens=num_padding), device)
    items = list_prefill_items(metadata, block_q=block_q, min_query_len=min_query_len)
    expected = items_on_host(lens, num_padding, block_q, min_query_len)
    count = int(items[0, 0])
    assert items[1 : 1 + count].tolist() == expected
    assert len(expected) < len(items)


@pytest.mark.parametrize("device", DEVICES)
def test_more_sequences_than_one_load_takes(device: str) -> None:
    from nv_kernels.triton.prefill_items import list_prefill_items

    lens = [(seq % 5, 7 + seq) for seq in range(600)]
    metadata = metadata_of(make_batch(lens, 16), device)
    items = list_prefill_items(metadata, block_q=2, min_query_len=2)
    expected = items_on_host(lens, 0, 2, 2)
    assert items[1 : 1 + int(items[0, 0])].tolist() == expected
    # The next layer gets the same list.
    assert list_prefill_items(metadata, block_q=2, min_query_len=2) is items
    # Other tiles have a list of their own.
    for block_q, min_query_len in ((3, 2), (2, 1)):
        others = list_prefill_items(metadata, block_q=block_q, min_query_len=min_query_len)
        expected = items_on_host(lens, 0, block_q, min_query_len)
        assert others[1 : 1 + int(others[0, 0])].tolist() == expected
