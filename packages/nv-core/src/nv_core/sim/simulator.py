"""The simulator: a virtual clock around the real `Scheduler`.

It does what the engine's loop does (`nv_runtime.engine`): deliver what has come, plan, launch,
collect the oldest step, commit. Only the device is missing: a latency model says how long each step
takes, the answers have the lengths that the workload says, and time jumps. Same workload, same
policy and same model give the same log, to the last bit.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

from nv_core.config import SchedulerConfig
from nv_core.errors import ConfigError, RequestError
from nv_core.plan import StepPlan
from nv_core.sampling_params import SamplingParams
from nv_core.scheduler import Scheduler
from nv_core.sequence import Sequence
from nv_core.sim.latency import LatencyModel, work_of
from nv_core.sim.model_shape import ModelShape
from nv_core.sim.workload import Workload, WorkRequest
from nv_core.step_log import (
    BlockTracker,
    LogHeader,
    RequestRecord,
    StepLog,
    StepLogSink,
    StepRecord,
    record_plan,
)

FILLER = 0
"""Output token of answers whose content does not matter."""

Progress = Callable[[int, int], None]
"""Called with the requests that have ended and the requests that there are."""


def simulate(
    workload: Workload,
    config: SchedulerConfig,
    latency: LatencyModel,
    *,
    num_steps_ahead: int = 0,
    record_blocks: bool = False,
    until_s: float | None = None,
    model: ModelShape | None = None,
    device: str | None = None,
    sinks: Iterable[StepLogSink] = (),
    on_progress: Progress | None = None,
) -> StepLog:
    """Runs a workload through a scheduler.

    Args:
        workload: The requests.
        config: Limits and policy of the scheduler. A policy object must not be used again: make a
            new one for each simulation, as some keep state.
        latency: Says how long each step takes.
        num_steps_ahead: How many steps are launched before the oldest is collected; 1 is what the
            engine does on CUDA.
        record_blocks: Whether to record block tables, for the block map.
        until_s: Stops at this time, whatever is unfinished; None to run everything.
        model: Shape of the model, for the log.
        device: Name of the device, for the log.
        sinks: Where to send the events as they happen, such as a `StepLogWriter`.
        on_progress: Called after each step in which something ended.

    Returns:
        The log.

    Raises:
        SchedulingError: The policy runs nothing although requests are unfinished.
        ConfigError: The latency model returns no time.
    """
    header = LogHeader.of(
        config,
        source="simulator",
        num_steps_ahead=num_steps_ahead,
        model=None if model is None else model.as_dict(),
        device=device,
    )
    log = StepLog(header)
    simulation = _Simulation(workload, config, latency, [log, *sinks])
    simulation.blocks = BlockTracker() if record_blocks else None
    simulation.on_progress = on_progress
    with _no_garbage_collection():
        simulation.run(num_steps_ahead, float("inf") if until_s is None else until_s)
    return log


def _too_long(num_prompt_tokens: int, longest: int, config: SchedulerConfig) -> str:
    if config.max_model_len == longest + 1:
        limit = f"max_model_len = {config.max_model_len}"
    else:
        limit = f"num_blocks = {config.num_blocks} of {config.block_size} tokens"
    return (
        f"a prompt of {num_prompt_tokens} tokens can never fit {limit}; shorten it to {longest} "
        "or raise that limit"
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pauses the collector of cycles, which a simulation makes none of.

    It would look through all tokens and records again and again, a fifth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Simulation:
    """State of one run."""

    def __init__(
        self,
        workload: Workload,
        config: SchedulerConfig,
        latency: LatencyModel,
        sinks: Seq[StepLogSink],
    ) -> None:
        self.scheduler = Scheduler(config)
        self.sinks = sinks
        self.blocks: BlockTracker | None = None
        self.on_progress: Progress | None = None
        self._latency = latency
        self._coming = deque(enumerate(workload.requests))
        self._num_requests = len(workload)
        self._num_ended = 0
        self._records: dict[int, RequestRecord] = {}
        # Answers whose content matters: one token over and over, or a list.
        self._answers: dict[int, int | tuple[int, ...]] = {}
        self._sequences: dict[int, Sequence] = {}
        # Checking parameters costs as much as ten steps of a sequence, and few are different.
        self._params: dict[int, SamplingParams] = {}
        self._in_flight: deque[tuple[StepPlan, StepRecord]] = deque()
        self._now = 0.0
        self._device_free_s = 0.0

    def run(self, num_steps_ahead: int, until_s: float) -> None:
        """The engine's loop; compare `Engine.step`."""
        while self._now < until_s:
            self._deliver()
            plan = self.scheduler.schedule()
            if plan is not None:
                self._note_dropped(plan)
                self._launch(plan)
            self._collect(0 if plan is None else num_steps_ahead)
            if not self.scheduler.has_unfinished:
                self._collect(0)
                if not self._coming:
                    break
                self._now = max(self._now, self._coming[0][1].arrival_s)

    def _deliver(self) -> None:
        """Adds the requests that have come by now."""
        coming = self._coming
        while coming and coming[0][1].arrival_s <= self._now:
            number, request = coming.popleft()
            self._add(number, request)

    def _add(self, number: int, request: WorkRequest) -> None:
        name = str(number) if request.request_id is None else request.request_id
        deadline = None if request.slack_s is None else request.arrival_s + request.slack_s
        longest = self.scheduler.max_prompt_tokens
        if request.num_prompt_tokens > longest:
            # Before its prompt is made: there is no end to the length that a trace can name.
            message = _too_long(request.num_prompt_tokens, longest, self.scheduler.config)
            self._reject(name, request, message)
            return
        # Without a prefix cache nobody looks at the tokens, and small numbers cost no memory.
        looks = self.scheduler.config.enable_prefix_caching or request.prompt_token_ids is not None
        try:
            seq = self.scheduler.add(
                request.make_prompt(number) if looks else [FILLER] * request.num_prompt_tokens,
                self._params_of(request.num_output_tokens),
                request_id=name,
                priority=request.priority,
                user=request.user,
                arrival_time=request.arrival_s,
                deadline=deadline,
                predicted_output_tokens=request.predicted_output_tokens,
            )
        except RequestError as error:
            self._reject(name, request, str(error))
            return
        record = RequestRecord.of(seq, request.arrival_s)
        self._records[seq.seq_id] = record
        for sink in self.sinks:
            sink.add_request(record)
        if request.output_token_ids is not None:
            self._answers[seq.seq_id] = request.output_token_ids
            self._sequences[seq.seq_id] = seq
        elif request.output_segment is not None:
            self._answers[seq.seq_id] = request.output_segment

    def _params_of(self, num_output_tokens: int) -> SamplingParams:
        params = self._params.get(num_output_tokens)
        if params is None:
            params = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)
            self._params[num_output_tokens] = params
        return params

    def _reject(self, name: str, request: WorkRequest, message: str) -> None:
        record = RequestRecord(
            seq_id=None,
            request_id=name,
            arrival_s=request.arrival_s,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.num_output_tokens,
            user=request.user,
            priority=request.priority,
            finished_s=request.arrival_s,
            finish_reason="error",
            message=message,
        )
        self._num_ended += 1
        for sink in self.sinks:
            sink.add_request(record)

    def _launch(self, plan: StepPlan) -> None:
        start = max(self._now, self._device_free_s)
        step = record_plan(
            plan,
            planned_s=self._now,
            launched_s=start,
            done_s=start,
            new_blocks=None if self.blocks is None else self.blocks.follow(plan),
        )
        if plan.sequences:
            seconds = self._latency.seconds(work_of(step))
            if not 0 <= seconds < float("inf"):
                raise ConfigError(
                    f"the latency model says that step {plan.step_id} takes {seconds!r} s"
                )
            step = step._replace(done_s=start + seconds)
        self._device_free_s = step.done_s
        self._in_flight.append((plan, step))

    def _collect(self, keep: int) -> None:
        while len(self._in_flight) > keep:
            plan, step = self._in_flight.popleft()
            self._now = max(self._now, step.done_s)
            events = self.scheduler.commit(plan, self._tokens_of(plan))
            for sink in self.sinks:
                sink.add_step(step)
            if events.finished:
                for seq in events.finished:
                    self._end(seq)
                if self.on_progress is not None:
                    self.on_progress(self._num_ended, self._num_requests)

    def _tokens_of(self, plan: StepPlan) -> dict[int, int]:
        if not self._answers:
            return dict.fromkeys(plan.sampled_seq_ids, FILLER)
        return {seq_id: self._token_of(seq_id) for seq_id in plan.sampled_seq_ids}

    def _token_of(self, seq_id: int) -> int:
        answer = self._answers.get(seq_id, FILLER)
        if isinstance(answer, int):
            return answer
        position = self._sequences[seq_id].num_output_tokens
        return answer[position] if position < len(answer) else FILLER

    def _note_dropped(self, plan: StepPlan) -> None:
        for seq in plan.dropped:
            self._end(seq)

    def _end(self, seq: Sequence) -> None:
        record = self._records.pop(seq.seq_id)
        self._answers.pop(seq.seq_id, None)
        self._sequences.pop(seq.seq_id, None)
        record.end(seq, self._now)
        self._num_ended += 1
        for sink in self.sinks:
            sink.finish_request(record)
