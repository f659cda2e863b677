"""A profiler's trace of some steps of a workload, and how busy the device was in them.

The trace is a JSON file for ui.perfetto.dev or chrome://tracing: the host's operators, the device's
kernels, and a span for each part of `Engine.step` (schedule, launch, collect, commit), which on
CUDA also appears beside the kernels that it launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from nv_runtime.bench.steps import kind_of, proxied
from nv_runtime.prompt import tokenize_prompt

if TYPE_CHECKING:
    from nv_core import StepPlan
    from nv_runtime.bench.workload import Workload
    from nv_runtime.engine import Engine
    from nv_runtime.llm import LLM
    from nv_runtime.request import Request

__all__ = ["DeviceUse", "Profile", "device_use", "profile_steps"]

_LONG_GAP_US = 5.0
"""Idle gaps above this are the host's fault; kernels of one graph follow each other faster."""
_NUM_SETTLING_STEPS = 10


@dataclass(frozen=True)
class DeviceUse:
    """How busy a device was between its first and its last piece of work.

    Args:
        elapsed_ms: That time.
        busy_ms: Part of it in which at least one kernel or copy ran.
        long_gaps_ms: Idle time in gaps of more than 5 us each.
        num_kernels: Pieces of work.
    """

    elapsed_ms: float
    busy_ms: float
    long_gaps_ms: float
    num_kernels: int

    @property
    def idle_share(self) -> float:
        """Share of the time in which nothing ran, the gaps between a graph's kernels included."""
        return 1 - self.busy_ms / self.elapsed_ms if self.elapsed_ms else 0.0

    @property
    def long_gap_share(self) -> float:
        """Share of the time that long gaps take: what the device waits for the host."""
        return self.long_gaps_ms / self.elapsed_ms if self.elapsed_ms else 0.0

    def as_dict(self) -> dict[str, float]:
        """All numbers and shares."""
        shares = {"idle_share": self.idle_share, "long_gap_share": self.long_gap_share}
        return {**asdict(self), **shares}


@dataclass(frozen=True)
class Profile:
    """What was seen of some steps.

    Args:
        num_steps: How many they were: fewer than asked for where the workload ended before.
        device_use: How busy the device was; None on a CPU, and without a step.
    """

    num_steps: int
    device_use: DeviceUse | None


def device_use(intervals_us: Iterable[tuple[float, float]]) -> DeviceUse:
    """Sums up intervals of work, which may overlap.

    Args:
        intervals_us: (start, end) of each kernel and copy, in microseconds.
    """
    ordered = sorted(intervals_us)
    if not ordered:
        return DeviceUse(elapsed_ms=0.0, busy_ms=0.0, long_gaps_ms=0.0, num_kernels=0)
    first, reached = ordered[0][0], ordered[0][0]
    idle = long_gaps = 0.0
    for start, end in ordered:
        gap = start - reached
        if gap > 0:
            idle += gap
            long_gaps += gap if gap > _LONG_GAP_US else 0.0
        reached = max(reached, end)
    elapsed = reached - first
    return DeviceUse(
        elapsed_ms=elapsed / 1e3,
        busy_ms=(elapsed - idle) / 1e3,
        long_gaps_ms=long_gaps / 1e3,
        num_kernels=len(ordered),
    )


def profile_steps(
    llm: LLM,
    workload: Workload,
    *,
    num_steps: int = 100,
    path: Path | None = None,
    steady: bool = True,
) -> Profile:
    """Runs a workload under a profiler for some of its steps, and aborts the rest.

    Args:
        llm: The model, idle.
        workload: What to run.
        num_steps: How many steps to profile, if there are as many.
        path: Where to write the trace, if there is a step in it; None for nowhere.
        steady: Whether to begin only when every request is decoding (or as many as fit at once).
    """
    engine = llm.llm_engine
    on_cuda = llm.config.resolve_device().type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    requests: list[Request] = []
    num_profiled = 0
    try:
        for prompt, params in zip(workload.prompts, workload.sampling_params, strict=True):
            requests.append(engine.add_request(tokenize_prompt(prompt, None), params))
        if steady:
            _run_until_decoding(engine)
        with _spans(engine), profile(activities=activities, acc_events=True) as profiler:
            while num_profiled < num_steps and engine.has_work:
                with record_function("step"):
                    engine.step()
                num_profiled += 1
    finally:
        engine.abort_unfinished(requests)
        engine.step()  # collects what is still in flight
    if path is not None and num_profiled:
        profiler.export_chrome_trace(str(path))
    use = device_use(_device_intervals(profiler)) if on_cuda and num_profiled else None
    return Profile(num_profiled, use)


def _run_until_decoding(engine: Engine) -> None:
    """Steps until some decode steps in a row have run: prompts are done, graphs are captured."""
    num_in_a_row = 0

    def launch(real: Callable[..., object], plan: StepPlan) -> object:
        nonlocal num_in_a_row
        num_in_a_row = num_in_a_row + 1 if kind_of(plan) == "decode" else 0
        return real(plan)

    with proxied(engine, "runner", {"launch": launch}):
        while engine.has_unfinished and num_in_a_row < _NUM_SETTLING_STEPS:
            engine.step()


@contextmanager
def _spans(engine: Engine) -> Iterator[None]:
    """Marks the parts of each step in the trace."""

    def launch(real: Callable[..., object], plan: StepPlan) -> object:
        name = f"launch {kind_of(plan)}, {len(plan.sequences)} seqs"
        with record_function(f"{name}, {plan.num_scheduled_tokens} tokens"):
            return real(plan)

    def spanned(name: str) -> Callable[..., object]:
        def call(real: Callable[..., object], *args: object) -> object:
            with record_function(name):
                return real(*args)

        return call

    runner_calls = {"launch": launch, "collect": spanned("collect")}
    scheduler_calls = {"schedule": spanned("schedule"), "commit": spanned("commit")}
    with proxied(engine, "runner", runner_calls), proxied(engine, "scheduler", scheduler_calls):
        yield


def _device_intervals(profiler: profile) -> list[tuple[float, float]]:
    """(start, end) in microseconds of everything that ran on the device."""
    events: Any = profiler.events()  # type: ignore[no-untyped-call]
    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
