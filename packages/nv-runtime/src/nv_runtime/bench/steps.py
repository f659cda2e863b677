"""Looking inside a run, step by step, without a profiler.

`record_steps` puts a recorder between engine and runner; the engine itself knows nothing of it, and
a run that is not recorded pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean, median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from nv_core import StepPlan
    from nv_runtime.engine import Engine

__all__ = ["StepKind", "StepRecord", "kind_of", "proxied", "record_steps", "summarise_steps"]

StepKind = Literal["prefill", "mixed", "decode"]


@dataclass
class StepRecord:
    """One step of a run; times are seconds of `time.perf_counter`.

    Args:
        kind: "prefill" if no entry only continues its answer, "decode" if all do, else "mixed".
        num_seqs: Sequences in it.
        num_tokens: Tokens that it computes.
        num_context_tokens: Tokens in the caches of its sequences, its own included.
        launch_start_s: When the runner was asked to launch it.
        launch_end_s: When it was launched.
        collect_start_s: When the runner was asked for its tokens.
        collect_end_s: When the tokens were there.
    """

    kind: StepKind
    num_seqs: int
    num_tokens: int
    num_context_tokens: int
    launch_start_s: float
    launch_end_s: float
    collect_start_s: float = 0.0
    collect_end_s: float = 0.0


def kind_of(plan: StepPlan) -> StepKind:
    """Says what a plan runs; one token of a sequence that has an answer to continue is decoding."""
    batch = plan.sequences
    num_decoding = sum(
        count == 1 and first >= seq.num_prompt_tokens
        for seq, first, count in zip(
            batch.sequences, batch.num_computed_tokens, batch.num_scheduled_tokens, strict=True
        )
    )
    if num_decoding == len(batch):
        return "decode"
    return "mixed" if num_decoding else "prefill"


class _Recorder:
    """Writes records as steps come.

    It keeps no plan: some hundred thousand entries that stay alive make full collections of garbage
    in the middle of the run that is measured, of more than 0.1 s each.
    """

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self._num_collected = 0

    def launch(self, launch: Callable[..., Any], plan: StepPlan) -> object:
        start = perf_counter()
        handle = launch(plan)
        end = perf_counter()
        self.records.append(
            StepRecord(
                kind=kind_of(plan),
                num_seqs=len(plan.sequences),
                num_tokens=plan.num_scheduled_tokens,
                num_context_tokens=sum(plan.sequences.num_computed_tokens)
                + plan.num_scheduled_tokens,
                launch_start_s=start,
                launch_end_s=end,
            )
        )
        return handle

    def collect(self, collect: Callable[..., Any], handle: object) -> object:
        # Steps are collected in the order in which they are launched.
        record = self.records[self._num_collected]
        self._num_collected += 1
        record.collect_start_s = perf_counter()
        tokens = collect(handle)
        record.collect_end_s = perf_counter()
        return tokens


class _Proxy:
    """Stands before an object and hands some of its calls to others."""

    def __init__(self, target: object, calls: dict[str, Callable[..., object]]) -> None:
        self._target = target
        self._calls = calls

    def __getattr__(self, name: str) -> object:
        attribute = getattr(self._target, name)
        call = self._calls.get(name)
        if call is None:
            return attribute
        return lambda *args, **kwargs: call(attribute, *args, **kwargs)


@contextmanager
def proxied(engine: Engine, part: str, calls: dict[str, Callable[..., object]]) -> Iterator[None]:
    """Sends some calls of one part of an engine through functions.

    Args:
        engine: The engine; steps may be in flight if the functions do not mind.
        part: The attribute, "runner" or "scheduler".
        calls: Method name -> function of the real method and its arguments.
    """
    real = getattr(engine, part)
    setattr(engine, part, cast("Any", _Proxy(real, calls)))
    try:
        yield
    finally:
        setattr(engine, part, real)


@contextmanager
def record_steps(engine: Engine) -> Iterator[list[StepRecord]]:
    """Records the steps that an engine runs.

    Args:
        engine: The engine, idle.

    Yields:
        The steps so far; the last of them may be without a time of collection.
    """
    recorder = _Recorder()
    with proxied(engine, "runner", {"launch": recorder.launch, "collect": recorder.collect}):
        yield recorder.records


def summarise_steps(records: Sequence[StepRecord]) -> dict[str, dict[str, float]]:
    """Sums up a run by kind of step.

    A step's time goes from the end of the one before (or its own launch, for the first) to the
    arrival of its tokens, so that the times add up to the run. Where the host waits for no step, it
    is the host that sets the pace.

    Returns:
        For each kind that occurred: `num_steps`, `num_tokens`, `seconds`, and milliseconds per
        step: `mean_ms`, `median_ms`, `max_ms`, `mean_launch_ms` (the host launching),
        `mean_wait_ms` (the host waiting for tokens).
    """
    durations: dict[StepKind, list[float]] = {}
    members: dict[StepKind, list[StepRecord]] = {}
    previous: float | None = None
    for record in records:
        start = record.launch_start_s if previous is None else previous
        durations.setdefault(record.kind, []).append(record.collect_end_s - start)
        members.setdefault(record.kind, []).append(record)
        previous = record.collect_end_s
    return {
        kind: {
            "num_steps": len(seconds),
            "num_tokens": sum(record.num_tokens for record in members[kind]),
            "seconds": sum(seconds),
            "mean_ms": 1e3 * mean(seconds),
            "median_ms": 1e3 * median(seconds),
            "max_ms": 1e3 * max(seconds),
            "mean_launch_ms": 1e3 * mean(r.launch_end_s - r.launch_start_s for r in members[kind]),
            "mean_wait_ms": 1e3 * mean(r.collect_end_s - r.collect_start_s for r in members[kind]),
        }
        for kind, seconds in durations.items()
    }
