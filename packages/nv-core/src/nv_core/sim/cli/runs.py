"""Commands around logs: `run` and `compare` make them, `report` reads those of the engine, too."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

from nv_core.sim.cli.output_file import OutputFile
from nv_core.sim.cli.policies import distinct, policy_option
from nv_core.sim.cli.setting import make_setting, say_if_none_served, setting_options
from nv_core.sim.metrics import SLO
from nv_core.sim.perfetto import write_perfetto
from nv_core.sim.plots import SUFFIXES, plot_cdfs, plot_timeline
from nv_core.sim.report import write_report
from nv_core.sim.summary import compare_table, summarise
from nv_core.step_log import StepLog, read_step_log

_LOG = click.Path(path_type=Path, dir_okay=False)
_FILE = OutputFile()
_PICTURE = OutputFile(SUFFIXES)


@click.command(short_help="Simulate a workload under one policy.")
@setting_options
@policy_option
@click.option("--out", "-o", type=_FILE, help="Write an HTML report.")
@click.option("--log", "log_path", type=_FILE, help="Write the step log (.jsonl or .jsonl.gz).")
@click.option("--perfetto", type=_FILE, help="Write a trace for Perfetto (.json or .json.gz).")
@click.option("--plot", type=_PICTURE, help="Draw the timeline (.png, .svg or .pdf).")
@click.option("--quiet", "-q", is_flag=True, help="Show no progress bar.")
def run(
    *,
    policies: tuple[str, ...],
    out: Path | None,
    log_path: Path | None,
    perfetto: Path | None,
    plot: Path | None,
    quiet: bool,
    **options: Any,  # noqa: ANN401 - the fields of Setting
) -> None:
    """Simulate a workload and print what came of it on one screen."""
    if len(policies) > 1:
        raise click.UsageError(
            f"run simulates one policy, got {', '.join(policies)}; nv-sim compare takes several"
        )
    setting = make_setting(options, policy=policies[0] if policies else None)
    workload = setting.make_workload()
    log = setting.simulate(workload, setting.policy, log_path=log_path, quiet=quiet)
    click.echo(summarise(log, slo=setting.slo))
    say_if_none_served(log)
    _write(log, slo=setting.slo, out=out, perfetto=perfetto, plot=plot)


@click.command(short_help="Simulate a workload under several policies.")
@setting_options
@click.option(
    "--policy",
    "-p",
    "policies",
    multiple=True,
    required=True,
    help="A policy's name, module:Class, or file.py:Class; give it several times.",
)
@click.option("--out", "-o", type=_FILE, help="Write an HTML comparison.")
@click.option("--plot", type=_PICTURE, help="Draw the distribution functions (.png, .svg or .pdf).")
@click.option("--quiet", "-q", is_flag=True, help="Show no progress bar.")
def compare(
    *,
    policies: tuple[str, ...],
    out: Path | None,
    plot: Path | None,
    quiet: bool,
    **options: Any,  # noqa: ANN401 - the fields of Setting
) -> None:
    """Simulate the same requests under each policy and print the metrics side by side."""
    policies = distinct(policies)
    setting = make_setting(options, policy=policies[0])
    workload = setting.make_workload()
    logs = {policy: setting.simulate(workload, policy, quiet=quiet) for policy in policies}
    click.echo(compare_table(logs, slo=setting.slo))
    for policy, log in logs.items():
        say_if_none_served(log, f"{policy}: ")
    if out is not None:
        _say(write_report(logs, out, slo=setting.slo))
    if plot is not None:
        _say(plot_cdfs(logs, plot))


@click.command(short_help="Draw step logs, of the simulator or of the engine.")
@click.argument("logs", nargs=-1, required=True, type=_LOG)
@click.option("--out", "-o", type=_FILE, help="Write an HTML report; of several, a comparison.")
@click.option("--perfetto", type=_FILE, help="Write a trace of the first for Perfetto.")
@click.option("--plot", type=_PICTURE, help="Draw the timeline of the first.")
@click.option("--ttft-ms", type=float, help="Objective for the time to the first token.")
@click.option("--tpot-ms", type=float, help="Objective for the time per output token.")
@click.option("--e2e-ms", type=float, help="Objective for the whole request.")
def report(
    *,
    logs: tuple[Path, ...],
    out: Path | None,
    perfetto: Path | None,
    plot: Path | None,
    ttft_ms: float | None,
    tpot_ms: float | None,
    e2e_ms: float | None,
) -> None:
    """Print what step logs say, and draw them. LOGS are files of LLM(step_log=...) or --log."""
    ttft, tpot, e2e = (None if ms is None else ms / 1000 for ms in (ttft_ms, tpot_ms, e2e_ms))
    slo = SLO(ttft_s=ttft, tpot_s=tpot, e2e_s=e2e)
    paths = dict.fromkeys(logs)
    num_named = Counter(path.name for path in paths)
    named = {
        path.name if num_named[path.name] == 1 else str(path): read_step_log(path) for path in paths
    }
    first = next(iter(named.values()))
    for name, log in named.items():
        if log.is_truncated:
            click.echo(f"{name} ends within a line; what is before it is shown", err=True)
    if len(named) == 1:
        click.echo(summarise(first, slo=slo))
    else:
        click.echo(compare_table(named, slo=slo))
        if out is not None:
            _say(write_report(named, out, slo=slo))
            out = None
    _write(first, slo=slo, out=out, perfetto=perfetto, plot=plot)


def _write(
    log: StepLog, *, slo: SLO, out: Path | None, perfetto: Path | None, plot: Path | None
) -> None:
    if out is not None:
        _say(write_report(log, out, slo=slo))
    if perfetto is not None:
        _say(write_perfetto(log, perfetto))
    if plot is not None:
        _say(plot_timeline(log, plot))


def _say(path: Path) -> None:
    click.echo(f"wrote {path}", err=True)
