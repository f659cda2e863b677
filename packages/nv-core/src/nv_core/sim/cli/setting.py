"""Shared options, and the workload, limits and latency model that they describe."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from tqdm import tqdm

from nv_core.config import SchedulerConfig
from nv_core.errors import ConfigError
from nv_core.policies import Policy
from nv_core.sim.capacity import Capacity, plan_capacity
from nv_core.sim.cli.log_defaults import take_defaults
from nv_core.sim.cli.policies import failures_of, load_policy
from nv_core.sim.fit import fit
from nv_core.sim.hardware import HARDWARE, Hardware, find_hardware
from nv_core.sim.latency import LatencyModel, RooflineLatency
from nv_core.sim.metrics import SERVED, SLO
from nv_core.sim.model_shape import MODELS, ModelShape, find_model
from nv_core.sim.readers import read_workload
from nv_core.sim.simulator import simulate
from nv_core.sim.synthetic import LOOK_ALIKES
from nv_core.sim.workload import Workload
from nv_core.step_log import LogHeader, StepLog, StepLogWriter, read_step_log

_Command = TypeVar("_Command", bound=Callable[..., Any])

RECORDED_BLOCKS = 8_192
"""Block tables are recorded for pools up to this size, since larger ones are not drawn."""

_KV_DTYPE_BYTES = {"auto": None, "fp8": 1, "fp8_e4m3": 1}
"""`ModelShape.kv_dtype_bytes` by the value of --kv-cache-dtype."""


@dataclass(frozen=True)
class FittedTimes:
    """Times of a log's steps.

    Attributes:
        latency: The model that was fitted to them.
        device: What ran the steps, in words.
    """

    latency: LatencyModel
    device: str


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The shared options; see their help texts."""

    workload: str
    num_requests: int | None
    rate: float | None
    seed: int
    model: str | ModelShape
    kv_cache_dtype: str | None
    gpu: str
    tensor_parallel_size: int
    policy: str
    fitted: FittedTimes | None
    num_blocks: int | None
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    prefix_caching: bool
    steps_ahead: int
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None

    @property
    def slo(self) -> SLO:
        """The objectives."""
        ttft, tpot, e2e = (
            None if ms is None else ms / 1000 for ms in (self.ttft_ms, self.tpot_ms, self.e2e_ms)
        )
        return SLO(ttft_s=ttft, tpot_s=tpot, e2e_s=e2e)

    @property
    def shape(self) -> ModelShape:
        """The model."""
        shape = load_shape(self.model) if isinstance(self.model, str) else self.model
        if self.kv_cache_dtype is None:
            return shape  # of a log, which knows its cache's dtype
        return replace(shape, kv_dtype_bytes=_KV_DTYPE_BYTES[self.kv_cache_dtype])

    @property
    def hardware(self) -> Hardware:
        """The GPU."""
        return find_hardware(self.gpu)

    @property
    def device(self) -> str:
        """What the times are of, in words."""
        if self.fitted is not None:
            return self.fitted.device
        return f"{self.tensor_parallel_size} x {self.gpu}"

    def make_workload(self, seed: int | None = None) -> Workload:
        """Makes or reads the requests, and says how many lines could not be read."""
        seed = self.seed if seed is None else seed
        if self.workload in LOOK_ALIKES:
            options = {} if self.num_requests is None else {"num_requests": self.num_requests}
            workload = LOOK_ALIKES[self.workload](seed=seed, **options)
        else:
            if not Path(self.workload).exists():
                raise ConfigError(
                    f"workload must be a file or one of {', '.join(LOOK_ALIKES)}, got "
                    f"{self.workload!r}"
                )
            workload = read_workload(self.workload)
            if self.num_requests is not None:
                workload = workload.first(self.num_requests)
        if workload.problems:
            click.echo(f"{len(workload.problems)} lines were left out:", err=True)
            for problem in workload.problems[:5]:
                click.echo(f"  {problem}", err=True)
        return workload if self.rate is None else workload.at_rate(self.rate)

    def make_capacity(self) -> Capacity:
        """Works out the KV pool."""
        return plan_capacity(
            self.shape,
            self.hardware,
            tensor_parallel_size=self.tensor_parallel_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len or 32768,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
        )

    def make_config(self, policy: str | Policy) -> SchedulerConfig:
        """Makes the limits; the pool is what the GPU holds unless it was given."""
        capacity = self.make_capacity()
        if capacity.num_blocks < 1:
            raise ConfigError(
                f"{self.shape.name} does not fit {self.tensor_parallel_size} x {self.gpu}; "
                "see nv-sim plan"
            )
        return SchedulerConfig(
            num_blocks=capacity.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.prefix_caching,
            policy=policy,
        )

    def make_latency(self) -> LatencyModel:
        """Makes the latency model: fitted to a log if there is one, else from the data sheets."""
        if self.fitted is not None:
            return self.fitted.latency
        return RooflineLatency(
            self.shape, self.hardware, tensor_parallel_size=self.tensor_parallel_size
        )

    def simulate(
        self, workload: Workload, policy: str, *, log_path: Path | None = None, quiet: bool
    ) -> StepLog:
        """Runs the workload under a policy, with a progress bar on standard error."""
        made = load_policy(policy)
        config = self.make_config(made)
        device = f"{self.device}, simulated"
        bar = tqdm(total=len(workload), desc=policy, disable=quiet, leave=False)

        def on_progress(num_ended: int, total: int) -> None:
            del total
            bar.update(num_ended - bar.n)

        latency = self.make_latency()
        with ExitStack() as stack:
            stack.enter_context(failures_of(policy, made))
            stack.enter_context(closing(bar))
            sinks = []
            if log_path is not None:
                header = LogHeader.of(
                    config,
                    source="simulator",
                    num_steps_ahead=self.steps_ahead,
                    model=self.shape.as_dict(),
                    device=device,
                )
                sinks.append(stack.enter_context(StepLogWriter(log_path, header)))
            return simulate(
                workload,
                config,
                latency,
                num_steps_ahead=self.steps_ahead,
                record_blocks=config.num_blocks <= RECORDED_BLOCKS,
                model=self.shape,
                device=device,
                sinks=sinks,
                on_progress=on_progress,
            )


def make_setting(options: Mapping[str, Any], *, policy: str | None = None) -> Setting:
    """Makes the setting of a command; says what of it is of the log that `--fit-log` names.

    Args:
        options: Values of the shared options by name.
        policy: What the user gave; None for the log's, or else "mixed".

    Raises:
        NvError: The log cannot be read or has too few steps.
        OSError: Its file cannot be read.
    """
    values = {**options, "policy": "mixed" if policy is None else policy, "fitted": None}
    path = values.pop("fit_log")
    if path is None:
        return _with_remarks(Setting(**values))
    log = read_step_log(path)
    found = fit(log)
    source = click.get_current_context().get_parameter_source
    given = {name for name in options if source(name) is ParameterSource.COMMANDLINE}
    values, notes = take_defaults(
        values, log.header, given if policy is None else {*given, "policy"}
    )
    error = f"error on steps held out {found.held_out_error:.1%}"
    for note in (f"fitted to {found.num_steps} steps of {path}; {error}", *notes):
        click.echo(note, err=True)
    device = f"steps of {log.header.device or 'an unknown device'}"
    return _with_remarks(Setting(**{**values, "fitted": FittedTimes(found.latency, device)}))


def _with_remarks(setting: Setting) -> Setting:
    """Says what the simulation leaves out of a setting; returns the setting."""
    is_fp8 = _KV_DTYPE_BYTES.get(setting.kv_cache_dtype or "auto") == 1
    if is_fp8 and not setting.hardware.converts_fp8:
        click.echo(
            f"{setting.gpu} has no fp8 conversion: the engine holds as many tokens there, but its "
            "attention is PyTorch's, much slower than simulated",
            err=True,
        )
    return setting


def say_if_none_served(log: StepLog, prefix: str = "") -> None:
    """Says on standard error why no request was served, if none was."""
    requests = log.all_requests
    if any(request.finish_reason in SERVED for request in requests):
        return
    first = next((request.message for request in requests if request.message), "no reason given")
    click.echo(
        f"{prefix}none of the {len(requests)} requests was served; the first because: {first}",
        err=True,
    )


_NO_CONFIG = (
    *(ValueError, TypeError, AttributeError, KeyError),
    *(ZeroDivisionError, OverflowError, RecursionError),
)
"""What a JSON file of anything else raises while sizes are looked for in it."""


def load_shape(name: str) -> ModelShape:
    """Returns a model's shape by its name, or from its `config.json`.

    Raises:
        ConfigError: There is no such model or file, or the file is no config.
    """
    path = Path(name)
    if not path.exists():
        return find_model(name)
    if path.is_dir():
        path = path / "config.json"
    try:
        return ModelShape.from_config(json.loads(path.read_text("utf-8")), name=Path(name).name)
    except _NO_CONFIG as error:
        raise ConfigError(f"{path} is no config of a model: {error}") from error


_COUNT = click.IntRange(min=1)

_MODEL = click.option(
    "--model",
    "-m",
    default="qwen3-8b",
    show_default=True,
    help=f"A config.json, or one of {', '.join(MODELS)}.",
)
_OPTIONS = (
    click.option(
        "--workload",
        "-w",
        default="azure-conversation",
        show_default=True,
        help=f"A trace or table, or one of {', '.join(LOOK_ALIKES)}.",
    ),
    click.option("--num-requests", "-n", type=_COUNT, help="Only so many requests."),
    click.option("--rate", type=float, help="Mean requests per second, instead of the trace's."),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option(
        "--kv-cache-dtype",
        type=click.Choice(list(_KV_DTYPE_BYTES)),
        show_default="auto, or that of --fit-log's model",
        help="auto for the model's dtype; fp8 (or fp8_e4m3) halves the KV cache of a model in "
        "bfloat16, and the engine's kernels for it need compute capability 8.9.",
    ),
    click.option("--gpu", type=click.Choice(list(HARDWARE)), default="h200", show_default=True),
    click.option("--tensor-parallel-size", "--tp", type=_COUNT, default=1, show_default=True),
    click.option(
        "--fit-log",
        type=click.Path(path_type=Path),
        help="An engine's step log: the times are fitted to it instead of taken from the model's "
        "and GPU's sheets, and its limits, policy and model are the defaults.",
    ),
    click.option("--num-blocks", type=_COUNT, help="KV blocks, instead of what the GPU holds."),
    click.option("--block-size", type=_COUNT, default=16, show_default=True),
    click.option("--max-num-seqs", type=_COUNT, default=256, show_default=True),
    click.option("--max-num-batched-tokens", type=_COUNT, default=8192, show_default=True),
    click.option("--max-model-len", type=click.IntRange(min=2), help="Most tokens of a sequence."),
    click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True),
    click.option(
        "--steps-ahead",
        type=click.IntRange(0, 1),
        default=1,
        show_default=True,
        help="Steps launched before the oldest is collected; the engine does 1 on CUDA.",
    ),
    click.option("--ttft-ms", type=float, help="Objective for the time to the first token."),
    click.option("--tpot-ms", type=float, help="Objective for the time per output token."),
    click.option("--e2e-ms", type=float, help="Objective for the whole request."),
)


def setting_options(command: _Command) -> _Command:
    """Adds the shared options to a command, which gets them as one keyword each."""
    return _MODEL(options_but_model(command))


def options_but_model(command: _Command) -> _Command:
    """Adds the shared options but `--model`, for a command whose argument that is."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
