"""A log on one terminal screen: the metrics, and how the queue, the pool and the batch went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nv_core.sim.metrics import SLO, measure, rows_of
from nv_core.step_log import StepLog

BARS = " ▁▂▃▄▅▆▇█"
WIDTH = 60


def summarise(log: StepLog, *, slo: SLO | None = None) -> str:
    """Returns a screen of text: a line for each metric, and four curves over time."""
    rows = rows_of(measure(log, slo=slo))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    curves = (
        ("tokens a step", [step.num_scheduled_tokens for step in log.steps]),
        ("running", [step.num_running for step in log.steps]),
        ("waiting", [step.num_waiting for step in log.steps]),
        ("KV blocks used", [step.num_used_blocks for step in log.steps]),
    )
    times = [step.done_s for step in log.steps]
    lines.append("")
    for name, values in curves:
        top = max(values, default=0)
        lines.append(f"{name:<{width}}  {sparkline(times, values)} max {top}")
    return "\n".join(lines)


def sparkline(times: Sequence[float], values: Sequence[float], *, width: int = WIDTH) -> str:
    """Draws a curve with one character per stretch of time: the greatest value in it.

    Args:
        times: When each value was reached, rising.
        values: The values, at least 0.
        width: Characters.
    """
    if not times:
        return " " * width
    top = max(values) or 1
    edges = np.linspace(0, times[-1], width + 1)[1:]
    bins = np.searchsorted(edges, times).clip(0, width - 1)
    heights = np.zeros(width)
    np.maximum.at(heights, bins, np.asarray(values, dtype=float))
    steps = np.ceil(heights / top * (len(BARS) - 1)).astype(int)
    return "".join(BARS[step] for step in steps)


def compare_table(logs: Mapping[str, StepLog], *, slo: SLO | None = None) -> str:
    """Returns a table: a line for each metric, a column for each log."""
    tables = {name: dict(rows_of(measure(log, slo=slo))) for name, log in logs.items()}
    names = list(dict.fromkeys(row for table in tables.values() for row in table))
    first = max(len(name) for name in names)
    widths = {
        run: max(len(run), *(len(value) for value in table.values()))
        for run, table in tables.items()
    }
    head = " " * first + "".join(f"  {run:>{widths[run]}}" for run in tables)
    lines = [head]
    for name in names:
        cells = "".join(f"  {table.get(name, '-'):>{widths[run]}}" for run, table in tables.items())
        lines.append(f"{name:<{first}}{cells}")
    return "\n".join(lines)
