"""The flags that commands share: one for each option of `LLM`, one for each sampling parameter.

A flag has the name of the field it sets. What is not given is not passed on, so defaults are those
of `EngineConfig`, `SamplingParams` and the model.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import click

from nv_core.errors import RequestError
from nv_core.policies import SHIPPED_POLICIES

__all__ = [
    "ENGINE_FLAGS",
    "SAMPLING_FLAGS",
    "Flag",
    "chat_options",
    "common_options",
    "engine_options",
    "given",
    "parse_bytes",
    "parse_json_object",
    "parse_length",
    "parsed_by",
    "sampling_options",
    "text_expected",
]

_Command = TypeVar("_Command", bound=Callable[..., Any])


_Parser = Callable[[str], object]

_MOST_BYTES = 2**63


@contextmanager
def text_expected(source: str) -> Iterator[None]:
    """Says which of a user's files is no text, where the decoder would only say so.

    Raises:
        RequestError: It is none.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise RequestError(f"{source} is no UTF-8 text ({error}); convert it first") from error


def parse_bytes(text: str) -> int:
    """Reads a number of bytes, plain or with a unit: 1073741824, 24GiB, 24G, 80GB.

    Raises:
        click.BadParameter: It is no size, or one that no machine has.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise click.BadParameter(
            f"{text!r} is no size; write a number of bytes, perhaps with K, M, G or T (times "
            "1024) or KB, MB, GB or TB (times 1000), as in 24GiB."
        )
    number, unit, binary, byte = match.groups()
    # A bare 24G means 24 GiB, as it does to most tools that speak of memory.
    base = 1000 if byte and not binary else 1024
    size = int(Fraction(number) * base ** " KMGT".index(unit.upper() or " "))
    if size >= _MOST_BYTES:
        raise click.BadParameter(f"{text[:40]!r} is more than any machine has.")
    return size


def parse_length(text: str) -> int | str:
    """Reads a number of tokens, or "auto".

    Raises:
        click.BadParameter: It is neither.
    """
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is neither a number of tokens nor auto.") from error


def parse_json_object(text: str) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        click.BadParameter: It is other JSON, or none.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no JSON: {error}.") from error
    if not isinstance(content, dict):
        raise click.BadParameter(f'{text!r} is no JSON object; write {{"name": value}}.')
    return content


def parsed_by(
    parse: _Parser,
) -> Callable[[click.Context, click.Parameter, str | None], object]:
    """Makes a click callback that parses a value if one is given."""

    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> object:
        return None if value is None else parse(value)

    return callback


@dataclass(frozen=True)
class Flag:
    """One flag, named after the field that it sets.

    Args:
        name: The field.
        help: What it does, for `--help`.
        type: Of its value.
        parse: Makes the value from text; None if `type` does.
        is_switch: Whether it takes no value and has a `--no-` form.
        is_repeatable: Whether it may be given several times.
    """

    name: str
    help: str
    type: type[int] | type[float] | type[str] = str
    parse: _Parser | None = None
    is_switch: bool = False
    is_repeatable: bool = False

    def decorate(self, command: _Command) -> _Command:
        """Adds the flag to a command."""
        flag = self.name.replace("_", "-")
        if self.is_switch:
            names = f"--{flag}/--no-{flag}"
            return click.option(names, self.name, help=self.help, default=None)(command)
        return click.option(
            f"--{flag}",
            self.name,
            help=self.help,
            type=self.type,
            multiple=self.is_repeatable,
            callback=None if self.parse is None else parsed_by(self.parse),
        )(command)


ENGINE_FLAGS = (
    Flag("revision", "Branch, tag or commit on the Hub."),
    Flag("dtype", "auto, bfloat16, float16 or float32."),
    Flag("device", "auto, cpu, cuda or cuda:N."),
    Flag(
        "max_model_len",
        "Most tokens of a sequence, prompt and output; auto for what fits.",
        parse=parse_length,
    ),
    Flag("max_num_seqs", "Most sequences at once.", int),
    Flag("max_num_batched_tokens", "Most tokens in one step.", int),
    Flag("block_size", "Tokens per KV block.", int),
    Flag("num_gpu_blocks_override", "Number of KV blocks, whatever memory there is.", int),
    Flag("gpu_memory_utilization", "Share of the GPU's memory to fill.", float),
    Flag("kv_cache_memory_bytes", "Size of the KV cache, as in 4GiB.", parse=parse_bytes),
    Flag(
        "kv_cache_dtype",
        "auto, or fp8 for half the memory of 16 bits; fast from compute capability 8.9 on.",
    ),
    Flag("tensor_parallel_size", "Number of GPUs that share the model.", int),
    Flag("distributed_executor", "Who starts the ranks: mp, or external (torchrun)."),
    Flag("distributed_executor_backend", "vLLM's name of that: uni, mp or external_launcher."),
    Flag("collective_backend", "How ranks talk: auto, nccl or gloo."),
    Flag("fused_all_reduce", "Sum small messages over symmetric memory.", is_switch=True),
    Flag("rank_timeout_s", "Seconds that a step may take before ranks count as lost.", float),
    Flag("rank_start_timeout_s", "Seconds that ranks may take to be ready.", float),
    Flag("enforce_eager", "Never replay CUDA graphs.", is_switch=True),
    Flag("graph_capture", "When CUDA graphs are captured: idle, lazy or start."),
    Flag("async_scheduling", "Plan the next step while the last one runs.", is_switch=True),
    Flag("enable_prefix_caching", "Share the KV blocks of equal prefixes.", is_switch=True),
    Flag("attention_backend", "auto, torch, triton, flash_attn or flash_attn_3."),
    Flag("scheduling_policy", f"What a step runs first: {', '.join(SHIPPED_POLICIES)}."),
    Flag("load_format", "auto, safetensors, gguf, or dummy for random weights."),
    Flag("generation_config", "auto, vllm to ignore the model's sampling defaults, or a folder."),
    Flag(
        "override_generation_config",
        'Other sampling defaults, as in {"temperature": 0.5}.',
        parse=parse_json_object,
    ),
    Flag("max_logprobs", "Most log-probabilities at each position; -1 for no limit.", int),
    Flag("seed", "Seed of all random draws.", int),
    Flag("disable_log_stats", "Count nothing, and log no load.", is_switch=True),
    Flag("log_stats_interval_s", "Seconds between lines about the load in the log.", float),
    Flag("step_log", "Write what each step does and when to this file, for nv-sim report."),
)

SAMPLING_FLAGS = (
    Flag("temperature", "0 always takes the most probable token.", float),
    Flag("top_p", "Sample from the most probable tokens that reach this sum.", float),
    Flag("top_k", "Sample from this many most probable tokens.", int),
    Flag("min_p", "Drop tokens less probable than this share of the best one's.", float),
    Flag("presence_penalty", "Above 0 discourages tokens that were generated before.", float),
    Flag("frequency_penalty", "The same for each time that they were.", float),
    Flag("repetition_penalty", "Above 1 discourages repetition, of the prompt as well.", float),
    Flag("min_tokens", "Fewest tokens to generate.", int),
    Flag("ignore_eos", "Go on past the model's end token.", is_switch=True),
    Flag("stop_token_ids", "Further token id that ends the text.", int, is_repeatable=True),
    Flag("stop", "Text that ends the answer, and is cut off.", is_repeatable=True),
    Flag(
        "include_stop_str_in_output",
        "Do not cut off the stop text.",
        is_switch=True,
    ),
    Flag("skip_special_tokens", "Leave special tokens out of the text.", is_switch=True),
)


def engine_options(command: _Command) -> _Command:
    """Adds a flag for each option of `LLM`."""
    return _add(command, ENGINE_FLAGS)


def sampling_options(command: _Command) -> _Command:
    """Adds a flag for each sampling parameter but `max_tokens`, whose default is the command's."""
    return _add(command, SAMPLING_FLAGS)


def _add(command: _Command, flags: Iterable[Flag]) -> _Command:
    # Decorators apply from the last to the first.
    for flag in reversed(tuple(flags)):
        command = flag.decorate(command)
    return command


def given(values: Mapping[str, Any], flags: Iterable[Flag]) -> dict[str, Any]:
    """Picks the values of the flags that stood on the command line."""
    return {flag.name: values[flag.name] for flag in flags if values[flag.name] not in (None, ())}


def _read_text(file: str) -> str:
    with text_expected(file):
        return Path(file).read_text(encoding="utf-8")


def chat_options(command: _Command) -> _Command:
    """Adds the flags of conversations."""
    command = click.option(
        "--chat-template-kwargs",
        callback=parsed_by(parse_json_object),
        metavar="JSON",
        help="Variables of the template, as in '{\"enable_thinking\": false}'.",
    )(command)
    command = click.option(
        "--chat-template",
        type=click.Path(exists=True, dir_okay=False),
        callback=parsed_by(_read_text),
        help="File with a Jinja template to use instead of the model's.",
    )(command)
    return click.option("--system", metavar="TEXT", help="The conversation's system message.")(
        command
    )


def common_options(command: _Command) -> _Command:
    """Adds the flags that every command has; they set fields of the `CliSession`."""
    for names, help_text in (
        (("--debug",), "Show the traceback of errors."),
        (("--verbose", "-v"), "Log what the engine does."),
        (("--quiet", "-q"), "Show no progress and no statistics."),
    ):
        command = click.option(
            *names, is_flag=True, expose_value=False, callback=_set_on_session, help=help_text
        )(command)
    return command


def _set_on_session(
    ctx: click.Context,
    param: click.Parameter,
    value: bool,  # noqa: FBT001 - click's calling convention
) -> None:
    if param.name == "verbose" and value:
        logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
        for package in ("nv_core", "nv_models", "nv_runtime"):
            logging.getLogger(package).setLevel(logging.INFO)
    setattr(ctx.obj, str(param.name), value)
