"""Times the operator between projection and attention, with a cache of the dtype and one of fp8.

Examples:
    python benchmarks/kernels/bench_rotate_and_store.py --check
    python benchmarks/kernels/bench_rotate_and_store.py --device cpu --dtype float32 --rows 4

The shape is that of Qwen3-0.6B: 16 query heads and 8 key heads of 128 dimensions, queries and keys
normalised. On CUDA a time is the median over replays of a graph of calls, divided by their number.
The check compares with the PyTorch reference: queries to two roundings of the dtype, cached ones to
the distance of neighbours in the cache's dtype. A rotated element is as exact as the longer of the
two that it was made of, which may have cancelled out; so its error is taken against the length of
the pair, which rotation keeps.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from command_line import DTYPES, make_parser, write
from timing import median_us

from nv_kernels import rotate_and_store

if TYPE_CHECKING:
    from torch import Tensor

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 64
FP8 = torch.float8_e4m3fn
FP8_SCALES = (0.5, 2.0)
MUST_US = {256: 6.0}
"""By the number of tokens; on an H200."""
NUM_INPUTS = 8


class Problem(NamedTuple):
    """The arguments of the calls, which take turns among several projections."""

    qkv: Tensor
    positions: Tensor
    cos_sin: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slots: Tensor
    weights: Tensor
    scales: tuple[float, float]


def main() -> int:
    """Runs the command line; returns the exit status, 1 if a check failed."""
    options = parse_arguments()
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    all_good = True
    write(f"{'tokens':>6} {'cache':>9} {'us':>8} {'must us':>8}  error")
    for num_tokens in options.rows:
        for cache_dtype in (dtype, FP8):
            problem = make_problem(num_tokens, device=device, dtype=dtype, cache_dtype=cache_dtype)
            error = ""
            if options.check:
                worst = largest_error(problem)
                all_good &= worst <= 1
                error = f"{worst:.2f} of what is allowed"
            micros = median_us(partial(call, problem), NUM_INPUTS, device, options.repeats)
            must = MUST_US.get(num_tokens)
            shown = str(cache_dtype).removeprefix("torch.").replace("float8_e4m3fn", "fp8")
            write(f"{num_tokens:6} {shown:>9} {micros:8.2f} {must or '':>8}  {error}")
    return 0 if all_good else 1


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = make_parser(__doc__, check="compare with the reference; exit 1 if wrong")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 32, 256, 8192], help="tokens")
    return parser.parse_args()


def make_problem(
    num_tokens: int, *, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype
) -> Problem:
    """Makes random projections, and an empty cache whose slots they fill in shuffled order."""
    generator = torch.Generator().manual_seed(num_tokens)
    num_all_heads = NUM_HEADS + 2 * NUM_KV_HEADS
    qkv = torch.randn(NUM_INPUTS, num_tokens, num_all_heads, HEAD_DIM, generator=generator)
    angles = torch.randn(4096, HEAD_DIM // 2, generator=generator)
    weights = 1 + torch.randn(2, HEAD_DIM, generator=generator) / 10
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    shape = (2, num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    key, value = torch.zeros(shape, dtype=cache_dtype, device=device).transpose(2, 3)
    slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=generator)[:num_tokens]
    return Problem(
        qkv=qkv.to(device, dtype),
        positions=torch.randint(4096, (num_tokens,), generator=generator).to(device),
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=1).to(device),
        key_cache=key,
        value_cache=value,
        slots=slots.to(device, torch.int32),
        weights=weights.to(device, dtype),
        scales=FP8_SCALES if cache_dtype == FP8 else (1.0, 1.0),
    )


def call(problem: Problem, number: int, backend: str = "auto") -> Tensor:
    """Makes one call; returns the queries."""
    return rotate_and_store(
        problem.qkv[number % NUM_INPUTS],
        problem.positions,
        problem.cos_sin,
        problem.key_cache,
        problem.value_cache,
        problem.slots,
        query_weight=problem.weights[0],
        key_weight=problem.weights[1],
        eps=1e-6,
        k_scale=problem.scales[0],
        v_scale=problem.scales[1],
        is_settled=True,  # as in a model's layers
        backend=backend,
    )


def largest_error(problem: Problem) -> float:
    """Compares one call with the reference; returns the worst error over what is allowed."""
    reference = problem._replace(
        key_cache=problem.key_cache.clone(), value_cache=problem.value_cache.clone()
    )
    worst = 0.0
    for actual, expected, is_rotated in (
        (call(problem, 0), call(reference, 0, backend="torch"), True),
        (problem.key_cache, reference.key_cache, True),
        (problem.value_cache, reference.value_cache, False),
    ):
        eps = max(torch.finfo(actual.dtype).eps, 2 * torch.finfo(problem.qkv.dtype).eps)
        wide = expected.double()
        size = wide.abs()
        if is_rotated:
            length = torch.hypot(*wide.chunk(2, dim=-1))
            size = torch.cat((length, length), dim=-1)
        error = (actual.double() - wide).abs() / (eps * size.clamp(min=2.0**-6))
        worst = max(worst, float(error.nan_to_num(torch.inf).max()))
    return worst


if __name__ == "__main__":
    sys.exit(main())
