"""Pictures as PNG or SVG, through matplotlib: timeline, distribution functions, capacity.

matplotlib is imported when something is drawn, and draws without a display.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from nv_core.errors import ConfigError
from nv_core.sim.extra import require
from nv_core.sim.metrics import request_times
from nv_core.sim.report import cdf
from nv_core.sim.sweep import RatePoint
from nv_core.sim.timeline import CHUNK, DECODE, PREEMPTED, SLOW, SLOWER, WAITING, make_lanes
from nv_core.step_log import StepLog

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    WAITING: "#d9d9d9",
    CHUNK: "#4e79a7",
    DECODE: "#59a14f",
    SLOW: "#edc948",
    SLOWER: "#e15759",
    PREEMPTED: "#b07aa1",
}
SUFFIXES = (".png", ".svg", ".pdf")


def plot_timeline(log: StepLog, path: str | PathLike[str], *, max_requests: int = 100) -> Path:
    """Draws requests as lanes, with tokens per step, KV blocks and queue below.

    Args:
        log: The log.
        path: The file to write: .png, .svg or .pdf.
        max_requests: Draws the first so many.
    """
    figure = _figure(height=9)
    axes = figure.subplots(4, 1, sharex=True, height_ratios=(4, 1, 1, 1))
    lanes = make_lanes(log, max_requests=max_requests)
    for row, lane in enumerate(lanes):
        for kind, colour in COLOURS.items():
            bars = [(s.start_s, s.end_s - s.start_s) for s in lane.segments if s.kind == kind]
            axes[0].broken_barh(bars, (row - 0.4, 0.8), color=colour)
    axes[0].set_ylabel("request")
    axes[0].invert_yaxis()
    times = log.begins_s()
    decodes = [sum(count == 1 for count in step.scheduled) for step in log.steps]
    others = [s.num_scheduled_tokens - d for s, d in zip(log.steps, decodes, strict=True)]
    axes[1].stackplot(times, decodes, others, step="post", colors=(COLOURS[DECODE], COLOURS[CHUNK]))
    axes[1].axhline(log.header.max_num_batched_tokens, color="black", linewidth=0.5)
    axes[1].set_ylabel("tokens")
    axes[2].step(times, [step.num_used_blocks for step in log.steps], where="post")
    axes[2].axhline(log.header.num_blocks, color="black", linewidth=0.5)
    axes[2].set_ylabel("KV blocks")
    axes[3].step(times, [step.num_waiting for step in log.steps], where="post")
    axes[3].set_ylabel("waiting")
    axes[3].set_xlabel("seconds")
    return _save(figure, path)


def plot_cdfs(logs: Mapping[str, StepLog], path: str | PathLike[str]) -> Path:
    """Draws the distribution functions of the latencies of several logs.

    Args:
        logs: Logs by name.
        path: The file to write: .png, .svg or .pdf.
    """
    figure = _figure(height=7)
    axes = figure.subplots(2, 2)
    for name, log in logs.items():
        times = request_times(log)
        for axis, (title, values) in zip(
            axes.flat,
            (
                ("TTFT", times.ttft_s),
                ("TPOT", times.tpot_s),
                ("ITL", times.itl_s),
                ("E2E", times.e2e_s),
            ),
            strict=True,
        ):
            points = cdf(values)
            axis.plot([value for value, _ in points], [share for _, share in points], label=name)
            axis.set_title(title)
            axis.set_xlabel("seconds")
            axis.set_ylim(0, 1)
    axes.flat[0].legend()
    return _save(figure, path)


def plot_sweep(
    curves: Mapping[str, Sequence[RatePoint]], path: str | PathLike[str], *, target: float
) -> Path:
    """Draws attainment against rate, with the spread over seeds.

    Args:
        curves: Points of each policy, by name.
        path: The file to write: .png, .svg or .pdf.
        target: The attainment that counts as met, drawn as a line.
    """
    figure = _figure(height=5)
    axis = figure.subplots()
    for name, points in curves.items():
        ordered = sorted(points, key=lambda point: point.rate_per_s)
        rates = [point.rate_per_s for point in ordered]
        axis.plot(rates, [point.attainment for point in ordered], marker="o", label=name)
        axis.fill_between(
            rates,
            [min(point.attainments) for point in ordered],
            [max(point.attainments) for point in ordered],
            alpha=0.2,
        )
    axis.axhline(target, color="black", linewidth=0.5)
    axis.set_xlabel("requests per second")
    axis.set_ylabel("share that meets the objectives")
    axis.legend()
    return _save(figure, path)


def _figure(*, height: float) -> Figure:
    require("matplotlib")
    # Not through pyplot, which would choose a display and keep figures alive.
    from matplotlib.figure import Figure

    return Figure(figsize=(11, height), layout="constrained")


def _save(figure: Figure, path: str | PathLike[str]) -> Path:
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"a picture's name must end in {', '.join(SUFFIXES)}, got {path.name!r}")
    figure.savefig(path)
    return path
