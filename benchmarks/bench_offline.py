"""Throughput of nano-vLLM's benchmark workload, the same requests with the same seed.

256 requests at once: prompts of 100 to 1,024 random tokens, answers of 100 to 1,024 tokens that
never stop early, temperature 0.6. Those that seed 0 draws have 142,827 prompt tokens and 133,966
output tokens. Every run serves the same ones, and finds nothing of the run before in the cache.

    python benchmarks/bench_offline.py --model qwen3-0.6b --repeat 3
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from nv_core import SamplingParams
from nv_runtime import LLM
from nv_runtime.bench.environment import describe_environment
from nv_runtime.bench.profiling import profile_steps
from nv_runtime.bench.roofline import DeviceRates, measure_rates
from nv_runtime.bench.shapes import materialised
from nv_runtime.bench.throughput import ThroughputRun, run_throughput, summarise_throughput
from nv_runtime.bench.workload import Workload

MAX_INPUT_LEN = MAX_OUTPUT_LEN = 1024


def nano_vllm_workload(generator: random.Random, num_prompts: int = 256) -> Workload:
    """Draws requests in nano-vLLM's order of draws."""
    prompts = [
        [generator.randint(0, 10000) for _ in range(generator.randint(100, MAX_INPUT_LEN))]
        for _ in range(num_prompts)
    ]
    params = [
        SamplingParams(
            temperature=0.6, ignore_eos=True, max_tokens=generator.randint(100, MAX_OUTPUT_LEN)
        )
        for _ in range(num_prompts)
    ]
    return Workload(prompts, params)


def run_anew(llm: LLM, workload: Workload, *, rates: DeviceRates | None) -> ThroughputRun:
    """Runs a workload as if for the first time."""
    llm.reset_prefix_cache()
    return run_throughput(llm, workload, rates=rates)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b", help="a shape's name or a checkpoint")
    parser.add_argument("--num-prompts", type=int, default=256, help="requests (default 256)")
    parser.add_argument("--repeat", type=int, default=3, help="measured runs (default 3)")
    parser.add_argument(
        "--profile",
        type=Path,
        nargs="?",
        const=Path("nv-trace.json"),
        help="afterwards, trace 100 steady decode steps",
    )
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto, or fp8")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--scheduling-policy", default="mixed")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--output-json", type=Path, help="write the result here as well")
    return parser.parse_args()


def measure(model: str, options: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the workload once to warm up and `--repeat` times, and looks at the device's idle time.

    On CUDA the idle share comes from a profiler's trace of 100 steady decode steps.
    """
    workload = nano_vllm_workload(random.Random(0), arguments.num_prompts)
    start = perf_counter()
    with LLM(model, show_progress=False, **options) as llm:
        ready_s = perf_counter() - start
        device = llm.config.resolve_device()
        rates = measure_rates(device, llm.config.resolve_dtype(llm.model_config.dtype, device))
        runs = [run_anew(llm, workload, rates=rates) for _ in range(arguments.repeat + 1)]
        result = {
            "construction_s": ready_s,
            # Warms up kernels, graphs and the allocator, and is not counted.
            "warm_up": runs[0].as_dict(),
            **summarise_throughput(runs[1:]),
            "device_rates": vars(rates),
        }
        if device.type == "cuda" or arguments.profile is not None:
            llm.reset_prefix_cache()
            use = profile_steps(llm, workload, path=arguments.profile).device_use
            result["steady_decode"] = None if use is None else use.as_dict()
    return {**result, "environment": describe_environment(device)}


def main() -> None:
    """Runs the benchmark and prints one JSON object."""
    arguments = parse_arguments()
    with materialised(arguments.model) as (model, needed):
        options = {
            "max_model_len": 4096,
            "skip_tokenizer_init": True,
            "attention_backend": arguments.attention_backend,
            "kv_cache_dtype": arguments.kv_cache_dtype,
            "block_size": arguments.block_size,
            "scheduling_policy": arguments.scheduling_policy,
            "max_num_batched_tokens": arguments.max_num_batched_tokens,
            "enforce_eager": arguments.enforce_eager,
            **needed,
        }
        result = measure(model, options, arguments)
    report = {"benchmark": "offline", "model": arguments.model, "options": options, **result}
    text = json.dumps(report, indent=2) + "\n"
    sys.stdout.write(text)
    if arguments.output_json:
        arguments.output_json.write_text(text)


if __name__ == "__main__":
    main()
