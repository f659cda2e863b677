"""Exports a log as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

import gzip
import json
from os import PathLike
from pathlib import Path
from typing import Any

from nv_core.sim.timeline import make_lanes
from nv_core.step_log import StepLog

REQUESTS, DEVICE = 1, 2


def trace_events(log: StepLog) -> list[dict[str, Any]]:
    """Makes the events: a track for each request, one for the steps, and counters.

    Args:
        log: The log.

    Returns:
        Events in the Trace Event Format; times in microseconds.
    """
    events: list[dict[str, Any]] = [
        _name(REQUESTS, "process_name", "requests"),
        _name(DEVICE, "process_name", "device"),
    ]
    for lane in make_lanes(log):
        request = lane.request
        track = (request.seq_id or 0) + 1
        events.append(_name(REQUESTS, "thread_name", f"request {request.request_id}", track))
        for s in lane.segments:
            args = {"what": s.text, "steps": s.num_steps, "cached tokens": s.num_cached_tokens}
            events.append(_span(s.kind, s.start_s, s.end_s, REQUESTS, track, args))
        if request.finished_s is not None:
            events.append(
                {
                    "name": request.finish_reason,
                    "ph": "i",
                    "s": "t",
                    "ts": 1e6 * request.finished_s,
                    "pid": REQUESTS,
                    "tid": track,
                    "args": {"message": request.message},
                }
            )
    for step, begin_s in zip(log.steps, log.begins_s(), strict=True):
        args = {
            "sequences": len(step.seq_ids),
            "tokens": step.num_scheduled_tokens,
            "preempted": list(step.preempted),
        }
        name = f"step {step.step_id}"
        events.append(_span(name, begin_s, step.done_s, DEVICE, 1, args))
        for counter, value in (
            ("tokens", step.num_scheduled_tokens),
            ("KV blocks used", step.num_used_blocks),
            ("waiting", step.num_waiting),
            ("running", step.num_running),
        ):
            events.append(
                {
                    "name": counter,
                    "ph": "C",
                    "ts": 1e6 * begin_s,
                    "pid": DEVICE,
                    "args": {counter: value},
                }
            )
    return events


def write_perfetto(log: StepLog, path: str | PathLike[str]) -> Path:
    """Writes the trace to a file; `.gz` at the end of its name packs it."""
    path = Path(path)
    text = json.dumps({"traceEvents": trace_events(log), "displayTimeUnit": "ms"})
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def _name(process: int, kind: str, name: str, track: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}


def _span(
    name: str, start_s: float, end_s: float, process: int, track: int, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "ts": 1e6 * start_s,
        "dur": 1e6 * (end_s - start_s),
        "pid": process,
        "tid": track,
        "args": args,
    }
