"""Which graph serves which batch: pure functions of sizes."""

from __future__ import annotations

import pytest

from nv_runtime.cuda_graphs import (
    MixedShape,
    batch_buckets,
    context_bound,
    seq_buckets,
    token_buckets,
)
from nv_runtime.input_builder import StepLayout


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 12, 100, 200, 255, 256, 257, 300, 1000])
def test_every_batch_has_a_bucket_and_none_is_too_large(max_num_seqs: int) -> None:
    buckets = batch_buckets(max_num_seqs)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == max_num_seqs
    for size in range(1, max_num_seqs + 1):
        padded = min(bucket for bucket in buckets if bucket >= size)
        assert padded - size < 16
        assert padded < 2 * size or padded <= 8


def test_small_batches_are_hardly_padded() -> None:
    assert batch_buckets(256)[:5] == [1, 2, 4, 8, 16]
    assert len(batch_buckets(256)) == 35


@pytest.mark.parametrize("max_model_len", [10, 1024, 5000, 40960])
def test_the_context_bound_holds_every_context(max_model_len: int) -> None:
    bounds = {context_bound(n, max_model_len) for n in range(1, max_model_len + 1)}
    assert len(bounds) <= 4
    for length in (1, max_model_len // 2 + 1, max_model_len):
        assert length <= context_bound(length, max_model_len) <= max_model_len


@pytest.mark.parametrize("max_tokens", [1, 16, 20, 512, 513, 1000, 8192, 10_000])
def test_every_step_with_prompts_has_a_bucket_that_it_fills_well(max_tokens: int) -> None:
    buckets = token_buckets(max_tokens)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == max_tokens
    for size in range(1, max_tokens + 1):
        padded = min(bucket for bucket in buckets if bucket >= size)
        assert padded - size < max(64, size / 4) or padded <= 512


@pytest.mark.parametrize("max_num_seqs", [1, 3, 4, 200, 256, 1000])
def test_every_number_of_sequences_has_a_bucket(max_num_seqs: int) -> None:
    buckets = seq_buckets(max_num_seqs)
    assert buckets == sorted(set(buckets))
    assert (buckets[0], buckets[-1]) == (1, max_num_seqs)
    assert len(buckets) <= 6


def test_a_shape_holds_another_only_if_it_is_as_large_in_everything() -> None:
    shape = MixedShape(StepLayout(num_tokens=64, num_seqs=16, num_blocks=8), max_query_len=64)
    assert shape.holds(shape)
    assert shape.holds(MixedShape(StepLayout(32, 4, 8), max_query_len=32))
    for layout in (StepLayout(65, 16, 8), StepLayout(64, 17, 8), StepLayout(64, 16, 9)):
        assert not shape.holds(MixedShape(layout, max_query_len=64))
    assert not shape.holds(MixedShape(shape.layout, max_query_len=65))
