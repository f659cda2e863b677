"""Times sampling from logits in all its variants, and log-probabilities.

Examples:
    python benchmarks/kernels/bench_sampling.py --check
    python benchmarks/kernels/bench_sampling.py --cases "256 rows"
    python benchmarks/kernels/bench_sampling.py --device cpu --dtype float32 --rows 4

Logits are those of a language model in shape: a few tokens stand out and the rest is a broad hump,
so that top-p keeps tens of tokens. "flat" cases keep most of the vocabulary, which is the worst
that can happen to top-p. "sort" is top-p as it is usually written, with torch's sort, and "softmax
and multinomial" a draw by temperature alone.

On CUDA a time is the median over replays of a graph of calls, divided by their number. The calls
take turns among logits that together are far larger than the L2 cache. The floor is the time to
read the logits once at the given peak rate (that of an H200). The check compares tokens with those
of the PyTorch reference, of which near ties may fall differently: at most one row in fifty.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from command_line import DTYPES, make_parser, write
from timing import median_us

from nv_kernels import LogitAdjustments, TokenFilters, sample_tokens, token_logprobs

if TYPE_CHECKING:
    from torch import Tensor

ROTATION_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One variant of sampling; times are what is expected of 256 rows of 151,936 on an H200."""

    name: str
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    adjusts: frozenset[str] = field(default_factory=frozenset)
    num_top: int | None = None
    is_flat: bool = False
    baseline: str | None = None
    must_us: float | None = None
    aim_us: float | None = None


CASES = [
    Case(name="temperature", must_us=60, aim_us=20),
    Case(name="top-k 20", top_k=20),
    Case(name="top-p 0.95", top_p=0.95),
    Case(name="min-p 0.05", min_p=0.05),
    Case(name="top-k 20, top-p 0.95", top_k=20, top_p=0.95),
    Case(name="top-p 0.95, flat", top_p=0.95, is_flat=True),
    Case(name="penalties", adjusts=frozenset({"penalties"})),
    Case(name="bias", adjusts=frozenset({"bias"})),
    Case(name="mask", adjusts=frozenset({"mask"})),
    Case(
        name="all of them",
        top_k=20,
        top_p=0.95,
        adjusts=frozenset({"penalties", "bias", "mask"}),
    ),
    Case(name="log-probabilities, top 0", num_top=0),
    Case(name="log-probabilities, top 20", num_top=20),
    Case(name="softmax and multinomial", baseline="multinomial"),
    Case(name="sort, top-p 0.95", top_p=0.95, baseline="sort"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What the calls of a case read."""

    logits: list[Tensor]
    temperatures: Tensor
    seeds: Tensor
    positions: Tensor
    adjustments: LogitAdjustments | None
    filters: TokenFilters | None


def main() -> int:
    """Runs the command line; returns the exit status, 1 if a check failed or a goal was missed."""
    options = parse_arguments()
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    all_good = True
    write(HEADER)
    for num_rows in options.rows:
        for case in CASES:
            name = f"{num_rows} rows, {case.name}"
            if options.cases and not any(wanted in name for wanted in options.cases):
                continue
            problem = make_problem(case, num_rows, options.vocab_size, device, dtype)
            step = partial(run, case, problem, backend=options.backend)
            wrong = ""
            if options.check and case.baseline is None and case.num_top is None:
                ours, theirs = step(0), run(case, problem, 0, backend="torch")
                num_wrong = int((ours != theirs).sum())
                wrong = f"{num_wrong} differ"
                all_good &= num_wrong <= max(1, num_rows // 50)
            micros = median_us(step, len(problem.logits), device, options.repeats)
            floor = num_rows * options.vocab_size * dtype.itemsize / options.peak_tb_per_s / 1e6
            verdict = ""
            if case.must_us and case.aim_us and num_rows == 256 and device.type == "cuda":
                is_met = micros <= case.must_us
                verdict = "aim met" if micros <= case.aim_us else "ok" if is_met else "TOO SLOW"
                all_good &= is_met or not options.check
            write(f"{name:42} {micros:9.1f} {floor:9.1f} {verdict:9} {wrong}")
    return 0 if all_good else 1


HEADER = f"{'case':42} {'us':>9} {'floor us':>9}"


def run(case: Case, problem: Problem, call: int, *, backend: str) -> Tensor:
    """Samples from the logits whose turn it is."""
    logits = problem.logits[call % len(problem.logits)]
    if case.baseline == "multinomial":
        scores = logits.float() / problem.temperatures[:, None]
        return scores.softmax(dim=-1).multinomial(1)[:, 0]
    if case.baseline == "sort":
        return sample_by_sorting(logits, problem.temperatures, case.top_p)
    if case.num_top is not None:
        return token_logprobs(
            logits, problem.positions, num_top=case.num_top, backend=backend
        ).logprobs
    return sample_tokens(
        logits,
        problem.temperatures,
        problem.seeds,
        problem.positions,
        adjustments=problem.adjustments,
        filters=problem.filters,
        backend=backend,
    )


def sample_by_sorting(logits: Tensor, temperatures: Tensor, top_p: float) -> Tensor:
    """Top-p as it is usually written."""
    ordered, order = (logits.float() / temperatures[:, None]).sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    is_dropped = probabilities.cumsum(dim=-1) - probabilities >= top_p
    chosen = probabilities.masked_fill(is_dropped, 0).multinomial(1)
    return order.gather(1, chosen)[:, 0]


def make_problem(
    case: Case, num_rows: int, vocab_size: int, device: torch.device, dtype: torch.dtype
) -> Problem:
    """Makes logits and everything else that a case needs, from a fixed seed."""
    torch.manual_seed(0)
    num_copies = 1
    if device.type == "cuda":
        num_copies = -(-ROTATION_BYTES // (num_rows * vocab_size * dtype.itemsize))
        num_copies = min(num_copies, 64)
    logits = []
    for _ in range(num_copies):
        values = torch.randn(num_rows, vocab_size, device=device)
        if not case.is_flat:
            # A hump around 0, and a tail of which the best stand 15 above it.
            values = 2 * values + 2 * torch.empty_like(values).exponential_()
        logits.append(values.to(dtype))

    def column(value: float, kind: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=kind, device=device)

    filters = None
    if case.top_k or case.top_p < 1 or case.min_p:
        filters = TokenFilters(
            column(case.top_k, torch.int32),
            column(case.top_p, torch.float32),
            column(case.min_p, torch.float32),
        )
    return Problem(
        logits=logits,
        temperatures=column(0.7, torch.float32),
        seeds=torch.arange(num_rows, device=device),
        positions=torch.arange(100, 100 + num_rows, device=device) % vocab_size,
        adjustments=make_adjustments(case, num_rows, vocab_size, device),
        filters=filters,
    )


def make_adjustments(
    case: Case, num_rows: int, vocab_size: int, device: torch.device
) -> LogitAdjustments | None:
    """Makes the tables that a case reads."""
    if not case.adjusts:
        return None
    penalties = counts = bias = mask = None
    if "penalties" in case.adjusts:
        is_seen = torch.rand(num_rows, vocab_size, device=device) < 0.01
        counts = is_seen.int() * torch.randint(1, 9, (num_rows, vocab_size), device=device).int()
        penalties = torch.tensor([[1.1, 0.2, 0.1]], device=device).repeat(num_rows, 1)
    if "bias" in case.adjusts:
        bias = torch.randn(num_rows, vocab_size, device=device)
    if "mask" in case.adjusts:
        size = (num_rows, -(-vocab_size // 32))
        mask = torch.randint(-(2**31), 2**31, size, device=device, dtype=torch.int64).int()
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    return LogitAdjustments(
        rows, allowed_mask=mask, logit_bias=bias, token_counts=counts, penalties=penalties
    )


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = make_parser(__doc__, check="compare with the reference; exit 1 if wrong or slow")
    parser.add_argument("--backend", default="auto", choices=["auto", "torch", "triton"])
    parser.add_argument("--rows", nargs="*", type=int, default=[256, 64, 1])
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--cases", nargs="*", help="parts of names; all cases if left out")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
