"""How well the simulator predicts the engine: record on a GPU, fit and compare anywhere.

`record` runs the engine with a step log: the benchmark workload of `bench_offline.py` once to warm
up, then twice a calibration of many batch sizes, prompt lengths and context lengths (twice, since
the first pass compiles kernels and captures graphs), then the benchmark workload again.

    python benchmarks/bench_fidelity.py record --model qwen3-0.6b --out qwen3-0.6b.jsonl.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nv_core import SamplingParams

    Requests = tuple[list[list[int]], list[SamplingParams]]

NUM_PROMPTS = 256
"""Requests of the benchmark workload."""


def make_calibration() -> list[Requests]:
    """Draws the calibration: each element is run by itself, from an idle engine to an idle engine.

    Decodes in batches of each power of two, over short and long contexts; then requests with short
    answers, far more than run at once, so that prompts and decodes of every number share steps.
    """
    draw = random.Random(1)
    runs = []
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for longest in (128, 1024, 3800 if size <= 64 else 2048):
            lengths = [draw.randint(longest // 2, longest) for _ in range(size)]
            runs.append(_requests(draw, lengths, [32] * size))
    lengths = [draw.randint(16, 2000) for _ in range(600)]
    runs.append(_requests(draw, lengths, [draw.randint(1, 60) for _ in lengths]))
    lengths = [draw.randint(16, 3800) for _ in range(100)]
    runs.append(_requests(draw, lengths, [draw.randint(1, 8) for _ in lengths]))
    return runs


def _requests(draw: random.Random, lengths: list[int], max_tokens: list[int]) -> Requests:
    from nv_core import SamplingParams

    prompts = [[draw.randint(0, 10000) for _ in range(length)] for length in lengths]
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in max_tokens]
    return prompts, params


def record(arguments: argparse.Namespace) -> None:
    """Runs the engine and writes its log; prints what the clock on the wall said of each run."""
    # Brings torch, which `compare` does without.
    import torch

    from bench_offline import nano_vllm_workload
    from nv_runtime import LLM
    from nv_runtime.bench.environment import describe_environment
    from nv_runtime.bench.shapes import materialised

    draw = random.Random(0)

    def requests() -> Requests:
        workload = nano_vllm_workload(draw, arguments.num_prompts)
        return workload.prompts, workload.sampling_params

    with (
        tempfile.TemporaryDirectory() as folder,
        materialised(arguments.model) as (model, shape_options),
    ):
        log = Path(folder) / "step_log.jsonl"
        options: dict[str, Any] = {
            "max_model_len": 4096,
            "skip_tokenizer_init": True,
            "show_progress": False,
            "step_log": log,
            **shape_options,
        }
        calibration = make_calibration()
        runs = []
        with LLM(model, **options) as llm:
            warm_up = requests()
            benchmark = [requests() for _ in range(arguments.repeat)]
            for prompts, params in [warm_up, *calibration, *calibration, *benchmark]:
                start = perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                seconds = perf_counter() - start
                num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                runs.append({"seconds": seconds, "output_tokens_per_s": num_tokens / seconds})
        with log.open("rb") as source, gzip.open(arguments.out, "wb") as target:
            shutil.copyfileobj(source, target)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = {
        "benchmark": "fidelity",
        "model": arguments.model,
        "machine": describe_environment(device),
        "runs": runs[-arguments.repeat :],
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("record", help="run the engine and write its log")
    command.add_argument("--model", default="qwen3-0.6b", help="a shape's name or a checkpoint")
    command.add_argument("--num-prompts", type=int, default=NUM_PROMPTS)
    command.add_argument("--repeat", type=int, default=2, help="runs of the benchmark (default 2)")
    command.add_argument("--out", type=Path, required=True, help="the log, NAME.jsonl.gz")
    command.set_defaults(run=record)
    return parser.parse_args()


def main() -> None:
    """Runs a command."""
    arguments = parse_arguments()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
