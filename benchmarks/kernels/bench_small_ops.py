"""Times the kernels between attention and the products: norms, activation, rotation, store, state.

Examples:
    python benchmarks/kernels/bench_small_ops.py --check
    python benchmarks/kernels/bench_small_ops.py --model qwen3-8b --rows 1 256
    python benchmarks/kernels/bench_small_ops.py --device cpu --dtype float32 --rows 4

On CUDA a time is the median over replays of a graph of calls, divided by their number. The calls
take turns among a few inputs, which lie in the L2 cache as they do in a decode step, where the
kernel before has just written them; from a few thousand rows on they come from memory. "torch" is
the reference, a kernel of PyTorch's per operator. The floor is the time to read and write every
element once, at the memory's rate.

The check compares floats with the formula in fp64, relative to the size of the whole result, and
whole numbers exactly with the reference.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from command_line import DTYPES, make_parser, write
from timing import median_us

from nv_kernels import (
    StateColumns,
    add_rms_norm,
    advance_decode_state,
    read_decode_state,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
    store_kv,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

EPS = 1e-6
NUM_INPUTS = 8
BLOCK_SIZE = 64
COLUMNS = StateColumns(token=0, length=1, is_active=2, first_block=4)
STATE_WIDTH = 20
NUM_STATE_ROWS = 257


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a model's shape these kernels see."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int = 8
    head_dim: int = 128


MODELS = {
    "qwen3-0.6b": Shape(hidden_size=1024, intermediate_size=3072, num_heads=16),
    "qwen3-8b": Shape(hidden_size=4096, intermediate_size=12288, num_heads=32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One op at one size."""

    name: str
    run: Callable[[int, str], object]
    """Makes the call of a number, with a backend."""
    num_bytes: int
    """Read and written, each element once."""
    error: Callable[[], float]
    """Compares the first call with what is right; a share of the result's size."""
    reference_waits: bool = False
    """Whether the host waits for the device in the reference, which no graph can hold."""


class Inputs:
    """Random tensors of one number of rows, and the ops that take them."""

    def __init__(self, rows: int, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.rows, self.shape, self.device, self.dtype = rows, shape, device, dtype
        self.generator = torch.Generator(device).manual_seed(rows)

    def random(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draws a tensor from the normal distribution."""
        drawn = torch.randn(*sizes, generator=self.generator, device=self.device)
        return drawn.to(self.dtype if dtype is None else dtype)

    def cases(self) -> list[Case]:
        """Lists the ops."""
        return [
            self.norm(),
            self.add_norm(num_parts=1),
            self.add_norm(num_parts=8),
            self.activation(),
            self.rotation(),
            self.store(),
            *self.state(),
        ]

    def norm(self) -> Case:
        """RMSNorm alone."""
        x = self.random(NUM_INPUTS, self.rows, self.shape.hidden_size)
        weight = self.random(self.shape.hidden_size)

        def run(call: int, backend: str) -> Tensor:
            return rms_norm(x[call % NUM_INPUTS], weight, eps=EPS, backend=backend)

        return Case(
            name="rms_norm",
            run=run,
            num_bytes=2 * x[0].nbytes + weight.nbytes,
            error=lambda: relative_error(run(0, "auto"), exact_norm(x[0].double(), weight)),
        )

    def add_norm(self, num_parts: int) -> Case:
        """The sum of a product's fp32 parts (or the product itself), a residual, and the norm."""
        sizes = (NUM_INPUTS, num_parts, self.rows, self.shape.hidden_size)
        parts = self.random(*sizes, dtype=self.dtype if num_parts == 1 else torch.float32)
        residual = self.random(NUM_INPUTS, self.rows, self.shape.hidden_size)
        weight = self.random(self.shape.hidden_size)

        def run(call: int, backend: str) -> tuple[Tensor, Tensor]:
            turn = call % NUM_INPUTS
            return add_rms_norm(parts[turn], residual[turn], weight, eps=EPS, backend=backend)

        def error() -> float:
            output, total = run(0, "auto")
            summed = parts[0].double().sum(dim=0) + residual[0].double()
            # The norm is of the sum as it is stored.
            return max(
                relative_error(total, summed),
                relative_error(output, exact_norm(total.double(), weight)),
            )

        return Case(
            name=f"add_rms_norm, {num_parts} part{'s' * (num_parts > 1)}",
            run=run,
            num_bytes=parts[0].nbytes + 3 * residual[0].nbytes + weight.nbytes,
            error=error,
        )

    def activation(self) -> Case:
        """SiLU of one half, times the other."""
        gate_up = self.random(NUM_INPUTS, self.rows, 2 * self.shape.intermediate_size)

        def run(call: int, backend: str) -> Tensor:
            return silu_and_mul(gate_up[call % NUM_INPUTS], backend=backend)

        def error() -> float:
            gate, up = gate_up[0].double().chunk(2, dim=-1)
            return relative_error(run(0, "auto"), gate * gate.sigmoid() * up)

        return Case(name="silu_and_mul", run=run, num_bytes=gate_up[0].nbytes * 3 // 2, error=error)

    def rotation(self) -> Case:
        """Rotary embedding of query and key heads."""
        shape = self.shape
        query = self.random(NUM_INPUTS, self.rows, shape.num_heads, shape.head_dim)
        key = self.random(NUM_INPUTS, self.rows, shape.num_kv_heads, shape.head_dim)
        positions = torch.arange(self.rows, device=self.device) * 37 % 4096
        angles = self.random(4096, shape.head_dim // 2, dtype=torch.float32)
        table = torch.cat((angles.cos(), angles.sin()), dim=1)

        def run(call: int, backend: str) -> tuple[Tensor, Tensor]:
            turn = call % NUM_INPUTS
            return rotary_embedding(query[turn], key[turn], positions, table, backend=backend)

        def error() -> float:
            cos, sin = table[positions][:, None].double().chunk(2, dim=-1)
            errors = []
            for heads, rotated in zip((query[0], key[0]), run(0, "auto"), strict=True):
                x, y = heads.double().chunk(2, dim=-1)
                exact = torch.cat((x * cos - y * sin, y * cos + x * sin), dim=-1)
                errors.append(relative_error(rotated, exact))
            return max(errors)

        moved = 2 * (query[0].nbytes + key[0].nbytes)
        return Case(
            name="rotary_embedding",
            run=run,
            num_bytes=moved + self.rows * table[0].nbytes,
            error=error,
        )

    def store(self) -> Case:
        """Keys and values into their slots."""
        sizes = (self.rows, self.shape.num_kv_heads, self.shape.head_dim)
        key, value = self.random(2, NUM_INPUTS, *sizes)
        num_blocks = -(-self.rows // BLOCK_SIZE)
        pool = torch.zeros(2, num_blocks, BLOCK_SIZE, *sizes[1:], device=self.device).to(self.dtype)
        slots = torch.randperm(num_blocks * BLOCK_SIZE, device=self.device)[: self.rows].int()
        key_cache, value_cache = pool

        def run(call: int, backend: str) -> None:
            turn = call % NUM_INPUTS
            store_kv(key[turn], value[turn], key_cache, value_cache, slots, backend=backend)

        def error() -> float:
            run(0, "auto")
            return max(
                relative_error(cache.flatten(0, 1)[slots], given[0].double())
                for cache, given in zip(pool, (key, value), strict=True)
            )

        return Case(
            name="store_kv",
            run=run,
            num_bytes=4 * key[0].nbytes,
            error=error,
            reference_waits=True,
        )

    def state(self) -> list[Case]:
        """What stands between two decode steps; of as many rows as a batch of decode steps has."""
        if self.rows >= NUM_STATE_ROWS:
            return []
        rows = torch.ones(NUM_STATE_ROWS, STATE_WIDTH, dtype=torch.int32, device=self.device)
        rows[:, COLUMNS.length] = 300
        batch = torch.randperm(NUM_STATE_ROWS, device=self.device)[: self.rows].int()
        token_ids = torch.arange(self.rows, device=self.device)

        def read(_: int, backend: str) -> tuple[Tensor, ...]:
            return read_decode_state(
                rows,
                batch,
                columns=COLUMNS,
                width=STATE_WIDTH,
                block_size=BLOCK_SIZE,
                backend=backend,
            )

        def advance(_: int, backend: str, state: Tensor = rows) -> Tensor:
            return advance_decode_state(
                state, batch, token_ids, columns=COLUMNS, advances_length=False, backend=backend
            )

        def read_error() -> float:
            pairs = zip(read(0, "auto"), read(0, "torch"), strict=True)
            return float(not all(torch.equal(actual, expected) for actual, expected in pairs))

        def advance_error() -> float:
            states = rows.clone(), rows.clone()
            for state, backend in zip(states, ("auto", "torch"), strict=True):
                advance(0, backend, state)
            return float(not torch.equal(*states))

        read_bytes = 2 * self.rows * STATE_WIDTH * 4 + self.rows * (3 * 8 + 3 * 4)
        return [
            Case(name="read_decode_state", run=read, num_bytes=read_bytes, error=read_error),
            Case(
                name="advance_decode_state",
                run=advance,
                num_bytes=self.rows * (4 + 8 + 8 + 3 * 4),
                error=advance_error,
            ),
        ]


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in fp64."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS) * weight.double()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|."""
    return float((actual.double() - expected).norm() / expected.norm())


def main() -> int:
    """Runs the command line; returns the exit status, 1 if a check failed."""
    options = parse_arguments()
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    all_good = True
    write(f"{options.model}, {options.dtype}, microseconds per call")
    write(f"{'rows':>6} {'op':24} {'ours':>8} {'torch':>8} {'floor':>8}  error")
    for rows in options.rows:
        for case in Inputs(rows, MODELS[options.model], device, dtype).cases():
            shown = ""
            if options.check:
                error = case.error()
                # Twice rounded, at most: by the norm and by its weight.
                all_good &= error <= 2 * torch.finfo(dtype).eps
                shown = f"{error:.1e}"
            ours, reference = (
                median_us(
                    partial(call_with, case.run, backend), NUM_INPUTS, device, options.repeats
                )
                if backend == "auto" or not (case.reference_waits and device.type == "cuda")
                else None
                for backend in ("auto", "torch")
            )
            beside = "" if reference is None else f"{reference:.2f}"
            floor = case.num_bytes / options.peak_tb_per_s / 1e6
            write(f"{rows:6} {case.name:24} {ours:8.2f} {beside:>8} {floor:8.2f}  {shown}")
    return 0 if all_good else 1


def call_with(run: Callable[[int, str], object], backend: str, call: int) -> object:
    """Makes a call with a backend."""
    return run(call, backend)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = make_parser(__doc__, check="compare with fp64 first; exit 1 if wrong")
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 32, 256, 8192], help="tokens")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
