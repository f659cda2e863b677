"""Thousands of random requests with aborts on a small KV pool: nothing leaks, memory stays flat.

    python benchmarks/soak.py --model qwen3-0.6b --num-requests 10000

Requests come and go at random: prompts that share prefixes, short and long answers, every kind of
sampling, preemption because the pool is small, aborts at any time. Ends with status 1 and a reason
if a block is lost, a request is forgotten, or memory grows after the first half. The memory is that
of the whole GPU, what the driver takes for graphs included: nothing else may run on it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from nv_core import SamplingParams
from nv_runtime import LLM
from nv_runtime.bench.environment import describe_environment
from nv_runtime.bench.shapes import materialised
from nv_runtime.prompt import tokenize_prompt
from nv_runtime.request import Request

MAX_OPEN = 48
CHECK_EVERY = 100
"""Requests between two looks at invariants and memory."""


@dataclass
class SoakReport:
    """What a soak saw.

    Args:
        num_requests: Requests that were handed in.
        num_aborted: Those of them that were aborted.
        num_preemptions: How often a request lost its blocks.
        num_tokens: Tokens that were generated.
        memory_bytes: Memory in use, as sampled over the run.
    """

    num_requests: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    num_tokens: int = 0
    memory_bytes: list[int] = field(default_factory=list)

    def growth_bytes(self) -> int:
        """How much more memory the second half of the run had in use than the first."""
        half = len(self.memory_bytes) // 2
        if not half:
            return 0
        return max(self.memory_bytes[half:]) - max(self.memory_bytes[:half])


class SoakError(RuntimeError):
    """Something was lost."""


def random_params(rng: random.Random) -> SamplingParams:
    """Draws parameters of every kind."""
    kind: dict[str, Any] = rng.choice(
        [
            {"temperature": 0.0},
            {"temperature": 0.8},
            {"temperature": 1.0, "top_k": 20},
            {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01},
            {"temperature": 0.7, "repetition_penalty": 1.2},
            {"temperature": 1.0, "min_tokens": 1},
        ]
    )
    return SamplingParams(
        max_tokens=rng.choice([1, 4, 16, 64]), ignore_eos=rng.random() < 0.7, **kind
    )


def soak(llm: LLM, *, num_requests: int, max_prompt_len: int, seed: int) -> SoakReport:
    """Runs random requests to their ends.

    Args:
        llm: The model, idle.
        num_requests: How many.
        max_prompt_len: Longest prompt, in tokens.
        seed: Of everything that is random.

    Raises:
        SoakError: A block or a request was lost.
    """
    rng = random.Random(seed)
    engine, report = llm.llm_engine, SoakReport()
    vocab_size = llm.model_config.vocab_size
    prefixes = [
        [rng.randrange(vocab_size) for _ in range(rng.randrange(1, max_prompt_len // 2))]
        for _ in range(8)
    ]
    num_free = engine.scheduler.num_free_blocks
    open_requests: list[Request] = []

    def add() -> None:
        prefix = rng.choice(prefixes) if rng.random() < 0.5 else []
        count = rng.randrange(1, max_prompt_len - len(prefix))
        prompt = prefix + [rng.randrange(vocab_size) for _ in range(count)]
        request = engine.add_request(tokenize_prompt(prompt, None), random_params(rng))
        open_requests.append(request)
        report.num_requests += 1
        if report.num_requests % CHECK_EVERY == 0:
            engine.scheduler.check_invariants()
            report.memory_bytes.append(memory_in_use(llm))

    while report.num_requests < num_requests or open_requests:
        while report.num_requests < num_requests and len(open_requests) < rng.randrange(MAX_OPEN):
            add()
        if open_requests and rng.random() < 0.05:
            engine.abort_request(rng.choice(open_requests).request_id)
            report.num_aborted += 1
        engine.step()
        for request in [request for request in open_requests if request.is_finished]:
            open_requests.remove(request)
            output = request.take_output()
            report.num_tokens += len(output.outputs[0].token_ids)
            report.num_preemptions += output.metrics.num_preemptions if output.metrics else 0
    engine.step()  # collects what an abort has left in flight
    engine.scheduler.check_invariants()
    if engine.has_unfinished or engine.scheduler.num_in_flight:
        raise SoakError("requests are left although all have ended")
    if engine.scheduler.num_free_blocks != num_free:
        lost = num_free - engine.scheduler.num_free_blocks
        raise SoakError(f"{lost} of {num_free} blocks are lost")
    return report


def memory_in_use(llm: LLM) -> int:
    """Bytes that this process has in use: of the GPU if it runs on one, else of the machine."""
    device = llm.config.resolve_device()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return resident_pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Runs the soak, prints what it saw as JSON, and exits with 1 if something was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b", help="a shape's name or a checkpoint")
    parser.add_argument("--num-requests", type=int, default=10_000)
    parser.add_argument("--max-prompt-len", type=int, default=600)
    parser.add_argument("--num-pool-tokens", type=int, default=6_144, help="size of the KV pool")
    parser.add_argument("--max-growth-mib", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    block_size = 64
    with materialised(arguments.model) as (model, needed):
        options: dict[str, Any] = {
            "max_model_len": 1024,
            "max_num_seqs": 32,
            "block_size": block_size,
            "num_gpu_blocks_override": arguments.num_pool_tokens // block_size,
            "skip_tokenizer_init": True,
            **needed,
        }
        with LLM(model, show_progress=False, **options) as llm:
            report = soak(
                llm,
                num_requests=arguments.num_requests,
                max_prompt_len=arguments.max_prompt_len,
                seed=arguments.seed,
            )
            environment = describe_environment(llm.config.resolve_device())
    result = {**asdict(report), "growth_bytes": report.growth_bytes(), "environment": environment}
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    if report.growth_bytes() > arguments.max_growth_mib * 2**20:
        sys.exit(f"memory has grown by {report.growth_bytes() / 2**20:.0f} MiB in the second half")


if __name__ == "__main__":
    main()
