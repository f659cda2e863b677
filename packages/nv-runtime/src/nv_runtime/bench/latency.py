"""Latency of one batch at a time: time to the first token, and time per token after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median, quantiles
from time import perf_counter
from typing import TYPE_CHECKING, Any

from nv_runtime.bench.roofline import DeviceRates, floor_of

if TYPE_CHECKING:
    from nv_runtime.bench.workload import Workload
    from nv_runtime.llm import LLM

__all__ = ["LatencyRun", "measure_latency", "run_latency", "summarise_latency"]


@dataclass(frozen=True)
class LatencyRun:
    """One batch from its first to its last token.

    Args:
        ttft_s: From the call to the first token of the last request to get one.
        total_s: From the call to the last token.
        num_steps_after_first: Tokens of the longest answer behind its first.
        floor_s: The least time that the device needs; None if its rates are not known.
    """

    ttft_s: float
    total_s: float
    num_steps_after_first: int
    floor_s: float | None

    @property
    def token_s(self) -> float | None:
        """Seconds per token behind the first; None for answers of one token."""
        if not self.num_steps_after_first:
            return None
        return (self.total_s - self.ttft_s) / self.num_steps_after_first


def run_latency(llm: LLM, workload: Workload, *, rates: DeviceRates | None) -> LatencyRun:
    """Runs one batch.

    Args:
        llm: The model, idle.
        workload: The batch.
        rates: What the device does; None for no roofline.
    """
    num_waiting = len(workload.prompts)
    start = perf_counter()
    first = start
    seen: set[str] = set()
    for output in llm.stream(workload.prompts, workload.sampling_params):
        if len(seen) < num_waiting and output.request_id not in seen:
            seen.add(output.request_id)
            first = perf_counter()
    end = perf_counter()
    floor_s = None
    if rates is not None:
        floor_s = floor_of(llm, workload, rates=rates).total_s
    return LatencyRun(
        ttft_s=first - start,
        total_s=end - start,
        num_steps_after_first=max(num_output for _, num_output in workload.lengths) - 1,
        floor_s=floor_s,
    )


def measure_latency(
    llm: LLM,
    make_batch: Callable[[], Workload],
    *,
    num_iters_warmup: int,
    num_iters: int,
    rates: DeviceRates | None,
) -> list[LatencyRun]:
    """Runs several batches, each with fresh prompts so that no prefix is found in the cache.

    Args:
        llm: The model, idle.
        make_batch: Draws the next batch.
        num_iters_warmup: Batches that are run first and not counted.
        num_iters: Batches that are counted.
        rates: What the device does; None for no roofline.
    """
    for _ in range(num_iters_warmup):
        run_latency(llm, make_batch(), rates=None)
    return [run_latency(llm, make_batch(), rates=rates) for _ in range(num_iters)]


def summarise_latency(runs: list[LatencyRun]) -> dict[str, Any]:
    """Medians over several runs, and vLLM's names for what it reports.

    Args:
        runs: At least one.
    """
    totals = [run.total_s for run in runs]
    token_s = [run.token_s for run in runs if run.token_s is not None]
    shares = [run.floor_s / run.total_s for run in runs if run.floor_s is not None]
    return {
        "avg_latency": mean(totals),
        "latencies": totals,
        "percentiles": _percentiles(totals),
        "median_ttft_ms": 1e3 * median(run.ttft_s for run in runs),
        "ttft_ms": [1e3 * run.ttft_s for run in runs],
        "median_ms_per_token": 1e3 * median(token_s) if token_s else None,
        "ms_per_token": [1e3 * seconds for seconds in token_s],
        "median_roofline_share": median(shares) if shares else None,
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {str(percent): cuts[percent - 1] for percent in (10, 25, 50, 75, 90, 99)}
