"""Output tokens per second of a workload whose requests are all there at the start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from nv_runtime.bench.roofline import DeviceRates, floor_of
from nv_runtime.bench.steps import record_steps, summarise_steps

if TYPE_CHECKING:
    from nv_runtime.bench.steps import StepRecord
    from nv_runtime.bench.workload import Workload
    from nv_runtime.llm import LLM

__all__ = ["ThroughputRun", "run_throughput", "summarise_throughput"]

_NUM_SLOWEST = 5


@dataclass(frozen=True)
class ThroughputRun:
    """One run of a workload.

    Args:
        elapsed_s: From the call of `generate` to its return.
        num_prompt_tokens: Tokens of all prompts.
        num_output_tokens: Tokens of all answers.
        num_requests: Requests.
        steps: What the engine ran.
        floor_s: The least time that the device needs; None if its rates are not known.
    """

    elapsed_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_requests: int
    steps: list[StepRecord]
    floor_s: float | None

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.num_output_tokens / self.elapsed_s

    def as_dict(self) -> dict[str, Any]:
        """The run in numbers; names as in vLLM's JSON, where it has them."""
        total = self.num_prompt_tokens + self.num_output_tokens
        slowest = sorted(self.steps, key=lambda step: step.launch_end_s - step.launch_start_s)
        return {
            "elapsed_time": self.elapsed_s,
            "num_requests": self.num_requests,
            "total_num_tokens": total,
            "requests_per_second": self.num_requests / self.elapsed_s,
            "tokens_per_second": total / self.elapsed_s,
            "num_output_tokens": self.num_output_tokens,
            "output_tokens_per_second": self.output_tokens_per_s,
            "floor_s": self.floor_s,
            "roofline_share": None if self.floor_s is None else self.floor_s / self.elapsed_s,
            "steps": summarise_steps(self.steps),
            "slowest_launches": [
                {
                    "kind": step.kind,
                    "num_seqs": step.num_seqs,
                    "num_tokens": step.num_tokens,
                    "launch_ms": 1e3 * (step.launch_end_s - step.launch_start_s),
                }
                for step in slowest[: -_NUM_SLOWEST - 1 : -1]
            ],
        }


def run_throughput(
    llm: LLM, workload: Workload, *, rates: DeviceRates | None, use_tqdm: bool = False
) -> ThroughputRun:
    """Runs a workload once.

    Args:
        llm: The model, idle.
        workload: What to run.
        rates: What the device does; None for no roofline.
        use_tqdm: Whether to show a progress bar.
    """
    with record_steps(llm.llm_engine) as steps:
        start = perf_counter()
        outputs = llm.generate(workload.prompts, workload.sampling_params, use_tqdm=use_tqdm)
        elapsed_s = perf_counter() - start
    floor_s = None
    if rates is not None:
        floor_s = floor_of(llm, workload, rates=rates).total_s
    return ThroughputRun(
        elapsed_s=elapsed_s,
        num_prompt_tokens=workload.num_prompt_tokens,
        num_output_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        num_requests=len(outputs),
        steps=steps,
        floor_s=floor_s,
    )


def summarise_throughput(runs: Iterable[ThroughputRun]) -> dict[str, Any]:
    """Medians over several runs, and every run.

    Args:
        runs: At least one.
    """
    runs = list(runs)
    shares = [run.floor_s / run.elapsed_s for run in runs if run.floor_s is not None]
    return {
        "median_output_tokens_per_second": median(run.output_tokens_per_s for run in runs),
        "median_elapsed_time": median(run.elapsed_s for run in runs),
        "median_roofline_share": median(shares) if shares else None,
        "runs": [run.as_dict() for run in runs],
    }
