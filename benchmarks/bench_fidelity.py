"""How well the simulator predicts the engine: record on a GPU, fit and compare anywhere.

`record` runs the engine with a step log: the benchmark workload of `bench_offline.py` once to warm
up, then twice a calibration of many batch sizes, prompt lengths and context lengths (twice, since
the first pass compiles kernels and captures graphs), then the benchmark workload again.

`compare` fits a latency model to the second calibration and simulates the benchmark runs, which
the fit has not seen, with the fitted model and with the GPU's preset. Times count from the moment
when all requests are in the queue.

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
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from nv_core import SamplingParams, SchedulerConfig
from nv_core.sim import (
    AffineLatency,
    LatencyModel,
    ModelShape,
    RooflineLatency,
    StepLog,
    Workload,
    WorkRequest,
    find_hardware,
    fit,
    fit_roofline,
    measure,
    read_step_log,
    simulate,
    split_at_idle,
)
from nv_core.step_log import StepRecord

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


def compare(arguments: argparse.Namespace) -> None:
    """Fits, predicts the benchmark runs, and prints predicted against measured."""
    runs = split_at_idle(read_step_log(arguments.log))
    num_calibrations = len(make_calibration())
    # The warm-up and the first calibration are full of compiling.
    calibration = runs[1 + num_calibrations : 1 + 2 * num_calibrations]
    benchmark = runs[1 + 2 * num_calibrations :]
    model = ModelShape(**(runs[0].header.model or {}))
    preset = find_hardware(arguments.gpu)
    affine = fit(calibration)
    roofline = fit_roofline(calibration, preset, bytes_share=arguments.bytes_share)
    latencies = {
        "affine fit": affine.latency,
        "roofline fit": RooflineLatency(model, roofline.hardware),
        f"preset {preset.name}": RooflineLatency(model, preset),
    }
    result: dict[str, Any] = {
        "steps fitted": affine.num_steps,
        "outliers": affine.num_outliers,
        "held-out error of the affine fit": round(affine.held_out_error, 4),
        "held-out error of the roofline fit": round(roofline.held_out_error, 4),
        "fitted hardware": asdict(roofline.hardware),
        "affine": asdict(affine.latency) if isinstance(affine.latency, AffineLatency) else None,
        "runs": [
            {name: predict(run, latency) for name, latency in latencies.items()}
            for run in benchmark
        ],
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


def predict(run: StepLog, latency: LatencyModel) -> dict[str, Any]:
    """Simulates the requests of a run and compares what came of it."""
    header = run.header
    requests = [
        WorkRequest(0.0, r.num_prompt_tokens, r.max_tokens or 1) for r in run.requests.values()
    ]
    config = SchedulerConfig(
        num_blocks=header.num_blocks,
        block_size=header.block_size,
        max_num_seqs=header.max_num_seqs,
        max_num_batched_tokens=header.max_num_batched_tokens,
        max_model_len=header.max_model_len,
        policy=header.policy,
    )
    simulated = simulate(
        Workload("benchmark", tuple(requests)),
        config,
        latency,
        num_steps_ahead=header.num_steps_ahead,
    )
    first = min(run.requests)
    plans = [
        [[(seq_id - offset, c, s) for seq_id, c, s in shares(x)] for x in log.steps]
        for log, offset in ((run, first), (simulated, 0))
    ]
    measured, predicted = measure(from_the_queue(run)), measure(simulated)
    pairs = {
        "output tokens/s": (measured.output_tokens_per_s, predicted.output_tokens_per_s),
        "mean ITL ms": (1e3 * measured.itl_s.mean, 1e3 * predicted.itl_s.mean),
        "mean TTFT ms": (1e3 * measured.ttft_s.mean, 1e3 * predicted.ttft_s.mean),
        "mean E2E ms": (1e3 * measured.e2e_s.mean, 1e3 * predicted.e2e_s.mean),
    }
    return {
        "same plans": plans[0] == plans[1],
        **{
            name: {"measured": round(m, 3), "predicted": round(p, 3), "error": round(p / m - 1, 4)}
            for name, (m, p) in pairs.items()
        },
    }


def shares(step: StepRecord) -> list[tuple[int, int, int]]:
    """Who computes how many tokens behind how many others in a step."""
    return list(zip(step.seq_ids, step.computed, step.scheduled, strict=True))


def from_the_queue(run: StepLog) -> StepLog:
    """The same run, time 0 being when all requests are in the queue."""
    start = run.steps[0].planned_s
    requests = {
        seq_id: replace(r, arrival_s=0.0, finished_s=(r.finished_s or 0.0) - start)
        for seq_id, r in run.requests.items()
    }
    steps = [
        step._replace(
            planned_s=step.planned_s - start,
            launched_s=step.launched_s - start,
            done_s=step.done_s - start,
        )
        for step in run.steps
    ]
    return StepLog(run.header, requests, [], steps)


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
    command = commands.add_parser("compare", help="fit to a log, and predict its benchmark runs")
    command.add_argument("log", type=Path, help="what `record` wrote")
    command.add_argument("--gpu", default="h200", help="the preset to compare with (default h200)")
    command.add_argument("--bytes-share", type=float, default=0.9, help="see fit_roofline")
    command.set_defaults(run=compare)
    return parser.parse_args()


def main() -> None:
    """Runs a command."""
    arguments = parse_arguments()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
