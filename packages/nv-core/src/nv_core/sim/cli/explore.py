"""Commands that look ahead: `sweep` for the highest rate, `plan` for what fits, `play` to learn."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from nv_core.sim.capacity import Capacity
from nv_core.sim.cli.output_file import OutputFile
from nv_core.sim.cli.policies import distinct, failures_of, load_policy, policy_option
from nv_core.sim.cli.setting import (
    Setting,
    make_setting,
    options_but_model,
    say_if_none_served,
    setting_options,
)
from nv_core.sim.metrics import Metrics, format_ms, latency_rows, measure
from nv_core.sim.play import write_play
from nv_core.sim.plots import SUFFIXES, plot_sweep
from nv_core.sim.sweep import RatePoint, find_highest_rate


@click.command(short_help="Find the highest rate that meets the objectives.")
@setting_options
@policy_option
@click.option("--target", type=float, default=0.9, show_default=True, help="Share that must meet.")
@click.option("--low", type=float, default=0.1, show_default=True, help="Lowest rate to try.")
@click.option("--high", type=float, default=200.0, show_default=True, help="Highest rate to try.")
@click.option("--tolerance", type=float, default=0.05, show_default=True)
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Workloads for each rate.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Processes; by default one for each core.")
@click.option(
    "--plot", type=OutputFile(SUFFIXES), help="Draw attainment against rate (.png, .svg or .pdf)."
)
def sweep(
    *,
    policies: tuple[str, ...],
    target: float,
    low: float,
    high: float,
    tolerance: float,
    seeds: int,
    jobs: int | None,
    plot: Path | None,
    **options: Any,  # noqa: ANN401 - the fields of Setting
) -> None:
    """Search the highest request rate at which enough requests meet --ttft-ms, --tpot-ms, --e2e-ms.

    Each rate is run with as many workloads as there are seeds, in parallel.
    """
    setting = make_setting(options, policy=policies[0] if policies else None)
    if setting.slo == type(setting.slo)():
        raise click.UsageError("give an objective: --ttft-ms, --tpot-ms or --e2e-ms")
    workloads = [setting.make_workload(setting.seed + i) for i in range(seeds)]
    latency = setting.make_latency()

    def on_point(point: RatePoint) -> None:
        spread = f"{min(point.attainments):.1%} to {max(point.attainments):.1%}"
        click.echo(f"  {point.rate_per_s:9.3f}/s  {point.attainment:6.1%}  ({spread})", err=True)

    curves = {}
    for policy in distinct(policies or (setting.policy,)):
        click.echo(f"{policy}: {setting.slo}, for {target:.0%} of the requests", err=True)
        made = load_policy(policy)
        with failures_of(policy, made):
            found = find_highest_rate(
                workloads,
                setting.make_config(made),
                latency,
                slo=setting.slo,
                target=target,
                low_per_s=low,
                high_per_s=high,
                tolerance=tolerance,
                num_steps_ahead=setting.steps_ahead,
                num_processes=jobs or os.cpu_count() or 1,
                on_point=on_point,
            )
        curves[policy] = found.points
        click.echo(f"{policy}: {found.rate_per_s:.3f} requests/s")
        if not found.rate_per_s:
            click.echo(f"{policy}: too few meet the objectives even at --low, {low:g}/s", err=True)
            lowest = workloads[0].at_rate(low)
            say_if_none_served(setting.simulate(lowest, policy, quiet=True), f"{policy}: ")
    if plot is not None:
        click.echo(f"wrote {plot_sweep(curves, plot, target=target)}", err=True)


@click.command(short_help="Say what fits a GPU, and what to expect of it.")
@click.argument("model")
@options_but_model
def plan(*, model: str, **options: Any) -> None:  # noqa: ANN401 - the fields of Setting
    """Say, before anything is loaded, what fits and how fast MODEL will be on --gpu.

    MODEL is a config.json, or the name of a known model (see nv-sim run --help).
    The times are those of --workload (500 requests of it, unless -n says otherwise).
    """
    setting = make_setting({**options, "model": model})
    capacity = setting.make_capacity()
    for name, value in _capacity_rows(capacity, setting):
        click.echo(f"{name:<28}  {value}")
    if not capacity.num_blocks:
        click.echo("\nIt does not fit. Use more GPUs (--tp), a larger one or a smaller model.")
        return
    if setting.num_requests is None:
        setting = replace(setting, num_requests=500)
    workload = setting.make_workload()
    log = setting.simulate(workload, setting.policy, quiet=True)
    say_if_none_served(log)
    click.echo(f"\n{len(workload)} requests of {workload.name}, {workload.rate_per_s:.2f}/s")
    for name, value in _speed_rows(measure(log, slo=setting.slo)):
        click.echo(f"{name:<28}  {value}")


@click.command(short_help="Write a page that steps through the scheduler.")
@click.option("--out", "-o", type=OutputFile(), default=Path("play.html"), show_default=True)
def play(*, out: Path) -> None:
    """Write one HTML page that steps a small scenario through the scheduler's plans."""
    click.echo(f"wrote {write_play(out)}", err=True)


def _capacity_rows(capacity: Capacity, setting: Setting) -> list[tuple[str, str]]:
    rows = [
        (f"memory of {setting.tensor_parallel_size} x {setting.gpu}", _size(capacity.memory_bytes)),
        ("weights", _size(capacity.weight_bytes)),
        ("a step's activations", _size(capacity.activation_bytes)),
        ("graphs and workspace", _size(capacity.graph_bytes)),
        ("KV cache per token", _size(capacity.kv_bytes_per_token)),
        (
            "KV cache",
            f"{_size(capacity.num_kv_tokens * capacity.kv_bytes_per_token)}: "
            f"{capacity.num_blocks} blocks, {capacity.num_kv_tokens} tokens",
        ),
    ]
    lengths = [n for n in (1024, 4096, 16384) if n < capacity.max_model_len]
    for length in (*lengths, capacity.max_model_len):
        rows.append((f"sequences of {length} tokens", f"{capacity.concurrency(length):.1f}"))
    return rows


def _speed_rows(metrics: Metrics) -> list[tuple[str, str]]:
    rows = [
        (f"{name} mean / p50 / p99", " / ".join(format_ms(v) for v in (mean, p50, p99)))
        for name, (mean, p50, _, p99) in latency_rows(metrics)
        if name in ("TTFT", "ITL")
    ]
    rows.append(("output tokens per second", f"{metrics.output_tokens_per_s:,.0f}"))
    rows.append(("requests per second", f"{metrics.requests_per_s:.2f}"))
    rows.append(("time that the GPU is busy", f"{metrics.busy_share:.0%}"))
    return rows


def _size(num_bytes: int) -> str:
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{value:.2f} {unit}"
