"""Timeline: what happened to each request when, as segments that pictures draw."""

from __future__ import annotations

from dataclasses import dataclass, field

from nv_core.step_log import RequestRecord, StepLog, StepRecord

WAITING, CHUNK, DECODE, SLOW, SLOWER, PREEMPTED = (
    "waiting",
    "chunk",
    "decode",
    "slow",
    "slower",
    "preempted",
)
KINDS = (WAITING, CHUNK, DECODE, SLOW, SLOWER, PREEMPTED)
"""Kinds of segments; decodes by the time since the token before, up to 25 ms, 50 ms and above."""

ITL_LIMITS_S = (0.025, 0.050)


@dataclass
class Segment:
    """A stretch of one request's life.

    Attributes:
        start_s: Its beginning.
        end_s: Its end.
        kind: One of `KINDS`.
        text: What to say of it: why it waited, or what was computed.
        num_cached_tokens: Tokens that an admission at its beginning found.
        num_steps: Steps that it stands for.
    """

    start_s: float
    end_s: float
    kind: str
    text: str
    num_cached_tokens: int = 0
    num_steps: int = 1


@dataclass
class Lane:
    """One request.

    Attributes:
        request: The request.
        segments: Its life, in order.
    """

    request: RequestRecord
    segments: list[Segment] = field(default_factory=list)


def make_lanes(log: StepLog, *, max_requests: int | None = None) -> list[Lane]:
    """Cuts the lives of requests into segments, in the order in which they came.

    Args:
        log: The log.
        max_requests: Only so many requests, the first; None for all.
    """
    requests = list(log.requests.values())[:max_requests]
    builders = {r.seq_id: _LaneBuilder(Lane(r)) for r in requests if r.seq_id is not None}
    waiting = dict(builders)
    for step, begin_s in zip(log.steps, log.begins_s(), strict=True):
        for seq_id in step.preempted:
            if seq_id in builders:
                builders[seq_id].preempt(step)
                waiting[seq_id] = builders[seq_id]
        refused = dict(step.refused)
        first = next((log.requests[seq_id].request_id for seq_id in refused), None)
        for seq_id, builder in waiting.items():
            builder.wait(step, refused.get(seq_id), behind=first)
        sampled = set(step.sampled) if len(step.sampled) < len(step.seq_ids) else None
        for seq_id, computed, scheduled in zip(
            step.seq_ids, step.computed, step.scheduled, strict=True
        ):
            chosen = builders.get(seq_id)
            if chosen is not None:
                is_sampled = sampled is None or seq_id in sampled
                chosen.run(step, begin_s, computed, scheduled, samples=is_sampled)
                waiting.pop(seq_id, None)
    end = log.end_s
    for builder in builders.values():
        builder.finish(end)
    return [builder.lane for builder in builders.values()]


class _LaneBuilder:
    """Follows one request through the steps."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        request = lane.request
        self._waits = Segment(request.arrival_s, request.arrival_s, WAITING, "arrived", num_steps=0)
        self._is_resident = False
        self._last_token_s: float | None = None

    def wait(self, step: StepRecord, reason: str | None, *, behind: str | None) -> None:
        """Notes why a step left it out; another reason begins another segment."""
        if step.planned_s < self._waits.start_s:
            return
        text = self._waits.text
        if reason is not None:
            text = f"waits: {reason}"
        elif behind is not None:
            text = f"waits behind request {behind}"
        if text != self._waits.text and self._waits.num_steps:
            kind = self._waits.kind
            self._close_wait(step.planned_s)
            self._waits = Segment(step.planned_s, step.planned_s, kind, text, num_steps=0)
        self._waits.text = text
        self._waits.num_steps += 1

    def preempt(self, step: StepRecord) -> None:
        """Notes that it has lost its blocks; a step in flight may still compute for it."""
        self._is_resident = False
        start_s = step.planned_s
        if self.lane.segments:
            start_s = max(start_s, self.lane.segments[-1].end_s)
        self._waits = Segment(start_s, start_s, PREEMPTED, "preempted", num_steps=0)

    def run(
        self, step: StepRecord, begin_s: float, computed: int, scheduled: int, *, samples: bool
    ) -> None:
        """Notes that a step computes some of it."""
        ended = self.lane.request.finished_s
        if ended is not None and begin_s >= ended:
            return
        found = 0
        if not self._is_resident:
            self._close_wait(begin_s)
            self._is_resident = True
            found = computed
        if scheduled > 1 or found or not samples or self._last_token_s is None:
            text = f"computes tokens {computed} to {computed + scheduled - 1}"
            if found:
                text += f", {found} found in the cache"
            segment = Segment(begin_s, step.done_s, CHUNK, text, found)
            self.lane.segments.append(segment)
        else:
            self._decode(step, begin_s, step.done_s - self._last_token_s)
        if samples:
            self._last_token_s = step.done_s

    def _decode(self, step: StepRecord, begin_s: float, gap_s: float) -> None:
        kind = DECODE if gap_s <= ITL_LIMITS_S[0] else SLOW
        if gap_s > ITL_LIMITS_S[1]:
            kind = SLOWER
        segments = self.lane.segments
        last = segments[-1]
        if last.kind == kind and begin_s - last.end_s < 1e-9:
            last.end_s = step.done_s
            last.num_steps += 1
            last.text = f"decodes {last.num_steps} tokens"
        else:
            segments.append(Segment(begin_s, step.done_s, kind, "decodes 1 token"))

    def _close_wait(self, end_s: float) -> None:
        if end_s > self._waits.start_s:
            self._waits.end_s = end_s
            self.lane.segments.append(self._waits)

    def finish(self, end_s: float) -> None:
        """Closes what is open at the end."""
        request = self.lane.request
        if not self._is_resident:
            self._close_wait(end_s if request.finished_s is None else request.finished_s)
