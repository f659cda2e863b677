"""Throughput of nano-vLLM's benchmark workload, the same requests with the same seed.

256 requests at once: prompts of 100 to 1,024 random tokens, answers of 100 to 1,024 tokens that
never stop early, temperature 0.6. That is 142,827 prompt tokens and 133,966 output tokens.

    python benchmarks/bench_offline.py --shape qwen3-0.6b --repeat 3
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from model_shapes import SHAPES, write_config
from nv_runtime import LLM, SamplingParams

MAX_INPUT_LEN = MAX_OUTPUT_LEN = 1024


def make_requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Draws the next `count` requests in nano-vLLM's order of draws."""
    prompts = [
        [random.randint(0, 10000) for _ in range(random.randint(100, MAX_INPUT_LEN))]
        for _ in range(count)
    ]
    params = [
        SamplingParams(
            temperature=0.6, ignore_eos=True, max_tokens=random.randint(100, MAX_OUTPUT_LEN)
        )
        for _ in range(count)
    ]
    return prompts, params


def machine() -> dict[str, str]:
    """Describes where and on what the numbers were measured."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "gpu": gpu,
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip() or "unknown",
    }


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a checkpoint; instead of --shape")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="random weights")
    parser.add_argument("--num-prompts", type=int, default=256, help="requests (default 256)")
    parser.add_argument("--repeat", type=int, default=3, help="measured runs (default 3)")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--scheduling-policy", default="mixed")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark and prints one JSON object."""
    arguments = parse_arguments()
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "max_model_len": 4096,
            "skip_tokenizer_init": True,
            "attention_backend": arguments.attention_backend,
            "block_size": arguments.block_size,
            "scheduling_policy": arguments.scheduling_policy,
            "max_num_batched_tokens": arguments.max_num_batched_tokens,
            "show_progress": False,
        }
        model = arguments.model
        if model is None:
            model = str(write_config(arguments.shape, Path(folder)))
            options["load_format"] = "dummy"
        start = perf_counter()
        llm = LLM(model, **options)
        ready_s = perf_counter() - start
        runs = []
        # The first run warms kernels and allocator up and is not counted.
        for _ in range(arguments.repeat + 1):
            prompts, params = make_requests(arguments.num_prompts)
            start = perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = perf_counter() - start
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            runs.append({"seconds": seconds, "output_tokens_per_s": num_tokens / seconds})
    result = {
        "benchmark": "offline",
        "model": arguments.model or arguments.shape,
        "options": {k: v for k, v in vars(arguments).items() if k != "json"},
        "machine": machine(),
        "ready_s": ready_s,
        "warm_up": runs[0],
        "runs": runs[1:],
        "median_output_tokens_per_s": statistics.median(
            run["output_tokens_per_s"] for run in runs[1:]
        ),
    }
    text = json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
