"""The kernel for prompts on Hopper, which no interpreter runs, against an fp64 loop."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch

from attention_problems import ATOL, Problem, metadata_of
from kernel_oracles import (
    HAS_CUDA,
    HAS_TRITON,
    Batch,
    Target,
    assert_close,
    assert_same_bits,
    attention_oracle,
    make_batch,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def on_hopper(test: Callable[..., None]) -> Callable[..., None]:
    has_hopper = HAS_CUDA and torch.cuda.get_device_capability()[0] == 9
    skip = pytest.mark.skipif(not has_hopper, reason="needs a Hopper GPU")
    marked: Callable[..., None] = pytest.mark.gpu(skip(test))
    return marked


# Whole prompts and later chunks, around the tiles of 128 keys, between decode steps.
MIXED = ((130, 130), (1, 20), (64, 200), (3, 128), (2, 2), (65, 65), (1, 1), (127, 384), (5, 129))


def make_problem(
    lens: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    block_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    num_padding_tokens: int = 0,
    seed: int = 0,
    layout: str = "head_major",
    head_dim: int = 128,
    device: str = "cuda",
) -> Problem:
    batch = make_batch(lens, block_size, num_padding_tokens=num_padding_tokens, seed=seed)
    return Problem.make(
        batch,
        Target("triton", device, dtype),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        layouts=(layout, layout),
        seed=seed,
    )


def is_for_hopper(problem: Problem) -> bool:
    from nv_kernels.triton.hopper_prefill_attention import can_attend_to_prompts

    return can_attend_to_prompts(problem.query, problem.kv_cache)


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_blocks(block_size: int, dtype: torch.dtype) -> None:
    problem = make_problem(MIXED, block_size=block_size, dtype=dtype)
    assert is_for_hopper(problem)
    problem.check("triton")


@on_hopper
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (4, 2), (4, 1), (16, 2), (64, 1), (16, 8)])
def test_groups(heads: tuple[int, int]) -> None:
    problem = make_problem(((70, 70), (9, 150), (1, 5)), heads=heads)
    assert is_for_hopper(problem)
    problem.check("triton")


@on_hopper
@pytest.mark.parametrize("num_padding_tokens", [0, 1, 64, 200])
def test_padding(num_padding_tokens: int) -> None:
    """Empty sequences anywhere, queries before the context, and tokens of no sequence."""
    lens = ((0, 0), (70, 70), (0, 0), (5, 3), (2, 0), (130, 100), (0, 0))
    problem = make_problem(lens, num_padding_tokens=num_padding_tokens)
    assert is_for_hopper(problem)
    problem.check("triton")
    result = problem.run("triton")
    assert not bool(result[problem.batch.query_starts[-1] :].any())


@on_hopper
def test_many_sequences() -> None:
    """A result may not depend on the rest of the batch."""
    lens = ((300, 300), (1, 7), (40, 40)) * 12
    problem = make_problem(lens, heads=(4, 2))
    problem.check("triton")
    together = problem.run("triton")
    for seq in (0, 2, 35):
        rows = slice(problem.batch.query_starts[seq], problem.batch.query_starts[seq + 1])
        table = problem.batch.block_tables[seq : seq + 1]
        alone = Batch(lens[seq : seq + 1], 64, table, problem.batch.num_blocks)
        result = Problem(
            alone,
            problem.query[rows],
            problem.kv_cache,
            metadata_of(alone, "cuda"),
            problem.scale,
        ).run("triton")
        assert_same_bits(result, together[rows])


@on_hopper
def test_chunks_equal_the_whole_prompt_to_the_last_bit() -> None:
    length = 400
    problem = make_problem(((length, length),))
    whole = problem.run("triton")
    for cuts in ((0, 128, 256, 400), (0, 100, 102, 399), (0, 2, 131, 398)):
        for start, end in pairwise(cuts):
            part = Batch(
                ((end - start, end),), 64, problem.batch.block_tables, problem.batch.num_blocks
            )
            result = Problem(
                part,
                problem.query[start:end],
                problem.kv_cache,
                metadata_of(part, "cuda"),
                problem.scale,
            ).run("triton")
            assert_same_bits(result, whole[start:end])


@on_hopper
def test_captured_graph_replays_another_batch() -> None:
    """The list of tiles is made anew in every replay, though it was there before the capture."""
    torch.use_deterministic_algorithms(mode=False)  # filling fresh memory would hide in the capture
    first = make_problem(((130, 130), (1, 300), (20, 77), (9, 9)))
    first.check("triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = first.run("triton")
    second = make_problem(((4, 300), (66, 70), (77, 77), (0, 0)), num_padding_tokens=13, seed=5)
    assert second.batch.num_tokens == first.batch.num_tokens
    for buffer, fresh in (
        (first.query, second.query),
        (first.kv_cache.key, second.kv_cache.key),
        (first.kv_cache.value, second.kv_cache.value),
    ):
        buffer[: len(fresh)].copy_(fresh[: len(buffer)])
    for name in ("cu_seqlens_q", "context_lens", "block_table", "slot_mapping"):
        getattr(first.metadata, name).copy_(getattr(second.metadata, name))
    graph.replay()
    torch.cuda.synchronize()
    expected = attention_oracle(
        second.query, second.kv_cache.key, second.kv_cache.value, second.batch, second.scale
    )
    assert_close(output, expected, rtol=0, atol=ATOL[torch.bfloat16])


TAKEN: list[dict[str, object]] = [
    {},
    {"dtype": torch.float16, "heads": (64, 1)},
    {"block_size": 16, "heads": (1, 1)},
    {"block_size": 384},
    {"heads": (2, 1), "layout": "contiguous"},  # of one head: its tokens are adjacent
]
REFUSED: list[dict[str, object]] = [
    {"head_dim": 64},
    {"heads": (6, 2)},
    {"heads": (128, 1)},
    {"block_size": 48},
    {"block_size": 8},
    {"dtype": torch.float32},
    {"layout": "contiguous"},
    {"layout": "padded"},
]


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_what_it_takes() -> None:
    lens = ((70, 70), (9, 150), (1, 5))
    for options in TAKEN:
        assert is_for_hopper(make_problem(lens, device="cpu", **options)), options  # type: ignore[arg-type]
    for options in REFUSED:
        assert not is_for_hopper(make_problem(lens, device="cpu", **options)), options  # type: ignore[arg-type]


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_copies_start_at_multiples_of_16_bytes() -> None:
    problem = make_problem(((70, 70),), device="cpu")
    wide = torch.zeros(70, 4, 136, dtype=torch.bfloat16)
    for first, taken in ((0, True), (8, True), (4, False)):
        query = wide[:, :, first : first + 128]
        assert is_for_hopper(replace(problem, query=query)) == taken
    odd = torch.zeros(70, 4, 129, dtype=torch.bfloat16)[:, :, :128]
    assert not is_for_hopper(replace(problem, query=odd))


@on_hopper
@pytest.mark.parametrize("options", TAKEN + REFUSED)
def test_the_right_kernel_takes_it(options: dict[str, object]) -> None:
    make_problem(((70, 70), (9, 150), (1, 5)), **options).check("triton")  # type: ignore[arg-type]
