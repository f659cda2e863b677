"""Latency of one request at a time, and the time from the start of a process to its first token.

For each model: milliseconds per token at batch 1, time to the first token of a 128-token prompt,
and start to first token in fresh processes (imports counted) with a cold and a warm Triton cache.

    python benchmarks/bench_latency.py --models qwen3-0.6b qwen3-8b
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from nv_runtime import LLM
from nv_runtime.bench.environment import describe_environment
from nv_runtime.bench.latency import measure_latency, summarise_latency
from nv_runtime.bench.profiling import profile_steps
from nv_runtime.bench.roofline import measure_rates
from nv_runtime.bench.shapes import materialised
from nv_runtime.bench.startup import StartupRun, run_startup, summarise_startup
from nv_runtime.bench.workload import Workload, random_workload

OPTIONS: dict[str, Any] = {"max_model_len": 4096, "skip_tokenizer_init": True}


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", default=["qwen3-0.6b", "qwen3-8b"], help="shapes or checkpoints"
    )
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens (default 128)")
    parser.add_argument("--output-len", type=int, default=256, help="output tokens (default 256)")
    parser.add_argument("--repeat", type=int, default=5, help="measured runs (default 5)")
    parser.add_argument("--starts", type=int, default=3, help="warm starts (default 3; 0 for none)")
    parser.add_argument("--output-json", type=Path, help="write the result here as well")
    return parser.parse_args()


def measure_latency_of(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one model in this process."""
    with materialised(model) as (path, needed), LLM(path, **{**OPTIONS, **needed}) as llm:
        generator = random.Random(0)
        device = llm.config.resolve_device()
        rates = measure_rates(device, llm.config.resolve_dtype(llm.model_config.dtype, device))

        def draw() -> Workload:
            return random_workload(
                1,
                input_len=arguments.input_len,
                output_len=arguments.output_len,
                vocab_size=min(10000, llm.model_config.vocab_size),
                temperature=0.6,
                generator=generator,
            )

        # Three to warm up: a graph of a prompt's size is captured when that occurs again.
        runs = measure_latency(
            llm, draw, num_iters_warmup=3, num_iters=arguments.repeat, rates=rates
        )
        use = None
        if device.type == "cuda":
            use = profile_steps(llm, draw(), num_steps=100).device_use
        return {
            **summarise_latency(runs),
            "steady_decode": None if use is None else use.as_dict(),
            "device_rates": vars(rates),
            "environment": describe_environment(device),
        }


def measure_starts_of(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Times new processes, which need the device's memory for themselves."""
    with materialised(model) as (path, needed):

        def start(*, cold: bool) -> StartupRun:
            options = {**OPTIONS, **needed}
            return run_startup(path, options, num_prompt_tokens=arguments.input_len, cold=cold)

        cold = summarise_startup([start(cold=True)])
        start(cold=False)
        warm = summarise_startup([start(cold=False) for _ in range(arguments.starts)])
    return {"start_cold": cold, "start_warm": warm}


def main() -> None:
    """Runs the benchmark and prints one JSON object."""
    arguments = parse_arguments()
    results: dict[str, dict[str, Any]] = {model: {} for model in arguments.models}
    if arguments.starts:
        # Before this process takes any memory of the device.
        for model, result in results.items():
            result |= measure_starts_of(model, arguments)
    for model, result in results.items():
        result |= measure_latency_of(model, arguments)
    text = json.dumps({"benchmark": "latency", "models": results}, indent=2) + "\n"
    sys.stdout.write(text)
    if arguments.output_json:
        arguments.output_json.write_text(text)


if __name__ == "__main__":
    main()
