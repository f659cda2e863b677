"""Times paged attention of every backend that can run, at the shapes of a model.

Examples:
    python benchmarks/kernels/bench_attention.py
    python benchmarks/kernels/bench_attention.py --device cpu --dtype float32 --check
    python benchmarks/kernels/bench_attention.py --decode 64x1024 --prefill 1x4096 --block-size 256

A decode case BxC is B sequences of one query token and C cached tokens; a prefill case BxC is B
prompts of C tokens. Times are medians over repeats with a cold L2 cache; "GB/s" counts the keys
and values that a decode step must read, once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from nv_kernels import (
    AttentionMetadata,
    LayerKVCache,
    available_attention_backends,
    select_attention_backend,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
L2_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's attention and where it runs."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One batch of equal sequences."""

    kind: str
    num_seqs: int
    context_len: int

    @property
    def query_len(self) -> int:
        """Query tokens of each sequence."""
        return 1 if self.kind == "decode" else self.context_len


def main() -> int:
    """Runs the command line; returns the exit status, 1 if a check failed."""
    options = parse_arguments()
    shape = Shape(
        device=torch.device(options.device),
        dtype=DTYPES[options.dtype],
        num_heads=options.num_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        block_size=options.block_size,
    )
    settings = {name: getattr(shape, name) for name in Shape.__slots__}
    reasons = available_attention_backends(**settings)
    for name, reason in reasons.items():
        if reason is not None:
            write(f"# {name} left out: {reason}")
    names = [name for name, reason in reasons.items() if reason is None]
    cases = [
        Case(kind=kind, num_seqs=num_seqs, context_len=context_len)
        for kind, pairs in (("decode", options.decode), ("prefill", options.prefill))
        for num_seqs, context_len in pairs
    ]
    write(f"{'kind':8} {'seqs':>5} {'context':>8} {'backend':>11} {'us':>10} {'GB/s':>8}  check")
    all_good = True
    for case in cases:
        query, kv_cache, metadata = make_inputs(case, shape)
        for name in names:
            backend = select_attention_backend(name, **settings)
            step = partial(backend.attend, query, kv_cache, metadata, scale=shape.head_dim**-0.5)
            verdict = ""
            if options.check:
                error = max_error(step(), query, kv_cache, metadata)
                good = error <= tolerance(shape.dtype)
                verdict = f"{'ok' if good else 'WRONG'} (max error {error:.1e})"
                all_good &= good
            micros = median_us(step, shape.device, options.repeats)
            speed = "" if case.kind != "decode" else f"{kv_bytes(case, shape) / micros / 1e3:.0f}"
            write(
                f"{case.kind:8} {case.num_seqs:5} {case.context_len:8} {name:>11} "
                f"{micros:10.1f} {speed:>8}  {verdict}"
            )
    return 0 if all_good else 1


def parse_arguments() -> argparse.Namespace:
    """Reads the command line; the defaults are Qwen3-0.6B on the best device present."""
    on_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if on_cuda else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if on_cuda else "float32")
    parser.add_argument("--num-heads", type=int, default=16)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--block-size", type=int, default=16, help="tokens; flash_attn needs a multiple of 256"
    )
    parser.add_argument(
        "--decode",
        type=parse_case,
        nargs="*",
        metavar="BxC",
        default=[(1, 1024), (32, 1024), (256, 1024)] if on_cuda else [(1, 512), (8, 512)],
    )
    parser.add_argument(
        "--prefill",
        type=parse_case,
        nargs="*",
        metavar="BxC",
        default=[(16, 1024), (1, 8192)] if on_cuda else [(1, 512)],
    )
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument(
        "--check", action="store_true", help="compare with fp32 PyTorch first; exit 1 if wrong"
    )
    return parser.parse_args()


def parse_case(text: str) -> tuple[int, int]:
    """Reads "BxC" as (number of sequences, context length)."""
    num_seqs, separator, context_len = text.partition("x")
    if not (separator and num_seqs.isdigit() and context_len.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form BxC, such as 32x1024")
    if not (int(num_seqs) and int(context_len)):
        raise argparse.ArgumentTypeError(f"{text!r} has a zero; both numbers start at 1")
    return int(num_seqs), int(context_len)


def make_inputs(case: Case, shape: Shape) -> tuple[Tensor, LayerKVCache, AttentionMetadata]:
    """Makes random queries and a random cache whose blocks lie in shuffled order."""
    blocks_per_seq = -(-case.context_len // shape.block_size)
    num_blocks = case.num_seqs * blocks_per_seq
    generator = torch.Generator().manual_seed(0)
    tables = torch.randperm(num_blocks, generator=generator).view(case.num_seqs, -1).tolist()
    metadata = AttentionMetadata.from_lists(
        [case.query_len] * case.num_seqs,
        [case.context_len] * case.num_seqs,
        tables,
        block_size=shape.block_size,
        device=shape.device,
    )
    torch.manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=shape.device, dtype=shape.dtype)

    cache_shape = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    kv_cache = LayerKVCache(random(*cache_shape), random(*cache_shape))
    query = random(case.num_seqs * case.query_len, shape.num_heads, shape.head_dim)
    return query, kv_cache, metadata


def max_error(
    actual: Tensor, query: Tensor, kv_cache: LayerKVCache, metadata: AttentionMetadata
) -> float:
    """Compares with the matrix formula in fp32, sequence by sequence."""
    worst = 0.0
    group = query.shape[1] // kv_cache.key.shape[2]
    starts, lengths = metadata.cu_seqlens_q.tolist(), metadata.context_lens.tolist()
    for seq, length in enumerate(lengths):
        rows = slice(starts[seq], starts[seq + 1])
        blocks = metadata.block_table[seq]
        keys, values = (
            cache[blocks].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
            for cache in kv_cache
        )
        num_queries = rows.stop - rows.start
        visible = torch.ones(num_queries, length, dtype=torch.bool, device=query.device)
        visible = visible.tril(length - num_queries)
        for head in range(query.shape[1]):
            scores = query[rows, head].float() @ keys[:, head].T * query.shape[2] ** -0.5
            weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
            error = (weights @ values[:, head] - actual[rows, head].float()).abs().max().item()
            worst = max(worst, error)
    return worst


def tolerance(dtype: torch.dtype) -> float:
    """Allows two roundings of values under 5 to the dtype, and fp32 sums of different order."""
    return max(5 * torch.finfo(dtype).eps, 2e-5)


def kv_bytes(case: Case, shape: Shape) -> int:
    """Counts the bytes of keys and values that the batch reads."""
    tokens = case.num_seqs * case.context_len
    return 2 * tokens * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize


def median_us(step: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Times a step, after three unmeasured ones."""
    for _ in range(3):
        step()
    if device.type != "cuda":
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds) * 1e6
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device=device)
    timers = [(cuda_timer(), cuda_timer()) for _ in range(repeats)]
    for before, after in timers:
        flush.zero_()
        before.record()
        step()
        after.record()
    torch.cuda.synchronize(device)
    times = [float(before.elapsed_time(after)) * 1e3 for before, after in timers]
    return statistics.median(times)


def cuda_timer() -> torch.cuda.Event:
    """Makes an event that notes the time when the stream reaches it."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def write(line: str) -> None:
    """Writes a line of the report at once, so that a long run can be watched."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
