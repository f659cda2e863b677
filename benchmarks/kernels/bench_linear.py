"""Matrix products with few rows: what `linear` chooses, our kernel, the library's.

Each product of all layers, with a weight of its own per layer, runs in one CUDA graph, so that no
weight is found in the cache. The products that feed a norm (o and down) may come in parts that the
norm adds up (`linear_parts`). The last line of each number of rows is what a decode step spends on
all of them; `--check` compares with fp64 and with the times that the project set itself.

    python benchmarks/kernels/bench_linear.py --check --rows 1 32 128
    python benchmarks/kernels/bench_linear.py --model qwen3-8b --rows 1 32 --check
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear as library_linear

from nv_kernels import linear, linear_parts

# name -> (layers, {product: (out_features, in_features)})
MODELS = {
    "qwen3-0.6b": (
        28,
        {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
    ),
    "qwen3-8b": (
        36,
        {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    ),
}
VOCAB_SIZE = 151936
NUM_HEADS_TIMED = 4
# (model, rows) -> milliseconds for all layers and the head: what must be reached, what we aim at.
GOALS = {
    ("qwen3-0.6b", 1): (0.57, 0.38),
    ("qwen3-0.6b", 32): (0.70, 0.48),
    ("qwen3-0.6b", 128): (0.80, 0.62),
    ("qwen3-8b", 1): (3.95, 3.65),
    ("qwen3-8b", 32): (4.10, 3.75),
}


def time_us(run: Callable[[], object], *, repeat: int = 7) -> float:
    """Median time of one graph replay, in microseconds."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    for _ in range(repeat + 2):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times[2:])[repeat // 2]


def run_all(multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor]) -> None:
    """Multiplies by every weight, one after the other."""
    for weight in weights:
        multiply(x, weight)


def check(
    name: str, x: Tensor, weight: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Compares one product with fp64."""
    exact = x.double() @ weight.double().T
    actual = multiply(x, weight).double()
    if actual.dim() > exact.dim():
        actual = actual.sum(0)
    error = float((actual - exact).norm() / exact.norm())
    if not error < 4e-3:
        raise SystemExit(f"{name}, {len(x)} rows: error {error:.2e} against fp64")


def check_all(weights: dict[str, list[Tensor]], numbers_of_rows: list[int]) -> None:
    """Compares each product, as chosen and as ours, with fp64."""
    for rows in numbers_of_rows:
        for name, layers in weights.items():
            weight = layers[0]
            x = torch.randn(rows, weight.shape[1], device=weight.device, dtype=weight.dtype)
            multiply = product_of(name)
            check(name, x, weight, multiply)
            check(name, x, weight, partial(multiply, backend="triton"))


def product_of(name: str) -> Callable[..., Tensor]:
    """The op that a layer uses for a product: the norm adds up the parts of two of them."""
    return linear_parts if name in ("o", "down") else linear


def main() -> None:
    """Runs the benchmark and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--check", action="store_true", help="fail on a wrong or slow product")
    options = parser.parse_args()
    num_layers, shapes = MODELS[options.model]
    products = {
        **{name: (num_layers, shape) for name, shape in shapes.items()},
        "head": (NUM_HEADS_TIMED, (VOCAB_SIZE, shapes["qkv"][1])),
    }
    weights = {
        name: [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        for name, (count, shape) in products.items()
    }
    out = sys.stdout.write
    out(f"{options.model}, bf16, microseconds per product (bytes/s of the weight)\n")
    missed = []
    for rows in options.rows:
        total = total_library = 0.0
        for name, layers in weights.items():
            n, k = layers[0].shape
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            multiply = product_of(name)
            in_ours = partial(multiply, backend="triton")
            chosen = time_us(partial(run_all, multiply, x, layers)) / len(layers)
            ours = time_us(partial(run_all, in_ours, x, layers)) / len(layers)
            library = time_us(partial(run_all, library_linear, x, layers)) / len(layers)
            count = 1 if name == "head" else num_layers
            total += count * chosen / 1e3
            total_library += count * library / 1e3
            out(
                f"{rows:3d} rows {name:8s} chosen {chosen:7.2f} ({2 * n * k / chosen / 1e6:4.2f} "
                f"TB/s)  ours {ours:7.2f}  library {library:7.2f}\n"
            )
        out(f"{rows:3d} rows all layers and head {total:.3f} ms, library {total_library:.3f} ms")
        must, aim = GOALS.get((options.model, rows), (None, None))
        if must is not None:
            out(f"; must {must:.2f}, aim {aim:.2f}")
            if total > must:
                missed.append(f"{rows} rows: {total:.3f} ms")
        out("\n\n")
    if options.check:
        # After all times were taken: what follows a large product in fp64 is slower for a while.
        check_all(weights, options.rows)
    if options.check and missed:
        raise SystemExit(f"slower than what must be reached: {', '.join(missed)}")


if __name__ == "__main__":
    main()
