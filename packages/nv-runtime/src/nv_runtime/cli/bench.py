"""`nv bench`: throughput, latency and start-up time, with vLLM's flags where they mean the same."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nv_runtime.cli.options import ENGINE_FLAGS, common_options, engine_options, given

if TYPE_CHECKING:
    import random

    from nv_runtime.bench.roofline import DeviceRates
    from nv_runtime.bench.workload import Workload
    from nv_runtime.cli.session import CliSession
    from nv_runtime.llm import LLM

__all__ = ["bench"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

_DEFAULT_TRACE = "nv-trace.json"


def _count_option(
    *names: str, default: int, help_text: str, least: int = 1
) -> Callable[[_Command], _Command]:
    """An option that counts something, shown with its default."""
    return click.option(
        *names,
        type=click.IntRange(min=least),
        default=default,
        show_default=True,
        help=help_text,
    )


def _check_writable(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuses a file that cannot be written before minutes are spent on what goes into it."""
    if value is not None and not os.access(value if value.exists() else value.parent, os.W_OK):
        raise click.BadParameter(f"{value} cannot be written; is its folder there?")
    return value


@click.group(short_help="Measure throughput, latency or start-up time.")
def bench() -> None:
    """Measure throughput, latency or start-up time.

    --model takes what other commands take, or the name of a shape, which gets random weights:
    qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, qwen3-tiny. With --load-format dummy, a directory
    that holds nothing but a config.json will do.
    """


def _bench_options(command: _Command) -> _Command:
    """Adds the flags that all benchmarks have."""
    command = click.option(
        "--skip-tokenizer-init",
        is_flag=True,
        default=None,
        help="Load no tokenizer and make no text, for checkpoints that have none.",
    )(command)
    command = click.option(
        "--output-json",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=_check_writable,
        help="File for the results, with machine, versions and commit.",
    )(command)
    return click.option("--model", required=True, help="A model, or a shape's name.")(command)


def _device_options(command: _Command) -> _Command:
    """Adds the flags of benchmarks that run in this process."""
    command = click.option(
        "--profile",
        is_flag=False,
        flag_value=_DEFAULT_TRACE,
        type=click.Path(dir_okay=False, path_type=Path),
        callback=_check_writable,
        help=f"Afterwards, write a Perfetto trace of some steps (to {_DEFAULT_TRACE}, or a PATH).",
    )(command)
    command = _count_option("--profile-steps", default=100, help_text="Steps to trace.")(command)
    command = click.option(
        "--roofline/--no-roofline",
        default=True,
        help="Measure what the device allows, and report the share that was reached.",
    )(command)
    return _sampling_flag(command)


def _sampling_flag(command: _Command) -> _Command:
    return click.option(
        "--temperature",
        type=click.FloatRange(min=0),
        default=1.0,
        show_default=True,
        help="Of all requests.",
    )(command)


@bench.command(short_help="Tokens per second of many requests at once.")
@_bench_options
@click.option(
    "--dataset-name",
    type=click.Choice(["random"]),
    default="random",
    help="Where prompts come from.",
)
@_count_option("--num-prompts", default=1000, help_text="Requests.")
@_count_option("--input-len", "--random-input-len", default=1024, help_text="Mean prompt tokens.")
@_count_option("--output-len", "--random-output-len", default=128, help_text="Mean output tokens.")
@click.option(
    "--random-range-ratio",
    type=click.FloatRange(min=0, max=1, max_open=True),
    default=0.0,
    show_default=True,
    help="Lengths vary by this share of the mean, both ways.",
)
@_count_option(
    "--prefix-len", "--random-prefix-len", default=0, help_text="Common prefix.", least=0
)
@_count_option("--num-iters-warmup", default=1, help_text="Runs not counted.", least=0)
@_count_option("--num-iters", default=1, help_text="Runs that count.")
@_device_options
@engine_options
@common_options
@click.pass_obj
def throughput(
    session: CliSession,
    /,
    *,
    model: str,
    num_prompts: int,
    input_len: int,
    output_len: int,
    random_range_ratio: float,
    prefix_len: int,
    num_iters_warmup: int,
    num_iters: int,
    temperature: float,
    roofline: bool,
    profile: Path | None,
    profile_steps: int,
    output_json: Path | None,
    **flags: object,
) -> None:
    """Measure how many tokens per second many requests get that are all there at the start.

    Each run has fresh prompts, so no run finds another's in the prefix cache.
    """
    from nv_runtime.bench.throughput import run_throughput, summarise_throughput
    from nv_runtime.bench.workload import random_workload

    def draw(llm: LLM, generator: random.Random) -> Workload:
        return random_workload(
            num_prompts,
            input_len=input_len,
            output_len=output_len,
            vocab_size=llm.model_config.vocab_size,
            range_ratio=random_range_ratio,
            prefix_len=prefix_len,
            temperature=temperature,
            generator=generator,
        )

    def measure(
        llm: LLM, make: Callable[[], Workload], rates: DeviceRates | None
    ) -> dict[str, Any]:
        for _ in range(num_iters_warmup):
            run_throughput(llm, make(), rates=None)
        runs = [run_throughput(llm, make(), rates=rates) for _ in range(num_iters)]
        return summarise_throughput(runs)

    result = _measure(
        session,
        model,
        flags,
        draw=draw,
        measure=measure,
        roofline=roofline,
        profile=profile,
        profile_steps=profile_steps,
    )
    run = result["runs"][-1]
    click.echo(
        f"Throughput: {run['requests_per_second']:.2f} requests/s, "
        f"{run['tokens_per_second']:.2f} total tokens/s, "
        f"{run['output_tokens_per_second']:.2f} output tokens/s{_share(result)}"
    )
    _finish("throughput", result, output_json)


@bench.command(short_help="Latency of one batch at a time.")
@_bench_options
@_count_option("--input-len", default=32, help_text="Prompt tokens.")
@_count_option("--output-len", default=128, help_text="Output tokens.")
@_count_option("--batch-size", default=8, help_text="Requests in a batch.")
@_count_option("--num-iters-warmup", default=10, help_text="Batches not counted.", least=0)
@_count_option("--num-iters", default=30, help_text="Batches that count.")
@_device_options
@engine_options
@common_options
@click.pass_obj
def latency(
    session: CliSession,
    /,
    *,
    model: str,
    input_len: int,
    output_len: int,
    batch_size: int,
    num_iters_warmup: int,
    num_iters: int,
    temperature: float,
    roofline: bool,
    profile: Path | None,
    profile_steps: int,
    output_json: Path | None,
    **flags: object,
) -> None:
    """Measure the time of one batch: to its first tokens, and for each token after them."""
    from nv_runtime.bench.latency import measure_latency, summarise_latency
    from nv_runtime.bench.workload import random_workload

    def draw(llm: LLM, generator: random.Random) -> Workload:
        return random_workload(
            batch_size,
            input_len=input_len,
            output_len=output_len,
            vocab_size=llm.model_config.vocab_size,
            temperature=temperature,
            generator=generator,
        )

    def measure(
        llm: LLM, make: Callable[[], Workload], rates: DeviceRates | None
    ) -> dict[str, Any]:
        runs = measure_latency(
            llm, make, num_iters_warmup=num_iters_warmup, num_iters=num_iters, rates=rates
        )
        return summarise_latency(runs)

    result = _measure(
        session,
        model,
        flags,
        draw=draw,
        measure=measure,
        roofline=roofline,
        profile=profile,
        profile_steps=profile_steps,
    )
    click.echo(f"Avg latency: {result['avg_latency']:.6f} seconds{_share(result)}")
    for percent, seconds in result["percentiles"].items():
        click.echo(f"{percent}% percentile latency: {seconds:.6f} seconds")
    click.echo(f"Median time to first token: {result['median_ttft_ms']:.3f} ms")
    if result["median_ms_per_token"] is not None:
        click.echo(f"Median time per token after it: {result['median_ms_per_token']:.3f} ms")
    _finish("latency", result, output_json)


@bench.command(short_help="Time from the start of a process to its first token.")
@_bench_options
@_count_option("--input-len", default=128, help_text="Prompt tokens.")
@_count_option("--num-iters-cold", default=1, help_text="Starts with no compiled kernels.", least=0)
@_count_option("--num-iters-warmup", default=1, help_text="Starts not counted.", least=0)
@_count_option("--num-iters-warm", default=3, help_text="Starts after these.", least=0)
@engine_options
@common_options
@click.pass_obj
def startup(
    session: CliSession,
    /,
    *,
    model: str,
    input_len: int,
    num_iters_cold: int,
    num_iters_warmup: int,
    num_iters_warm: int,
    output_json: Path | None,
    **flags: object,
) -> None:
    """Measure the time from the start of a new Python process to its first token.

    Cold starts find no compiled Triton kernels; warm ones find those of the warm-up. Neither drops
    the machine's page cache. A table says where the time of the median run went.
    """
    if num_iters_cold == num_iters_warm == 0:
        raise click.UsageError(
            "--num-iters-cold and --num-iters-warm are both 0, which measures nothing; raise one"
        )
    from nv_runtime.bench.environment import describe_environment
    from nv_runtime.bench.shapes import materialised
    from nv_runtime.bench.startup import median_run, run_startup, summarise_startup
    from nv_runtime.engine_config import EngineConfig
    from nv_runtime.start_times import format_phases

    options = _given(flags)
    result: dict[str, Any] = {}
    with materialised(model) as (path, needed):
        options = {**needed, **options}
        device = EngineConfig(model=path, **options).resolve_device()

        def run(*, cold: bool) -> Any:  # noqa: ANN401
            return run_startup(path, options, num_prompt_tokens=input_len, cold=cold)

        cold_runs = [run(cold=True) for _ in range(num_iters_cold)]
        for _ in range(num_iters_warmup):
            run(cold=False)
        warm_runs = [run(cold=False) for _ in range(num_iters_warm)]
    for name, runs in (("cold", cold_runs), ("warm", warm_runs)):
        if runs:
            result[name] = summarise_startup(runs)
            click.echo(
                f"{name}: engine ready after {result[name]['median_ready_s']:.2f} s, first token "
                f"after {result[name]['median_first_token_s']:.2f} s (medians of {len(runs)})"
            )
            click.echo(format_phases(median_run(runs).phases))
    result |= {"model": model, "options": options, "environment": describe_environment(device)}
    _finish("startup", result, output_json)


def _measure(
    session: CliSession,
    model: str,
    flags: Mapping[str, Any],
    *,
    draw: Callable[[LLM, random.Random], Workload],
    measure: Callable[[LLM, Callable[[], Workload], DeviceRates | None], dict[str, Any]],
    roofline: bool,
    profile: Path | None,
    profile_steps: int,
) -> dict[str, Any]:
    """Loads a model, measures, profiles if asked to, and adds where all that happened."""
    import random

    from nv_runtime import LLM
    from nv_runtime.bench.environment import describe_environment
    from nv_runtime.bench.profiling import profile_steps as run_profile
    from nv_runtime.bench.roofline import measure_rates
    from nv_runtime.bench.shapes import materialised

    options = _given(flags)
    with materialised(model) as (path, needed):
        llm = LLM(path, **session.engine_options({**needed, **options}))
        with llm:
            device = llm.config.resolve_device()
            dtype = llm.config.resolve_dtype(llm.model_config.dtype, device)
            generator = random.Random(llm.config.seed)
            rates = measure_rates(device, dtype) if roofline else None
            result = measure(llm, lambda: draw(llm, generator), rates)
            if profile is not None:
                seen = run_profile(llm, draw(llm, generator), num_steps=profile_steps, path=profile)
                use = seen.device_use
                result["device_use"] = None if use is None else use.as_dict()
                result["num_profiled_steps"] = seen.num_steps
                click.echo(
                    f"Trace of {seen.num_steps} steps: {profile} (open in ui.perfetto.dev)"
                    if seen.num_steps
                    else "No trace: the answers end before steps are steady; raise --output-len"
                )
    return {
        **result,
        "model": model,
        "options": options,
        "device_rates": None if rates is None else vars(rates),
        "environment": describe_environment(device),
    }


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Picks the options of `LLM` that stood on the command line."""
    options = given(flags, ENGINE_FLAGS)
    if flags["skip_tokenizer_init"]:
        options["skip_tokenizer_init"] = True
    return options


def _share(result: Mapping[str, Any]) -> str:
    share = result["median_roofline_share"]
    return "" if share is None else f", {share:.0%} of the roofline"


def _finish(name: str, result: dict[str, Any], output_json: Path | None) -> None:
    if output_json is not None:
        output_json.write_text(json.dumps({"benchmark": name, **result}, indent=2) + "\n")
