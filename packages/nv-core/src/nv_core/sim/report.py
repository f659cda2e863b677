"""HTML reports: one file, no network. Of one log, or of several that are compared.

Python works out what is drawn (`report_data`); `assets/report.js` draws it.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nv_core.errors import ConfigError
from nv_core.sim.block_map import replay_blocks
from nv_core.sim.metrics import SLO, Metrics, measure, request_times, rows_of
from nv_core.sim.timeline import KINDS, make_lanes
from nv_core.step_log import StepLog

MAX_LANES = 400
MAX_STEPS = 4_000
MAX_MAP_BLOCKS = 8_192
MAX_MAP_STEPS = 2_000
CDF_POINTS = 160

DEFINITIONS = (
    "TTFT: first token after arrival. TPOT: (last token - first token) / (output tokens - 1), per "
    "request. ITL: gaps between tokens, pooled. E2E: end after arrival. Goodput: requests per "
    "second that meet every objective; dropped and unfinished requests stay in the denominator of "
    "the attainment. Recomputed: tokens that were computed before, as a share of all computed. "
    "Jain index and service gap: of what users with open requests got within a window, in prompt "
    "tokens + 2 x output tokens."
)


def write_report(
    logs: StepLog | Mapping[str, StepLog],
    path: str | PathLike[str],
    *,
    slo: SLO | None = None,
    title: str | None = None,
) -> Path:
    """Writes a report.

    Args:
        logs: A log, or several by name: the report then compares them.
        path: The file to write.
        slo: Objectives for the goodput.
        title: Its headline; None for one that says what it shows.

    Returns:
        The path.

    Raises:
        ConfigError: There is no log.
    """
    named = {"run": logs} if isinstance(logs, StepLog) else dict(logs)
    if not named:
        raise ConfigError("a report needs at least one log")
    data = {
        "title": title or _title(named),
        "definitions": DEFINITIONS,
        "kinds": KINDS,
        "runs": [report_data(log, name=name, slo=slo) for name, log in named.items()],
    }
    path = Path(path)
    path.write_text(make_page("report", data), encoding="utf-8")
    return path


def make_page(name: str, data: Mapping[str, Any]) -> str:
    """Puts style, script and data of a page into one document that loads nothing.

    Args:
        name: Of the page: its script is `assets/<name>.js`.
        data: What the script draws; a `title` in it becomes the document's.
    """
    assets = files("nv_core.sim") / "assets"
    # "</" inside JSON would end the script.
    content = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    page = (assets / "page.html").read_text("utf-8")
    for mark, text in (
        ("TITLE", html.escape(str(data["title"]))),
        ("STYLE", (assets / "page.css").read_text("utf-8")),
        ("SCRIPT", (assets / f"{name}.js").read_text("utf-8")),
        ("DATA", content),
    ):
        page = page.replace("{{" + mark + "}}", text, 1)
    return page


def report_data(log: StepLog, *, name: str, slo: SLO | None = None) -> dict[str, Any]:
    """What a report shows of one log, ready for JSON."""
    metrics = measure(log, slo=slo)
    times = request_times(log)
    blocks = block_changes(log)
    header = log.header
    return {
        "name": name,
        "facts": [
            ("source", header.source),
            ("policy", header.policy),
            ("model", (header.model or {}).get("name", "unknown")),
            ("device", header.device or "unknown"),
            ("KV pool", f"{header.num_blocks} blocks of {header.block_size} tokens"),
            (
                "limits",
                f"{header.max_num_batched_tokens} tokens a step, {header.max_num_seqs} sequences",
            ),
            ("prefix caching", "on" if header.enable_prefix_caching else "off"),
            ("steps in flight", str(header.num_steps_ahead + 1)),
        ],
        "metrics": rows_of(metrics),
        "bars": _bars(metrics),
        "cdfs": {
            "TTFT": cdf(times.ttft_s),
            "TPOT": cdf(times.tpot_s),
            "ITL": cdf(times.itl_s),
            "E2E": cdf(times.e2e_s),
            "queue time": cdf(times.queue_s),
        },
        "lanes": _lanes(log),
        "numRequests": len(log.requests),
        "steps": _steps(log, blocks),
        "numSteps": len(log.steps),
        "budget": header.max_num_batched_tokens,
        "numBlocks": header.num_blocks,
        "blocks": blocks,
    }


def cdf(values: npt.NDArray[np.float64]) -> list[tuple[float, float]]:
    """Points (value, share of values at most that) of a distribution function; empty for none."""
    known = np.sort(values[~np.isnan(values)])
    if not known.size:
        return []
    levels = np.linspace(0, 1, min(known.size, CDF_POINTS))
    picked = np.quantile(known, levels)
    return [(round(float(v), 6), round(float(q), 4)) for v, q in zip(picked, levels, strict=True)]


def _title(named: Mapping[str, StepLog]) -> str:
    if len(named) > 1:
        return "Comparison of " + ", ".join(named)
    log = next(iter(named.values()))
    return f"{log.header.source}, policy {log.header.policy}: {len(log.all_requests)} requests"


def _bars(metrics: Metrics) -> list[tuple[str, float, str]]:
    return [
        ("goodput", metrics.goodput_per_s, f"{metrics.goodput_per_s:.3f}/s"),
        ("attainment", metrics.attainment, f"{metrics.attainment:.1%}"),
        ("output tokens/s", metrics.output_tokens_per_s, f"{metrics.output_tokens_per_s:,.0f}"),
        ("hit rate", metrics.hit_rate, f"{metrics.hit_rate:.1%}"),
        ("recomputed", metrics.recompute_share, f"{metrics.recompute_share:.2%}"),
        ("Jain index", metrics.fairness.jain_index, f"{metrics.fairness.jain_index:.3f}"),
        ("service gap", metrics.fairness.service_gap, f"{metrics.fairness.service_gap:,.0f}"),
    ]


def _lanes(log: StepLog) -> list[dict[str, Any]]:
    lanes = []
    for lane in make_lanes(log, max_requests=MAX_LANES):
        request = lane.request
        lanes.append(
            {
                "id": request.request_id,
                "user": request.user,
                "prompt": request.num_prompt_tokens,
                "arrival": round(request.arrival_s, 6),
                "end": None if request.finished_s is None else round(request.finished_s, 6),
                "reason": request.finish_reason,
                "message": request.message,
                "deadline": _finite(request.deadline_s),
                "segments": [
                    (
                        round(s.start_s, 6),
                        round(s.end_s, 6),
                        KINDS.index(s.kind),
                        s.text,
                        s.num_cached_tokens,
                    )
                    for s in lane.segments
                ],
            }
        )
    return lanes


def _finite(value: float | None) -> float | None:
    """The value, or None for one that JSON has no number for; an endless deadline is none."""
    return value if value is not None and isfinite(value) else None


def _steps(log: StepLog, blocks: list[dict[str, Any]] | None) -> Sequence[Sequence[float]]:
    """What the strips draw; in a long log a row stands for several steps, at their greatest.

    Returns:
        Rows of start, end, decode, other and found tokens, blocks used and free, waiting and
        preempted requests, and free blocks with content (0 where that is not known).
    """
    size = -(-len(log.steps) // MAX_STEPS) or 1
    begins = log.begins_s()
    cached = [] if blocks is None else [change["cached"] for change in blocks]
    rows = []
    for start in range(0, len(log.steps), size):
        steps = log.steps[start : start + size]
        decodes = [sum(count == 1 for count in step.scheduled) for step in steps]
        rows.append(
            (
                round(begins[start], 6),
                round(steps[-1].done_s, 6),
                max(decodes),
                max(s.num_scheduled_tokens - d for s, d in zip(steps, decodes, strict=True)),
                max(step.num_hit_tokens for step in steps),
                max(step.num_used_blocks for step in steps),
                min(step.num_free_blocks for step in steps),
                max(step.num_waiting for step in steps),
                sum(len(step.preempted) for step in steps),
                max(cached[start : start + size], default=0),
            )
        )
    return rows


FREE, CACHED, USED, SHARED = range(4)
"""States of a block: free and empty, free with content, in one table, in several."""


def block_changes(log: StepLog) -> list[dict[str, Any]] | None:
    """Which blocks change their state in each step, for the block map.

    Returns:
        For each of the first `MAX_MAP_STEPS` steps: `change` (block, state) pairs, `hits` (blocks
        that were found), and `cached` (free blocks with content); None if the log has no blocks or
        the pool is too large to draw.
    """
    has_blocks = any(step.new_blocks for step in log.steps)
    if not has_blocks or log.header.num_blocks > MAX_MAP_BLOCKS:
        return None
    before = [FREE] * log.header.num_blocks
    changes = []
    for (step, pool), _ in zip(replay_blocks(log), range(MAX_MAP_STEPS), strict=False):
        now = [
            (USED if count == 1 else SHARED) if count else (CACHED if i in pool.cached else FREE)
            for i, count in enumerate(pool.ref_counts)
        ]
        changes.append(
            {
                "step": step.step_id,
                "change": [
                    (i, b) for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b
                ],
                "hits": sorted({b for ids in pool.hits.values() for b in ids}),
                "cached": now.count(CACHED),
            }
        )
        before = now
    return changes
