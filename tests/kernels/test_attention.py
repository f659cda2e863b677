"""Paged attention of every backend against an fp64 loop over tokens and heads.

Every slot of every cache is NaN unless it holds a token of some sequence, so that one read too
many shows up in the result.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_problems import ATOL, OPTIONAL_BACKENDS, Problem, metadata_of
from kernel_oracles import (
    HAS_CUDA,
    HAS_TRITON,
    LAYOUTS,
    Batch,
    Target,
    assert_close,
    assert_same_bits,
    attention_oracle,
    make_batch,
    make_cache,
    random_tensor,
    targets,
)
from nv_kernels import (
    AttentionMetadata,
    FreshKV,
    KernelInputError,
    LayerKVCache,
    paged_attention,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ALL_TARGETS = targets(gpu_backends=("torch", "triton", *OPTIONAL_BACKENDS))

PROMPTS = ((5, 5), (1, 1), (17, 17))
DECODES = ((1, 17), (1, 1), (1, 64), (1, 65), (1, 33))
CHUNKS = ((4, 19), (3, 35), (2, 2))
MIXED = ((7, 7), (1, 20), (4, 19), (1, 1), (9, 70))


def head_dim_for(target: Target, head_dim: int) -> int:
    """Small heads make small tests, but a small build of flash-attn knows none under 64."""
    return 64 if target.backend in OPTIONAL_BACKENDS else head_dim


@pytest.mark.parametrize("target", ALL_TARGETS)
@pytest.mark.parametrize("lens", [PROMPTS, DECODES, CHUNKS, MIXED])
@pytest.mark.parametrize("block_size", [16, 256])
def test_kinds_of_batches(
    target: Target, lens: tuple[tuple[int, int], ...], block_size: int
) -> None:
    batch = make_batch(lens, block_size)
    Problem.make(batch, target, num_heads=6, num_kv_heads=2, head_dim=64).check(target.backend)


@pytest.mark.parametrize("target", ALL_TARGETS)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [(1, 1), (4, 4), (4, 2), (9, 3), (4, 1), (5, 1), (14, 2), (8, 1), (16, 1), (17, 1), (40, 2)],
)
def test_groups(target: Target, num_heads: int, num_kv_heads: int) -> None:
    for lens in (((1, 19), (1, 3)), ((5, 5), (1, 18), (3, 9))):
        problem = Problem.make(
            make_batch(lens, 256 if target.backend == "flash_attn" else 8),
            target,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_for(target, 16),
        )
        problem.check(target.backend)


@pytest.mark.parametrize("target", ALL_TARGETS)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 96, 128, 160, 256])
def test_head_dims(target: Target, head_dim: int) -> None:
    for lens in (((1, 37), (1, 2)), ((6, 6), (1, 37), (4, 21))):
        batch = make_batch(lens, 256 if target.backend == "flash_attn" else 16)
        problem = Problem.make(batch, target, num_heads=4, num_kv_heads=2, head_dim=head_dim)
        problem.check(target.backend)


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 16, 48, 64, 100, 512])
def test_block_sizes(target: Target, block_size: int) -> None:
    batch = make_batch(((7, 7), (1, 2 * block_size), (3, block_size + 1), (1, 1)), block_size)
    problem = Problem.make(batch, target, num_heads=4, num_kv_heads=2, head_dim=16)
    problem.check(target.backend)


@pytest.mark.parametrize("target", ALL_TARGETS)
@pytest.mark.parametrize(
    ("key_layout", "value_layout"), list(zip(LAYOUTS, LAYOUTS[1:] + LAYOUTS[:1], strict=True))
)
def test_cache_layouts(target: Target, key_layout: str, value_layout: str) -> None:
    batch = make_batch(MIXED, 256 if target.backend == "flash_attn" else 16)
    problem = Problem.make(
        batch,
        target,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim_for(target, 32),
        layouts=(key_layout, value_layout),
    )
    problem.check(target.backend)


@pytest.mark.parametrize("target", ALL_TARGETS)
@pytest.mark.parametrize("num_heads", [1, 3])
def test_queries_of_several_tiles(target: Target, num_heads: int) -> None:
    """Tiles hold at most 64 rows of queries and 64 keys: cross both bounds, and meet them."""
    lens = ((130, 130), (64, 64), (65, 129), (63, 192))
    batch = make_batch(lens, 256 if target.backend == "flash_attn" else 32)
    problem = Problem.make(
        batch, target, num_heads=num_heads, num_kv_heads=1, head_dim=head_dim_for(target, 16)
    )
    problem.check(target.backend)


@pytest.mark.parametrize("target", ALL_TARGETS)
@pytest.mark.parametrize("real", [((1, 5), (1, 18)), ((3, 3), (1, 18)), ((0, 0),)])
def test_padding_after_the_batch(target: Target, real: tuple[tuple[int, int], ...]) -> None:
    """What a captured graph adds: empty sequences, and tokens of no sequence, which become 0."""
    block_size = 256 if target.backend == "flash_attn" else 16
    for num_padding_seqs, num_padding_tokens in ((2, 2), (0, 3), (3, 0), (1, 4)):
        batch = make_batch(
            real + ((0, 0),) * num_padding_seqs,
            block_size,
            num_padding_tokens=num_padding_tokens,
        )
        problem = Problem.make(
            batch, target, num_heads=4, num_kv_heads=2, head_dim=head_dim_for(target, 16)
        )
        problem.check(target.backend)
        result = problem.run(target.backend)
        assert not bool(result[batch.query_starts[-1] :].any())


@pytest.mark.parametrize("target", targets())
def test_empty_sequences_anywhere(target: Target) -> None:
    """More than the contract asks for: ours take them between real sequences too."""
    for lens in (((0, 0), (1, 9), (0, 0), (1, 4)), ((0, 0), (4, 4), (0, 0), (2, 9))):
        batch = make_batch(lens, 4)
        problem = Problem.make(batch, target, num_heads=4, num_kv_heads=2, head_dim=16)
        problem.check(target.backend)


@pytest.mark.parametrize("target", targets())
def test_queries_before_the_context_are_zero(target: Target) -> None:
    """The mask's bottom-right corner decides: the first two of five queries see no key at all."""
    batch = make_batch(((5, 3), (2, 0), (1, 4)), 4)
    problem = Problem.make(batch, target, num_heads=2, num_kv_heads=1, head_dim=16)
    problem.check(target.backend)
    assert not bool(problem.run(target.backend)[[0, 1, 5, 6]].any())


@pytest.mark.parametrize("target", ALL_TARGETS)
def test_no_sequences_and_no_tokens(target: Target) -> None:
    batch = make_batch(((0, 0),), 256)
    problem = Problem.make(
        batch, target, num_heads=2, num_kv_heads=1, head_dim=head_dim_for(target, 16)
    )
    assert problem.run(target.backend).shape == problem.query.shape
    nothing = dataclasses.replace(
        problem.metadata,
        cu_seqlens_q=problem.metadata.cu_seqlens_q[:1],
        context_lens=problem.metadata.context_lens[:0],
        block_table=problem.metadata.block_table[:0],
    )
    result = dataclasses.replace(problem, metadata=nothing).run(target.backend)
    assert result.shape == problem.query.shape


@pytest.mark.parametrize("target", ALL_TARGETS)
def test_limits_may_exceed_the_batch(target: Target) -> None:
    """A captured graph keeps the limits and the table's width of its largest batch."""
    batch = make_batch(MIXED, 256)
    problem = Problem.make(
        batch, target, num_heads=4, num_kv_heads=2, head_dim=head_dim_for(target, 16)
    )
    table = problem.metadata.block_table
    wide = torch.full((table.shape[0], 9), -1, dtype=torch.int32, device=target.device)
    wide[:, : table.shape[1]] = table
    loose = dataclasses.replace(
        problem.metadata,
        # A column slice: rows are further apart than they are wide.
        block_table=wide[:, :8],
        max_query_len=40,
        max_context_len=8 * 256,
    )
    dataclasses.replace(problem, metadata=loose).check(target.backend)


@pytest.mark.parametrize("target", ALL_TARGETS)
def test_large_scores_do_not_overflow(target: Target) -> None:
    batch = make_batch(((6, 6), (1, 40)), 256)
    problem = Problem.make(
        batch, target, num_heads=2, num_kv_heads=1, head_dim=head_dim_for(target, 32)
    )
    # Scores of several hundred: their exponentials are beyond fp32 unless the maximum is taken
    # off first. The softmax is then almost one-hot, so a rounded score cannot be told apart.
    loud = dataclasses.replace(problem, scale=100.0)
    result = loud.run(target.backend)
    expected = loud.expected()
    # Neighbouring scores differ by tens; fp32 scores of 1000 are exact to 1e-4.
    assert_close(result, expected, rtol=0, atol=max(5e-3, ATOL[target.dtype]))


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("lens", [DECODES, PROMPTS])
def test_a_sequence_does_not_depend_on_the_others(
    target: Target, lens: tuple[tuple[int, int], ...]
) -> None:
    batch = make_batch(lens, 16)
    problem = Problem.make(batch, target, num_heads=6, num_kv_heads=2, head_dim=64)
    together = problem.run(target.backend)
    for seq in range(len(lens)):
        rows = slice(batch.query_starts[seq], batch.query_starts[seq + 1])
        alone = Batch(lens[seq : seq + 1], 16, batch.block_tables[seq : seq + 1], batch.num_blocks)
        result = Problem(
            alone,
            problem.query[rows],
            problem.kv_cache,
            metadata_of(alone, target.device),
            problem.scale,
        ).run(target.backend)
        assert_same_bits(result, together[rows])


@pytest.mark.parametrize("target", targets())
def test_chunks_equal_the_whole_prompt(target: Target) -> None:
    length = 40
    batch = make_batch(((length, length),), 16)
    problem = Problem.make(batch, target, num_heads=4, num_kv_heads=2, head_dim=32)
    whole = problem.run(target.backend)
    for chunk in (1, 7, 16, 39):
        parts = []
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            part = Batch(((end - start, end),), 16, batch.block_tables, batch.num_blocks)
            parts.append(
                Problem(
                    part,
                    problem.query[start:end],
                    problem.kv_cache,
                    metadata_of(part, target.device),
                    problem.scale,
                ).run(target.backend)
            )
        assert_close(torch.cat(parts), whole, rtol=0, atol=2 * ATOL[target.dtype])


# Whole prompts, around the tiles of 64 keys, between sequences of none.
FRESH = ((130, 130), (0, 0), (65, 65), (2, 2), (64, 64))


@pytest.mark.parametrize("target", ALL_TARGETS)
@pytest.mark.parametrize(
    ("block_size", "num_heads", "num_kv_heads", "head_dim"),
    [(16, 4, 2, 64), (256, 5, 1, 24), (64, 2, 2, 128)],
)
def test_fresh_keys_give_the_same_bits(
    target: Target, block_size: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    if target.backend in OPTIONAL_BACKENDS:
        block_size = 256
    batch = make_batch((*FRESH, (1, 1)), block_size, num_padding_tokens=3)
    problem = Problem.make(
        batch,
        target,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim_for(target, head_dim),
    )
    expected = problem.run(target.backend)
    assert_same_bits(problem.run(target.backend, problem.fresh()), expected)


@pytest.mark.parametrize("target", targets())
def test_fresh_keys_are_read_where_that_is_faster(target: Target) -> None:
    batch = make_batch(FRESH, 16, num_padding_tokens=3)
    problem = Problem.make(batch, target, num_heads=4, num_kv_heads=2, head_dim=24)
    expected, fresh = problem.run(target.backend), problem.fresh()
    unused = torch.full_like(problem.kv_cache.key, float("nan"))
    nothing = LayerKVCache(unused, unused)
    result = dataclasses.replace(problem, kv_cache=nothing).run(target.backend, fresh)
    if target.backend == "triton":
        assert_same_bits(result, expected)
    else:
        assert bool(result.isnan().any())


@st.composite
def ragged_batches(draw: st.DrawFn) -> Batch:
    block_size = draw(st.sampled_from([1, 3, 8, 16]))
    lens = []
    for _ in range(draw(st.integers(1, 5))):
        query_len = draw(st.one_of(st.just(1), st.integers(0, 12)))
        cached_len = draw(st.integers(0, 40)) if query_len else 0
        lens.append((query_len, query_len + cached_len))
    padding = draw(st.integers(0, 3))
    return make_batch(lens, block_size, num_padding_tokens=padding, seed=draw(st.integers(0, 99)))


@pytest.mark.parametrize(
    "backend",
    [
        "torch",
        pytest.param(
            "triton",
            marks=pytest.mark.skipif(
                HAS_CUDA or not HAS_TRITON, reason="needs Triton's interpreter"
            ),
        ),
    ],
)
@settings(deadline=None, max_examples=30)
@given(batch=ragged_batches(), heads=st.sampled_from([(1, 1), (6, 2), (7, 1)]))
# As many tokens as sequences, of one token at most, and yet no decode step.
@example(batch=make_batch([(0, 0), (1, 1)], 1, num_padding_tokens=1), heads=(1, 1))
@example(batch=make_batch([(0, 0), (1, 3), (1, 1)], 2, num_padding_tokens=1), heads=(6, 2))
def test_any_ragged_batch(backend: str, batch: Batch, heads: tuple[int, int]) -> None:
    target = Target(backend, "cpu", torch.float32)
    num_heads, num_kv_heads = heads
    problem = Problem.make(
        batch, target, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=8
    )
    problem.check(backend)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_pool_of_more_elements_than_int32_counts() -> None:
    target = Target("triton", "cuda", torch.bfloat16)
    num_kv_heads, head_dim, block_size = 8, 128, 16
    num_blocks = 2**31 // (block_size * num_kv_heads * head_dim) + 2
    batch = Batch(((1, 20),), block_size, ((num_blocks - 1, 0),), num_blocks)
    key, value = (
        make_cache(batch, num_kv_heads, head_dim, "contiguous", seed=seed, target=target)
        for seed in (1, 2)
    )
    query = random_tensor(3, 1, 16, head_dim, target=target)
    metadata = metadata_of(batch, "cuda")
    result = paged_attention(query, LayerKVCache(key, value), metadata, scale=0.1, backend="triton")
    # The oracle works on a pool of the two blocks in use: fp64 copies of all would not fit.
    small = Batch(batch.lens, block_size, ((1, 0),), 2)
    expected = attention_oracle(query, key[[0, -1]], value[[0, -1]], small, 0.1)
    assert_close(result, expected, rtol=0, atol=ATOL[target.dtype])


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["triton", *OPTIONAL_BACKENDS])
def test_captured_graph_replays_another_batch(backend: str) -> None:
    """Capture with four sequences, then replay with three and padding, in the same buffers."""
    torch.use_deterministic_algorithms(mode=False)  # filling fresh memory would hide in the capture
    target = Target(backend, "cuda", torch.bfloat16)
    batch = make_batch(((1, 9), (1, 300), (1, 1), (1, 77)), 256)
    first = Problem.make(batch, target, num_heads=8, num_kv_heads=2, head_dim=64)
    first.check(backend)  # also compiles, which must not happen while capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = first.run(backend)
    second = make_batch(((1, 40), (1, 2), (1, 257), (0, 0)), 256, num_padding_tokens=1, seed=5)
    other = Problem.make(second, target, num_heads=8, num_kv_heads=2, head_dim=64, seed=7)
    for buffer, fresh in zip(
        (first.query, *first.kv_cache[:2]), (other.query, *other.kv_cache[:2]), strict=True
    ):
        buffer[: len(fresh)].copy_(fresh[: len(buffer)])
    for name in ("cu_seqlens_q", "context_lens", "block_table", "slot_mapping"):
        getattr(first.metadata, name).copy_(getattr(other.metadata, name))
    graph.replay()
    torch.cuda.synchronize()
    assert_close(output, other.expected(), rtol=0, atol=ATOL[target.dtype])


def test_errors_name_the_argument() -> None:
    target = Target("torch", "cpu", torch.float32)
    problem = Problem.make(make_batch(MIXED, 16), target, num_heads=4, num_kv_heads=2, head_dim=16)
    query, (key, value), metadata = problem.query, problem.kv_cache[:2], problem.metadata
    too_long = dataclasses.replace(metadata, max_context_len=16 * 6 + 1)
    cases: list[tuple[str, Tensor, LayerKVCache, AttentionMetadata]] = [
        ("query has shape", query[:-1], LayerKVCache(key, value), metadata),
        ("query has dtype", query.double(), LayerKVCache(key, value), metadata),
        ("query has stride 2", query.repeat(1, 1, 2)[..., ::2], LayerKVCache(key, value), metadata),
        ("kv_cache.key has shape", query, LayerKVCache(key[..., :8], value), metadata),
        ("kv_cache.value has shape", query, LayerKVCache(key, value[:1]), metadata),
        ("kv_cache.key has dtype", query, LayerKVCache(key.half(), value), metadata),
        ("query has 3 heads and kv_cache 2", query[:, :3], LayerKVCache(key, value), metadata),
        ("block_table has 6 blocks", query, LayerKVCache(key, value), too_long),
        (
            "metadata is on cpu",
            query.to("meta"),
            LayerKVCache(key.to("meta"), value.to("meta")),
            metadata,
        ),
    ]
    for message, bad_query, bad_cache, bad_metadata in cases:
        with pytest.raises(KernelInputError, match=message):
            paged_attention(bad_query, bad_cache, bad_metadata, scale=0.25)
    for bad_scale in (0.0, -1.0, float("inf"), float("nan"), "x", None, torch.tensor(0.25)):
        scale: Any = bad_scale
        with pytest.raises(KernelInputError, match=r"scale is .*, but must be a positive number"):
            paged_attention(query, problem.kv_cache, metadata, scale=scale)
    empty = LayerKVCache(key[..., :0], value[..., :0])
    with pytest.raises(KernelInputError, match="head_dim 0, but a head must have dimensions"):
        paged_attention(query[..., :0], empty, metadata, scale=0.25)
    fresh = FreshKV(query[:, :2], query[:, 2:])
    for message, bad_fresh in (
        ("fresh.key has shape", FreshKV(query, query)),
        ("fresh.value has shape", fresh._replace(value=query[:-1, 2:])),
        ("fresh.value has dtype", fresh._replace(value=fresh.value.half())),
        ("fresh.key has stride 2", fresh._replace(key=fresh.key.repeat(1, 1, 2)[..., ::2])),
    ):
        with pytest.raises(KernelInputError, match=message):
            paged_attention(query, problem.kv_cache, metadata, scale=0.25, fresh=bad_fresh)
