"""Times paged attention of every backend that can run, at the shapes that engines meet.

Examples:
    python benchmarks/kernels/bench_attention.py --check
    python benchmarks/kernels/bench_attention.py --cases "decode 32x843" --block-size 128
    python benchmarks/kernels/bench_attention.py --device cpu --dtype float32 --cases small --check

A case "decode BxC" is B sequences of one query token and C cached tokens; "prefill BxC" is B
prompts of C tokens; "16/8" are query heads and key heads, of 128 dimensions unless "d64" says
otherwise; "fp8" is a KV cache of e4m3 with scales; "fresh" hands over the prompts' keys and values
beside the cache, too. "decode ragged" is the 300th decode step of 256 requests whose prompts and
outputs have random lengths of 100 to 1024.

On CUDA a time is the median over replays of a graph of calls, divided by their number. The calls
take turns among caches that together are far larger than the L2 cache, so every key comes from
memory. The error is |result - expected| / |expected| against fp64, over a few sequences; what is
expected of an fp8 cache is computed from what it holds. The floor
is the time to read keys and values once, or to do the multiplications, at the given peak rates
(those of an H200).
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from command_line import DTYPES, make_parser, write
from timing import median_us

from nv_kernels import (
    AttentionMetadata,
    FreshKV,
    LayerKVCache,
    available_attention_backends,
    select_attention_backend,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_SCALES = (0.5, 2.0)
ROTATION_BYTES = 1 << 30
BLOCK_SIZES = {"flash_attn": 256, "flash_attn_3": 128}
"""Tokens per block of backends that need, or are made for, a certain size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One batch, and what is expected of it on an H200."""

    name: str
    query_lens: Sequence[int]
    context_lens: Sequence[int]
    num_heads: int
    num_kv_heads: int = 8
    head_dim: int = 128
    is_fp8: bool = False
    """Whether the cache is fp8."""
    is_fresh: bool = False
    """Whether keys and values are handed over beside the cache, too."""
    must_us: float | None = None
    """The time not to be exceeded."""
    aim_us: float | None = None
    """The time to hope for."""

    @property
    def is_decode(self) -> bool:
        """Whether memory, not arithmetic, is the limit."""
        return max(self.query_lens) == 1

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the cache for queries of a dtype."""
        return FP8 if self.is_fp8 else dtype

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that queries of a dtype must read."""
        itemsize = self.cache_dtype(dtype).itemsize
        return 2 * sum(self.context_lens) * self.num_kv_heads * self.head_dim * itemsize

    def flops(self) -> float:
        """Floating-point operations of the two products below the causal mask's diagonal."""
        pairs = sum(
            query_len * (context_len - (query_len - 1) / 2)
            for query_len, context_len in zip(self.query_lens, self.context_lens, strict=True)
        )
        return 4 * pairs * self.num_heads * self.head_dim


def make_cases() -> list[Case]:
    """Lists the cases in the order of the report."""

    def decode(
        num_seqs: int,
        context_len: int,
        num_heads: int,
        must: float | None,
        aim: float | None,
        *,
        is_fp8: bool = False,
    ) -> Case:
        return Case(
            name=f"decode {num_seqs}x{context_len} {num_heads}/8{' fp8' * is_fp8}",
            is_fp8=is_fp8,
            query_lens=[1] * num_seqs,
            context_lens=[context_len] * num_seqs,
            num_heads=num_heads,
            must_us=must,
            aim_us=aim,
        )

    def prefill(num_seqs: int, length: int, num_heads: int, must: float, aim: float) -> Case:
        """Takes its goals in TFLOP/s, counted as usual: half of the square."""
        flops = 2 * num_seqs * num_heads * length**2 * 128
        return Case(
            name=f"prefill {num_seqs}x{length} {num_heads}/8",
            query_lens=[length] * num_seqs,
            context_lens=[length] * num_seqs,
            num_heads=num_heads,
            must_us=flops / must / 1e6,
            aim_us=flops / aim / 1e6,
        )

    def small_heads(num_seqs: int, length: int, num_heads: int, *, is_fresh: bool) -> Case:
        return Case(
            name=f"prefill {num_seqs}x{length} {num_heads}/8 d64{' fresh' * is_fresh}",
            query_lens=[length] * num_seqs,
            context_lens=[length] * num_seqs,
            num_heads=num_heads,
            head_dim=64,
            is_fresh=is_fresh,
        )

    ragged = ragged_context_lens(300)
    ragged_bytes = sum(ragged) * 2 * 8 * 128 * 2
    return [
        decode(256, 843, 16, 205, 198),
        decode(256, 843, 32, 207, 199),
        decode(64, 4096, 32, 245, 238),
        decode(32, 843, 16, 33, 28),
        decode(1, 1024, 16, 10, 7),
        decode(1, 8192, 16, 16, 12),
        Case(
            name="decode ragged 16/8",
            query_lens=[1] * len(ragged),
            context_lens=ragged,
            num_heads=16,
            must_us=ragged_bytes / 3.9e6,
            aim_us=ragged_bytes / 4.2e6,
        ),
        decode(256, 843, 16, 140, 110, is_fp8=True),
        decode(64, 4096, 32, None, None, is_fp8=True),
        decode(32, 843, 16, None, None, is_fp8=True),
        decode(1, 8192, 16, None, None, is_fp8=True),
        prefill(16, 1024, 16, 300, 389),
        prefill(4, 4096, 32, 400, 576),
        small_heads(16, 1024, 16, is_fresh=False),
        small_heads(16, 1024, 16, is_fresh=True),
        small_heads(4, 4096, 32, is_fresh=False),
        small_heads(4, 4096, 32, is_fresh=True),
        Case(
            name="prefill 16x1024 16/8 fp8",
            query_lens=[1024] * 16,
            context_lens=[1024] * 16,
            num_heads=16,
            is_fp8=True,
        ),
        Case(
            name="mixed 200x843 + 2x2048 16/8",
            query_lens=[1] * 200 + [2048] * 2,
            context_lens=[843] * 200 + [2048] * 2,
            num_heads=16,
        ),
        Case(
            name="small 4x100 4/2",
            query_lens=[1, 20, 1, 1],
            context_lens=[100, 20, 50, 1],
            num_heads=4,
            num_kv_heads=2,
        ),
    ]


def ragged_context_lens(step: int) -> list[int]:
    """Context lengths of the ragged workload at one decode step, without finished sequences."""
    generator = random.Random(0)
    prompts = [generator.randint(100, 1024) for _ in range(256)]
    outputs = [generator.randint(100, 1024) for _ in range(256)]
    return [p + step for p, o in zip(prompts, outputs, strict=True) if o >= step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A case as tensors: one batch, and caches to take turns among."""

    query: Tensor
    caches: Sequence[LayerKVCache]
    fresh: Sequence[FreshKV | None]
    """The keys and values of the query's tokens in each cache, if they are handed over."""
    metadata: AttentionMetadata


def main() -> int:
    """Runs the command line; returns the exit status, 1 if a check failed."""
    options = parse_arguments()
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    cases = [
        case
        for case in make_cases()
        if (any(wanted in case.name for wanted in options.cases) if options.cases else True)
    ]
    rows: list[str] = []
    all_good = True
    for case in cases:
        for name in options.backends:
            block_size = BLOCK_SIZES.get(name, options.block_size)
            settings: dict[str, Any] = {
                "device": device,
                "dtype": dtype,
                "cache_dtype": case.cache_dtype(dtype),
                "head_dim": case.head_dim,
                "num_heads": case.num_heads,
                "num_kv_heads": case.num_kv_heads,
                "block_size": block_size,
            }
            reason = available_attention_backends(**settings)[name]
            if reason is not None:
                write(f"# {case.name}: {name} left out: {reason}")
                continue
            backend = select_attention_backend(name, **settings)
            problem = make_problem(case, block_size=block_size, device=device, dtype=dtype)
            step = partial(attend, backend.attend, problem)
            error = None
            if options.check:
                error = relative_error(step(0), problem, case)
                all_good &= error <= tolerance(dtype)
            micros = median_us(step, len(problem.caches), device, options.repeats)
            rows.append(report(case, name, micros, error, options, dtype))
            write(rows[-1])
            del problem, step
    write("")
    write(HEADER)
    for row in rows:
        write(row)
    return 0 if all_good else 1


HEADER = (
    f"{'case':30} {'backend':>12} {'us':>9} {'rate':>13} {'floor us':>9} {'must us':>8} "
    f"{'aim us':>7} {'':9} error"
)


def report(
    case: Case,
    backend: str,
    micros: float,
    error: float | None,
    options: argparse.Namespace,
    dtype: torch.dtype,
) -> str:
    """Puts one measurement into a line under `HEADER`."""
    read_us = case.kv_bytes(dtype) / options.peak_tb_per_s / 1e6
    compute_us = case.flops() / options.peak_tflop_per_s / 1e6
    if case.is_decode:
        rate = f"{case.kv_bytes(dtype) / micros / 1e6:.2f} TB/s"
    else:
        rate = f"{case.flops() / micros / 1e6:.0f} TFLOP/s"
    verdict = ""
    if backend == "triton" and case.must_us is not None and case.aim_us is not None:
        verdict = (
            "aim met" if micros <= case.aim_us else "ok" if micros <= case.must_us else "TOO SLOW"
        )
    must, aim = (f"{goal:.1f}" if goal else "" for goal in (case.must_us, case.aim_us))
    shown_error = "" if error is None else f"{error:.1e}"
    return (
        f"{case.name:30} {backend:>12} {micros:9.1f} {rate:>13} {max(read_us, compute_us):9.1f} "
        f"{must:>8} {aim:>7} {verdict:9} {shown_error}"
    )


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    on_cuda = ["triton", "flash_attn", "flash_attn_3"]
    parser = make_parser(__doc__, check="compare with fp64 first; exit 1 if wrong")
    parser.add_argument(
        "--block-size",
        type=int,
        default=64,
        help="tokens; flash_attn always gets 256, flash_attn_3 128",
    )
    parser.add_argument("--cases", nargs="*", help="parts of names; all cases if left out")
    parser.add_argument(
        "--backends",
        nargs="*",
        default=["triton", "flash_attn", "flash_attn_3"]
        if torch.cuda.is_available()
        else ["torch"],
        choices=["torch", *on_cuda],
    )
    parser.add_argument("--peak-tflop-per-s", type=float, default=790.0)
    return parser.parse_args()


def make_problem(
    case: Case, *, block_size: int, device: torch.device, dtype: torch.dtype
) -> Problem:
    """Makes random queries and caches; the blocks of a sequence lie in shuffled order."""
    cache_dtype = case.cache_dtype(dtype)
    counts = [-(-context_len // block_size) for context_len in case.context_lens]
    ends = list(accumulate(counts))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(ends[-1], generator=generator).tolist()
    metadata = AttentionMetadata.from_lists(
        case.query_lens,
        case.context_lens,
        [ids[end - count : end] for count, end in zip(counts, ends, strict=True)],
        block_size=block_size,
        device=device,
    )
    # As in a model's layers, where the kernel before writes the query, and no lengths or tables.
    metadata = replace(metadata, is_settled=True)
    # Heads before tokens, as the runtime allocates it.
    shape = (2, ends[-1], case.num_kv_heads, block_size, case.head_dim)
    num_caches = 1
    if device.type == "cuda":
        num_caches = -(-ROTATION_BYTES // (math.prod(shape) * cache_dtype.itemsize))
    torch.manual_seed(0)
    pool = torch.empty(num_caches, *shape, device=device, dtype=cache_dtype)
    for layer in pool:
        layer.copy_(torch.randn(shape, device=device, dtype=dtype))
    query_shape = (metadata.num_tokens, case.num_heads, case.head_dim)
    query = torch.randn(query_shape, device=device, dtype=dtype)
    scales = FP8_SCALES if case.is_fp8 else (1.0, 1.0)
    caches = [
        LayerKVCache(key.transpose(1, 2), value.transpose(1, 2), *scales) for key, value in pool
    ]
    slots = metadata.slot_mapping.long()
    fresh = [
        FreshKV(*(half.flatten(0, 1)[slots] for half in (cache.key, cache.value)))
        if case.is_fresh
        else None
        for cache in caches
    ]
    return Problem(query=query, caches=caches, fresh=fresh, metadata=metadata)


def attend(run: Callable[..., Tensor], problem: Problem, call: int) -> Tensor:
    """Runs a backend on the cache whose turn it is."""
    turn = call % len(problem.caches)
    scale = problem.query.shape[2] ** -0.5
    return run(
        problem.query,
        problem.caches[turn],
        problem.metadata,
        scale=scale,
        fresh=problem.fresh[turn],
    )


def relative_error(actual: Tensor, problem: Problem, case: Case) -> float:
    """Compares a few sequences of the first cache with the formula in fp64; returns the worst."""
    starts = [0, *accumulate(case.query_lens)]
    group = case.num_heads // case.num_kv_heads
    num_seqs = len(case.context_lens)
    worst = 0.0
    for seq in sorted({0, num_seqs // 2, num_seqs - 1}):
        rows, length = slice(starts[seq], starts[seq + 1]), case.context_lens[seq]
        num_queries = case.query_lens[seq]
        blocks = problem.metadata.block_table[seq].clamp(min=0)
        keys, values = dequantised(problem.caches[0], blocks, length)
        visible = torch.ones(num_queries, length, dtype=torch.bool, device=actual.device)
        visible = visible.tril(length - num_queries)
        for head in range(case.num_heads):
            kv_head = head // group
            scores = problem.query[rows, head].double() @ keys[:, kv_head].T
            weights = (
                (scores * case.head_dim**-0.5).masked_fill(~visible, -math.inf).softmax(dim=-1)
            )
            expected = weights @ values[:, kv_head]
            difference = actual[rows, head].double() - expected
            error = float(difference.norm() / expected.norm())
            worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def dequantised(cache: LayerKVCache, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence in fp64, [length, num_kv_heads, head_dim] each."""
    key, value, k_scale, v_scale = cache
    wide = (torch.stack([half[int(block)].double() for block in blocks]) for half in (key, value))
    keys, values = (half.flatten(0, 1)[:length] for half in wide)
    return keys * k_scale, values * v_scale


def tolerance(dtype: torch.dtype) -> float:
    """Allows for two roundings to the dtype, and for fp32 sums of another order."""
    return max(torch.finfo(dtype).eps, 1e-5)


if __name__ == "__main__":
    sys.exit(main())
