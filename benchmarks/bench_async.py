"""What the front doors cost: the same requests through LLM and through AsyncLLM.

Every mode serves the same random prompts, all at once, on a fresh engine:

    generate          LLM.generate, which looks at answers when they are complete
    stream            LLM.stream, one output for every token
    async final       AsyncLLM, a task for each request, one output each
    async delta       AsyncLLM, a task for each request, what is new of it
    async cumulative  AsyncLLM, a task for each request, the answer so far

    python benchmarks/bench_async.py --model qwen3-0.6b --repeat 3

The result says how long each took, and how much of the throughput of `generate` is left. With
`--tokenizer`, a checkpoint's own tokenizer decodes the answers; without, there is no text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

from nv_runtime import LLM, AsyncLLM, EngineConfig, RequestOutput, RequestOutputKind, SamplingParams
from nv_runtime.bench.environment import describe_environment
from nv_runtime.bench.shapes import materialised

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


class Run(NamedTuple):
    """One measured run.

    Attributes:
        seconds: From the first request to the last token.
        cpu_seconds: What the process's threads worked meanwhile, all together.
        num_tokens: Output tokens.
        num_outputs: Outputs that the callers were given.
    """

    seconds: float
    cpu_seconds: float
    num_tokens: int
    num_outputs: int


class _Clock:
    """Times one run, from when it is made."""

    def __init__(self) -> None:
        self._start, self._cpu_start = perf_counter(), process_time()

    def run(self, num_tokens: int, num_outputs: int) -> Run:
        seconds, cpu_seconds = perf_counter() - self._start, process_time() - self._cpu_start
        return Run(seconds, cpu_seconds, num_tokens, num_outputs)


class Workload(NamedTuple):
    """Requests that come all at once.

    Attributes:
        prompts: Their token ids.
        params: How to sample each.
    """

    prompts: list[list[int]]
    params: list[SamplingParams]

    def params_of(self, kind: RequestOutputKind) -> list[SamplingParams]:
        """Returns the parameters with another kind of output."""
        return [params.clone(output_kind=kind) for params in self.params]


def make_workload(arguments: argparse.Namespace, generator: random.Random) -> Workload:
    """Draws fresh requests, so that no prompt is found in the prefix cache."""
    count, length = arguments.num_prompts, arguments.input_len
    prompts = [[generator.randrange(arguments.vocab) for _ in range(length)] for _ in range(count)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=arguments.output_len)
    return Workload(prompts, [params] * count)


def run_generate(llm: LLM, workload: Workload) -> Run:
    """Serves the requests through `LLM.generate`."""
    clock = _Clock()
    outputs = llm.generate(workload.prompts, workload.params, use_tqdm=False)
    return clock.run(_num_tokens(outputs), len(outputs))


def run_stream(llm: LLM, workload: Workload) -> Run:
    """Serves the requests through `LLM.stream`."""
    clock, last, count = _Clock(), {}, 0
    for output in llm.stream(workload.prompts, workload.params):
        last[output.request_id] = output
        count += 1
    return clock.run(_num_tokens(list(last.values())), count)


async def run_async(llm: AsyncLLM, workload: Workload, kind: RequestOutputKind) -> Run:
    """Serves the requests through `AsyncLLM`, each in a task of its own."""

    async def one(prompt: list[int], params: SamplingParams) -> tuple[int, int]:
        num_tokens = num_outputs = 0
        async for output in llm.generate(prompt, params):
            count = len(output.outputs[0].token_ids)
            num_tokens = num_tokens + count if kind is DELTA else count
            num_outputs += 1
        return num_tokens, num_outputs

    clock = _Clock()
    counts = await asyncio.gather(*map(one, workload.prompts, workload.params_of(kind)))
    return clock.run(sum(count[0] for count in counts), sum(count[1] for count in counts))


def run_tasks(llm: AsyncLLM, workload: Workload, *, kind: RequestOutputKind) -> Run:
    """The same, in an event loop made for it."""
    return asyncio.run(run_async(llm, workload, kind))


def _num_tokens(outputs: list[RequestOutput]) -> int:
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def measure(
    model: str, options: Mapping[str, Any], arguments: argparse.Namespace
) -> dict[str, list[Run]]:
    """Runs every mode `--repeat` times after a run that warms up and is not counted."""
    generator = random.Random(0)

    def repeated(run: Callable[[Workload], Run]) -> list[Run]:
        runs = [run(make_workload(arguments, generator)) for _ in range(arguments.repeat + 1)]
        return runs[1:]

    results: dict[str, list[Run]] = {}
    with LLM(model, **options) as llm:
        results["generate"] = repeated(partial(run_generate, llm))
        results["stream"] = repeated(partial(run_stream, llm))
    async_llm = AsyncLLM(model, **options)
    for name, kind in (("final", FINAL_ONLY), ("delta", DELTA), ("cumulative", CUMULATIVE)):
        results[f"async {name}"] = repeated(partial(run_tasks, async_llm, kind=kind))
    async_llm.shutdown()
    return results


def summarise(results: Mapping[str, list[Run]]) -> dict[str, dict[str, float]]:
    """Puts the medians of each mode beside those of `generate`."""
    median = {
        name: statistics.median(run.num_tokens / run.seconds for run in runs)
        for name, runs in results.items()
    }
    return {
        name: {
            "output_tokens_per_s": round(median[name], 1),
            "share_of_generate": round(median[name] / median["generate"], 4),
            "outputs_per_token": round(runs[-1].num_outputs / runs[-1].num_tokens, 4),
            "cpu_us_per_token": round(
                1e6 * statistics.median(run.cpu_seconds / run.num_tokens for run in runs), 2
            ),
        }
        for name, runs in results.items()
    }


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b", help="a shape's name or a checkpoint")
    parser.add_argument("--tokenizer", action="store_true", help="decode the answers, too")
    parser.add_argument("--num-prompts", type=int, default=256, help="requests (default 256)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens (default 128)")
    parser.add_argument("--output-len", type=int, default=256, help="tokens (default 256)")
    parser.add_argument("--vocab", type=int, default=10_000, help="prompts draw below this")
    parser.add_argument("--repeat", type=int, default=3, help="measured runs (default 3)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output-json", type=Path, help="write the result here as well")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark and prints one JSON object."""
    arguments = parse_arguments()
    with materialised(arguments.model) as (model, needed):
        options = {
            "device": arguments.device,
            "max_model_len": arguments.input_len + arguments.output_len,
            "skip_tokenizer_init": not arguments.tokenizer,
            "show_progress": False,
            **needed,
        }
        results = measure(model, options, arguments)
    report = {
        "benchmark": "async",
        "model": arguments.model,
        "options": options,
        "environment": describe_environment(EngineConfig(model=model, **options).resolve_device()),
        "modes": summarise(results),
    }
    text = json.dumps(report, indent=2) + "\n"
    sys.stdout.write(text)
    if arguments.output_json:
        arguments.output_json.write_text(text)


if __name__ == "__main__":
    main()
