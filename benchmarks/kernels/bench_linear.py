"""Matrix products with few rows: our kernel against the library's, for the layers of a model.

Each product of all layers, with a weight of its own per layer, runs in one CUDA graph, so that no
weight is found in the cache. `--sweep` tries tile sizes; `--check` compares with fp64 first.

    python benchmarks/kernels/bench_linear.py --model qwen3-0.6b --rows 1 2 4
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import linear as library_linear

from nv_kernels import linear
from nv_kernels.triton.linear import Tile
from nv_kernels.triton.linear import linear as triton_linear

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


def sweep(x: Tensor, weights: list[Tensor]) -> str:
    """Times tile sizes; returns the three best."""
    timed = []
    for sizes in product((1, 2, 4, 8), (256, 512, 1024), (2, 4, 8)):
        tile = Tile(*sizes)
        if tile.block_k <= x.shape[1]:
            multiply = partial(triton_linear, bias=None, tile=tile)
            spent = time_us(partial(run_all, multiply, x, weights), repeat=3)
            timed.append((spent / len(weights), sizes))
    return ", ".join(f"{sizes}: {spent:.2f}" for spent, sizes in sorted(timed)[:3])


def main() -> None:
    """Runs the benchmark and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sweep", action="store_true", help="try tile sizes for each product")
    parser.add_argument("--check", action="store_true", help="compare with fp64 first")
    options = parser.parse_args()
    num_layers, shapes = MODELS[options.model]
    products = {
        **{name: (num_layers, shape) for name, shape in shapes.items()},
        "head": (4, (VOCAB_SIZE, shapes["qkv"][1])),
    }
    weights = {
        name: [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        for name, (count, shape) in products.items()
    }
    out = sys.stdout.write
    out(f"{options.model}, bf16, microseconds per product (bytes/s of the weight)\n")
    for rows in options.rows:
        for name, layers in weights.items():
            n, k = layers[0].shape
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            if options.check:
                exact = x.double() @ layers[0].double().T
                error = float((linear(x, layers[0]).double() - exact).std() / exact.std())
                if error > 4e-3:
                    raise SystemExit(f"{name}, {rows} rows: error {error:.2e} against fp64")
            ours = time_us(partial(run_all, linear, x, layers)) / len(layers)
            library = time_us(partial(run_all, library_linear, x, layers)) / len(layers)
            rate = n * k * 2 / ours / 1e6
            line = f"{rows:3d} rows {name:8s} ours {ours:8.2f} ({rate:4.2f} TB/s)"
            line += f"  library {library:8.2f}"
            if options.sweep:
                line += f"  best tiles {sweep(x, layers)}"
            out(line + "\n")
        out("\n")


if __name__ == "__main__":
    main()
