"""Latency of one request at a time: time to the first token, and time per token after it.

python benchmarks/bench_latency.py --shape qwen3-0.6b
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from bench_offline import machine
from model_shapes import SHAPES, write_config
from nv_runtime import LLM, SamplingParams


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a checkpoint; instead of --shape")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="random weights")
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens (default 128)")
    parser.add_argument("--output-len", type=int, default=256, help="output tokens (default 256)")
    parser.add_argument("--repeat", type=int, default=5, help="measured runs (default 5)")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark and prints one JSON object."""
    arguments = parse_arguments()
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        start = perf_counter()
        options: dict[str, Any] = {"max_model_len": 4096, "skip_tokenizer_init": True}
        model = arguments.model
        if model is None:
            model = str(write_config(arguments.shape, Path(folder)))
            options["load_format"] = "dummy"
        llm = LLM(model, show_progress=False, **options)
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=arguments.output_len)
        first_token_ms, token_ms = [], []
        ready_s = None
        for _ in range(arguments.repeat + 2):
            prompt = [random.randint(0, 10000) for _ in range(arguments.input_len)]
            begin = perf_counter()
            stream = llm.stream([prompt], params)
            next(stream)
            first = perf_counter()
            if ready_s is None:
                ready_s = first - start
            for _ in stream:
                pass
            end = perf_counter()
            first_token_ms.append((first - begin) * 1e3)
            token_ms.append((end - first) * 1e3 / (arguments.output_len - 1))
    result = {
        "benchmark": "latency",
        "model": arguments.model or arguments.shape,
        "options": vars(arguments),
        "machine": machine(),
        "construction_to_first_token_s": ready_s,
        # The first two runs compile kernels and capture graphs.
        "median_ttft_ms": statistics.median(first_token_ms[2:]),
        "median_ms_per_token": statistics.median(token_ms[2:]),
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
