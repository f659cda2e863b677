"""Tensor parallelism on several GPUs: is it right, how fast, how far does it scale.

    python benchmarks/multi_gpu.py equality --sizes 2           tokens of one GPU and of several
    python benchmarks/multi_gpu.py speed --model qwen3-8b --sizes 1 2
    python benchmarks/multi_gpu.py all-reduce --size 2          microseconds per message size
    python benchmarks/multi_gpu.py equality --device cpu --models qwen3-tiny --dtypes float32

Prints one JSON object. NVLink multicast stays off: the engine sets `NCCL_NVLS_ENABLE=0` and
`TORCH_SYMM_MEM_DISABLE_MULTICAST=1` where they are not set.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench_offline import nano_vllm_workload, run_anew
from nv_core import SamplingParams
from nv_runtime import LLM
from nv_runtime.bench.environment import describe_environment
from nv_runtime.bench.latency import measure_latency, summarise_latency
from nv_runtime.bench.shapes import materialised
from nv_runtime.bench.workload import Workload, random_workload
from ranks_all_reduce import measure_all_reduce

Tokens = list[list[int]]


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("equality", "speed", "all-reduce"))
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--model", default="qwen3-8b", help="for speed")
    parser.add_argument("--sizes", nargs="+", type=int, default=[2], help="numbers of ranks")
    parser.add_argument("--size", type=int, default=2, help="ranks of all-reduce")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-prompts", type=int, default=16, help="of equality (default 16)")
    parser.add_argument("--output-len", type=int, default=64, help="of equality (default 64)")
    parser.add_argument("--repeat", type=int, default=2, help="measured runs of speed (default 2)")
    parser.add_argument("--num-requests", type=int, default=256, help="of speed (default 256)")
    parser.add_argument("--fused", action="store_true", help="fused_all_reduce, of speed")
    parser.add_argument("--output-json", type=Path, help="write the result here as well")
    return parser.parse_args()


@contextmanager
def engine(model: str, size: int, **options: Any) -> Iterator[tuple[LLM, float]]:  # noqa: ANN401
    """Makes an engine, and says how many seconds that took."""
    with materialised(model) as (path, needed):
        needed = {"max_model_len": 4096, "show_progress": False, **needed, **options}
        start = perf_counter()
        with LLM(path, tensor_parallel_size=size, **needed) as llm:
            yield llm, perf_counter() - start


def greedy(llm: LLM, prompts: Tokens, num_tokens: int) -> Tokens:
    """Answers prompts with the most probable tokens."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def forced(llm: LLM, prompts: Tokens, answers: Tokens) -> float:
    """Share of an answer's tokens that this engine would choose as well, given those before."""
    prefixes = [p + a[:n] for p, a in zip(prompts, answers, strict=True) for n in range(len(a))]
    wanted = [token for answer in answers for token in answer]
    chosen = [answer[0] for answer in greedy(llm, prefixes, 1)]
    return sum(map(int.__eq__, chosen, wanted)) / len(wanted)


def equality(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Compares greedy answers of one rank and of several.

    In float32 they should be equal, but for near ties of random weights. In bfloat16 answers drift
    apart after the first near tie, so each token is also chosen anew given those before it; how
    often one rank agrees with itself in that (decode steps against prompts) is the floor.
    """
    generator = random.Random(0)
    results = []
    for model in arguments.models:
        prompts = [
            [generator.randrange(10000) for _ in range(generator.randrange(20, 200))]
            for _ in range(arguments.num_prompts)
        ]
        for dtype in arguments.dtypes:
            options = {"dtype": dtype, "device": arguments.device}
            with engine(model, 1, **options) as (llm, _):
                answers = greedy(llm, prompts, arguments.output_len)
                own = forced(llm, prompts, answers)
            for size in arguments.sizes:
                with engine(model, size, **options) as (llm, ready_s):
                    others = greedy(llm, prompts, arguments.output_len)
                    agreement = forced(llm, prompts, answers)
                with engine(model, size, enforce_eager=True, **options) as (llm, _):
                    without_graphs = greedy(llm, prompts, arguments.output_len)
                same = [a == b for a, b in zip(answers, others, strict=True)]
                results.append(
                    {
                        "model": model,
                        "dtype": dtype,
                        "size": size,
                        "ready_s": ready_s,
                        "equal_answers": sum(same) / len(same),
                        "forced_agreement": agreement,
                        "forced_agreement_of_one_rank": own,
                        "graphs_change_nothing": others == without_graphs,
                    }
                )
                log(results[-1])
    return results


def speed(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures throughput and batch-1 latency, and the share of perfect scaling reached."""
    results: list[dict[str, Any]] = []
    workload = nano_vllm_workload(random.Random(0), arguments.num_requests)
    for size in arguments.sizes:
        generator = random.Random(0)
        options = {"device": arguments.device, "fused_all_reduce": arguments.fused}
        with engine(arguments.model, size, **options) as (llm, ready_s):
            run_anew(llm, workload, rates=None)  # compiles kernels and captures graphs
            rates = [
                run_anew(llm, workload, rates=None).output_tokens_per_s
                for _ in range(arguments.repeat)
            ]
            runs = measure_latency(
                llm, partial(one_request, generator), num_iters_warmup=2, num_iters=3, rates=None
            )
            latency = summarise_latency(runs)
        results.append(
            {"size": size, "ready_s": ready_s, "output_tokens_per_s": rates, "latency": latency}
        )
        log(results[-1])
    base = results[0]
    for result in results:
        gain = max(result["output_tokens_per_s"]) / max(base["output_tokens_per_s"])
        result["scaling_share"] = gain * base["size"] / result["size"]
    return results


def one_request(generator: random.Random) -> Workload:
    """Draws the request whose latency is measured."""
    return random_workload(
        1, input_len=128, output_len=256, vocab_size=10000, temperature=0.6, generator=generator
    )


def log(result: dict[str, Any]) -> None:
    """Tells a result at once: a run that is cut short has said what it knew."""
    sys.stderr.write(json.dumps(result) + "\n")


def main() -> None:
    """Runs one measurement and prints one JSON object."""
    arguments = parse_arguments()
    if arguments.what == "equality":
        results: Any = equality(arguments)
    elif arguments.what == "speed":
        results = speed(arguments)
    else:
        results = measure_all_reduce(arguments.size)
    name = "cuda" if torch.cuda.is_available() and arguments.device != "cpu" else "cpu"
    text = json.dumps(
        {
            "benchmark": f"multi_gpu {arguments.what}",
            "options": {k: str(v) for k, v in vars(arguments).items()},
            "num_devices": torch.cuda.device_count(),
            "environment": describe_environment(torch.device(name)),
            "results": results,
        },
        indent=2,
    )
    sys.stdout.write(text + "\n")
    if arguments.output_json:
        arguments.output_json.write_text(text + "\n")


if __name__ == "__main__":
    main()
