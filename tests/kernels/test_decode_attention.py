"""Decode attention where it is cut into pieces: splits, programs, and batches that change shape.

`test_attention.py` has the general cases. These go around the kernels' own boundaries: splits of
256 tokens (longer beyond 8192), contexts walked by one program or by many, captured graphs.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch

from attention_problems import ATOL, Problem, metadata_of
from kernel_oracles import (
    HAS_CUDA,
    Batch,
    Target,
    assert_close,
    assert_same_bits,
    make_batch,
    targets,
)
from nv_kernels import KernelInputError, LayerKVCache, rms_norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TRITON_TARGETS = [
    param
    for param in targets()
    if isinstance(t := param.values[0], Target) and t.backend == "triton"
]
COMPILED_TARGETS = [param for param in TRITON_TARGETS if "-cuda-" in str(param.id)]
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]


def decode_problem(
    context_lens: Sequence[int],
    target: Target,
    *,
    block_size: int = 16,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    num_padding_tokens: int = 0,
    seed: int = 0,
) -> Problem:
    lens = [(min(length, 1), length) for length in context_lens]
    batch = make_batch(lens, block_size, num_padding_tokens=num_padding_tokens, seed=seed)
    return Problem.make(
        batch,
        target,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        seed=seed,
    )


def alone(problem: Problem, seq: int, backend: str) -> Tensor:
    """Runs one decode step of the batch as a batch of its own, on the same cache."""
    batch = problem.batch
    row = batch.query_starts[seq]
    single = Batch(
        batch.lens[seq : seq + 1],
        batch.block_size,
        batch.block_tables[seq : seq + 1],
        batch.num_blocks,
    )
    return dataclasses.replace(
        problem,
        batch=single,
        query=problem.query[row : row + 1],
        metadata=metadata_of(single, str(problem.query.device.type)),
    ).run(backend)


@pytest.mark.parametrize("target", TRITON_TARGETS)
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_split_boundaries(target: Target, block_size: int) -> None:
    """One sequence is split at every 256 tokens: before, at and after the first few bounds."""
    for context_len in (1, 63, 64, 65, 255, 256, 257, 320, 511, 512, 513, 769):
        decode_problem(
            [context_len], target, block_size=block_size, num_heads=2, num_kv_heads=1
        ).check(target.backend)


@pytest.mark.slow
@pytest.mark.parametrize("target", TRITON_TARGETS)
@pytest.mark.parametrize("context_len", [8191, 8192, 8193, 16385])
def test_long_contexts_have_longer_splits(target: Target, context_len: int) -> None:
    problem = decode_problem(
        [context_len], target, block_size=256, num_heads=2, num_kv_heads=1, head_dim=16
    )
    problem.check(target.backend)


@pytest.mark.parametrize("target", COMPILED_TARGETS)
def test_contexts_of_128k(target: Target) -> None:
    """A prompt's last chunk and decode steps, with scores that favour few of all those tokens."""
    length = 131_077
    batch = make_batch([(1, length), (1, 5), (16, length), (1, length - 77)], 64)
    problem = Problem.make(batch, target, num_heads=2, num_kv_heads=1, head_dim=64)
    sharp = dataclasses.replace(problem, query=problem.query * 16)
    expected = sharp.expected()
    assert float(expected.abs().max()) > 0.5
    # Scores of up to 60 are rounded before they are exponents.
    atol = max(2 * ATOL[target.dtype], 5e-4)
    assert_close(sharp.run(target.backend), expected, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("target", TRITON_TARGETS)
@pytest.mark.parametrize(
    "num_seqs",
    [
        3,
        # On the H200's 132 processors: split, walked up to 1024 tokens, walked up to 4096, and
        # the band in which four programs share a processor.
        *(pytest.param(num_seqs, marks=ON_GPU) for num_seqs in (40, 60, 150, 220)),
    ],
)
def test_neighbours_change_no_bit(target: Target, num_seqs: int) -> None:
    """However many sequences there are, and whoever walks or splits: the sums are the same."""
    lens = [257, 1030, 4100, 1, 512, 0, 64, 900][:num_seqs]
    lens += [1 + 37 * seq % 300 for seq in range(num_seqs - len(lens))]
    problem = decode_problem(lens, target, block_size=64, head_dim=64)
    together = problem.run(target.backend)
    reversed_batch = make_reversed(problem)
    backwards = reversed_batch.run(target.backend)
    for seq, length in enumerate(lens[:8]):
        if length:
            row = problem.batch.query_starts[seq]
            assert_same_bits(alone(problem, seq, target.backend), together[row : row + 1])
            mirrored = len(backwards) - 1 - row
            assert_same_bits(backwards[mirrored : mirrored + 1], together[row : row + 1])
    expected = problem.expected()
    assert_close(together, expected, rtol=0, atol=ATOL[target.dtype])


@pytest.mark.parametrize("target", TRITON_TARGETS)
@pytest.mark.parametrize("num_seqs", [3, pytest.param(150, marks=ON_GPU)])
def test_settled_metadata_changes_no_bit(target: Target, num_seqs: int) -> None:
    """Lengths may be read early then; what the kernel directly before writes may not."""
    lens = [257, 0, 700, *(1 + 37 * seq % 300 for seq in range(num_seqs - 3))]
    problem = decode_problem(lens, target, block_size=64, head_dim=64, num_padding_tokens=3)
    settled = dataclasses.replace(problem.metadata, is_settled=True)
    weight = torch.ones(64, dtype=target.dtype, device=target.device)
    for _ in range(1 if target.device == "cpu" else 50):
        raw = torch.randn_like(problem.query)
        query = rms_norm(raw, weight, eps=1e-6, backend=target.backend)
        early = dataclasses.replace(problem, query=query, metadata=settled)
        together = early.run(target.backend)
        late = dataclasses.replace(problem, query=query.clone())
        assert_same_bits(together, late.run(target.backend))


def make_reversed(problem: Problem) -> Problem:
    """The same sequences in the opposite order."""
    batch = dataclasses.replace(
        problem.batch,
        lens=problem.batch.lens[::-1],
        block_tables=problem.batch.block_tables[::-1],
    )
    return dataclasses.replace(
        problem,
        batch=batch,
        query=problem.query.flip(0),
        metadata=metadata_of(batch, str(problem.query.device.type)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", TRITON_TARGETS)
def test_a_decode_step_among_prompts_is_the_same(target: Target) -> None:
    lens = ((5, 5), (1, 700), (70, 300), (1, 3), (1, 256))
    batch = make_batch(lens, 16, num_padding_tokens=3)
    problem = Problem.make(batch, target, num_heads=4, num_kv_heads=2, head_dim=64)
    problem.check(target.backend)
    together = problem.run(target.backend)
    for seq in (1, 3, 4):
        row = batch.query_starts[seq]
        assert_same_bits(alone(problem, seq, target.backend), together[row : row + 1])


@pytest.mark.parametrize("target", TRITON_TARGETS)
def test_knowing_that_there_are_no_decode_steps_changes_nothing(target: Target) -> None:
    batch = make_batch(((5, 5), (2, 40), (9, 70), (0, 0)), 16, num_padding_tokens=2)
    problem = Problem.make(batch, target, num_heads=4, num_kv_heads=2, head_dim=32)
    told = dataclasses.replace(
        problem, metadata=dataclasses.replace(problem.metadata, min_query_len=2)
    )
    told.check(target.backend)
    assert_same_bits(told.run(target.backend), problem.run(target.backend))


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_the_scale_must_be_positive(target: Target, scale: float) -> None:
    problem = dataclasses.replace(decode_problem([5], target), scale=scale)
    with pytest.raises(KernelInputError, match=r"scale is .*, but must be a positive number"):
        problem.run(target.backend)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("num_seqs", [3, 60, 150])
def test_one_graph_serves_growing_and_shrinking_batches(num_seqs: int) -> None:
    """Captured once for up to 6000 tokens, replayed with short, long and absent sequences."""
    torch.use_deterministic_algorithms(mode=False)  # filling fresh memory would hide in the capture
    target = Target("triton", "cuda", torch.bfloat16)
    steps = [
        [300 + seq % 7 for seq in range(num_seqs)],
        [6000] + [5] * (num_seqs - 1),
        [1025, 256] + [0] * (num_seqs - 2),
        [0] * num_seqs,
        [(97 * seq) % 1100 for seq in range(num_seqs, 0, -1)],
    ]
    # Padding comes last: a sequence without context would be one that has no query either.
    steps = [sorted(lens, reverse=True) for lens in steps]
    problems = [
        decode_problem(
            lens,
            target,
            block_size=64,
            head_dim=64,
            num_padding_tokens=lens.count(0),
            seed=step,
        )
        for step, lens in enumerate(steps)
    ]
    width = max(problem.metadata.block_table.shape[1] for problem in problems)
    num_blocks = max(len(problem.kv_cache.key) for problem in problems)
    first = problems[0]
    key, value = (
        torch.full((num_blocks, *half.shape[1:]), float("nan"), dtype=half.dtype, device="cuda")
        for half in first.kv_cache[:2]
    )
    table = torch.full((num_seqs, width), -1, dtype=torch.int32, device="cuda")
    metadata = dataclasses.replace(first.metadata, block_table=table, max_context_len=6000)
    static = dataclasses.replace(
        first,
        query=first.query.clone(),
        kv_cache=LayerKVCache(key, value),
        metadata=metadata,
    )

    def fill(problem: Problem) -> None:
        static.query.copy_(problem.query)
        for buffer, fresh in zip(static.kv_cache[:2], problem.kv_cache[:2], strict=True):
            buffer.fill_(float("nan"))
            buffer[: len(fresh)].copy_(fresh)
        table.fill_(-1)
        table[:, : problem.metadata.block_table.shape[1]].copy_(problem.metadata.block_table)
        metadata.cu_seqlens_q.copy_(problem.metadata.cu_seqlens_q)
        metadata.context_lens.copy_(problem.metadata.context_lens)

    fill(first)
    static.run("triton")  # compiles, which must not happen while capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = static.run("triton")
    for problem in (*problems, problems[1]):
        fill(problem)
        output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expected = problem.expected()
        assert_close(output, expected, rtol=0, atol=ATOL[target.dtype])
        assert_same_bits(output, static.run("triton"))
