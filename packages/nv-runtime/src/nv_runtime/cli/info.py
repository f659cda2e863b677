"""`nv info`: what a model is, what it needs, and what fits. Reads no weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from nv_runtime.cli.options import common_options, parse_bytes, parsed_by

if TYPE_CHECKING:
    from rich.table import Table

    from nv_runtime.cli.plan import Fit, ModelFacts

__all__ = ["info"]


@click.command(short_help="Show what a model needs and what fits.")
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--dtype", default="auto", help="auto, bfloat16, float16 or float32.")
@click.option("--kv-cache-dtype", default="auto", help="auto, or fp8 for half the memory.")
@click.option("--device", default="auto", help="auto, cpu, cuda or cuda:N.")
@click.option(
    "--memory",
    callback=parsed_by(parse_bytes),
    metavar="BYTES",
    help="Memory to plan for, as in 24GiB, instead of this machine's: a GPU's unless --device cpu.",
)
@click.option(
    "--gpu-memory-utilization",
    type=float,
    default=0.9,
    show_default=True,
    help="Share of the GPU's memory to fill.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@common_options
def info(
    *,
    model: str,
    revision: str | None,
    dtype: str,
    kv_cache_dtype: str,
    device: str,
    memory: int | None,
    gpu_memory_utilization: float,
    as_json: bool,
) -> None:
    """Show the shapes of MODEL, the memory it needs, and what fits.

    No weights are read, nor downloaded for a model from the Hub.
    """
    # Imported here: these bring torch, which takes seconds.
    import torch

    from nv_models import open_checkpoint
    from nv_runtime.cli.plan import fit_memory, gather_facts
    from nv_runtime.engine_config import EngineConfig
    from nv_runtime.hub import resolve_model

    engine = EngineConfig(
        model=model,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        device=device,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    checkpoint = open_checkpoint(resolve_model(model, revision=revision, with_weights=False))
    # A size of memory stands for a GPU, which need not be here, unless the device is another.
    is_planned = memory is not None and device.partition(":")[0] in ("auto", "cuda")
    target = torch.device("cuda") if is_planned else engine.resolve_device()
    loaded_dtype = engine.resolve_dtype(checkpoint.config.dtype, target)
    facts = gather_facts(checkpoint, loaded_dtype, engine.resolve_kv_cache_dtype(loaded_dtype))
    fit = fit_memory(
        checkpoint.config, engine, device=target, dtype=loaded_dtype, memory_bytes=memory
    )
    if as_json:
        click.echo(json.dumps({"model": asdict(facts), "fit": asdict(fit)}, indent=2))
    else:
        _print(model, facts, fit)


def _print(model: str, facts: ModelFacts, fit: Fit) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_table(model, _shape_rows(facts)))
    console.print(_table("memory", _memory_rows(facts, fit)))
    if fit.kv_cache_bytes <= 0:
        console.print(
            f"Does not fit: {_size(-fit.kv_cache_bytes)} are missing. Use a smaller dtype, a "
            "smaller model or more memory."
        )
        return
    console.print(_table("fits at once", _fit_rows(facts, fit)))


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="bold", show_header=False, box=box.SIMPLE
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def _shape_rows(facts: ModelFacts) -> list[tuple[str, str]]:
    tied = ", tied to the LM head" if facts.tie_word_embeddings else ""
    stored = "no weight files here"
    if facts.stored_bytes is not None:
        stored = f"{_size(facts.stored_bytes)} ({facts.stored_as})"
    return [
        ("architecture", facts.architecture),
        ("parameters", _count(facts.num_parameters)),
        ("layers", str(facts.num_layers)),
        (
            "attention",
            f"{facts.num_heads} heads of {facts.head_dim}, {facts.num_kv_heads} for keys/values",
        ),
        ("widths", f"{facts.hidden_size} hidden, {facts.intermediate_size} in the MLP"),
        ("vocabulary", f"{facts.vocab_size} tokens{tied}"),
        ("context", f"{facts.max_position_embeddings} tokens"),
        ("on disk", stored),
        ("path", facts.path),
    ]


def _memory_rows(facts: ModelFacts, fit: Fit) -> list[tuple[str, str]]:
    return [
        ("weights", f"{_size(facts.weight_bytes)} in {facts.dtype}"),
        ("KV cache per token", f"{_size(facts.kv_bytes_per_token)} in {facts.kv_cache_dtype}"),
        (
            "KV cache of one full context",
            _size(facts.kv_bytes_per_token * facts.max_position_embeddings),
        ),
        (fit.memory, _size(fit.memory_bytes)),
        ("KV cache that the engine makes", _size(max(fit.kv_cache_bytes, 0))),
    ]


def _fit_rows(facts: ModelFacts, fit: Fit) -> list[tuple[str, str]]:
    context = facts.max_position_embeddings
    lengths = [length for length in (1024, 4096, 16384, 65536) if length < context]
    rows = [("tokens in the KV cache", f"{fit.num_kv_tokens}")]
    for length in (*lengths, context):
        rows.append((f"sequences of {length} tokens", f"{fit.num_kv_tokens / length:.1f}"))
    return rows


def _size(num_bytes: int) -> str:
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{value:.2f} {unit}"


def _count(number: int) -> str:
    for factor, unit in ((10**9, "billion"), (10**6, "million")):
        if number >= factor:
            return f"{number / factor:.2f} {unit}"
    return str(number)
