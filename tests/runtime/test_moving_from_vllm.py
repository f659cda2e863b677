"""The page for those who come from vLLM leaves nothing out, and promises only what is there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import nv_runtime
from nv_runtime import (
    AsyncLLM,
    CompletionOutput,
    EngineConfig,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)
from nv_runtime.vllm_options import _UNBUILT, _WITHOUT_EFFECT

PAGE = (Path(__file__).parents[2] / "docs" / "moving_from_vllm.md").read_text(encoding="utf-8")


def names_in(text: str) -> set[str]:
    """Names in code quotes; of `a(b)` and `a=b`, the `a`."""
    return {re.split(r"[(=]", code)[0] for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)}


def row(label: str) -> str:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {label} |")]
    return line


def test_every_option_has_its_place() -> None:
    own = {field.name for field in fields(EngineConfig)}
    told = names_in(row("the same")) | names_in(row("differs")) | names_in(row("ours"))
    assert own <= told
    assert names_in(row("any value, no effect")) >= _WITHOUT_EFFECT - own
    assert names_in(row("only the value that asks for nothing")) >= _UNBUILT.keys() - own


def test_every_field_is_named() -> None:
    told = names_in(PAGE)
    for kind in (SamplingParams, RequestOutput, CompletionOutput):
        assert {field.name for field in fields(kind)} <= told
    metrics = {name for name in dir(RequestMetrics) if name.endswith(("_time", "_ts", "_latency"))}
    assert names_in(row("`metrics`")) & metrics
    missing = "best_of use_beam_search truncate_prompt_tokens logits_processors stream_interval"
    assert not {field.name for field in fields(SamplingParams)} & set(missing.split())


def test_the_names_that_it_promises_are_there() -> None:
    promised = re.findall(r"`nv_runtime\.(\w+)", PAGE)
    assert {"AsyncLLM", "EngineDeadError", "EngineConfig"} <= set(promised)
    for name in promised:
        assert getattr(nv_runtime, name)
    methods = {"generate", "abort", "shutdown", "reset_prefix_cache", "get_tokenizer", "chat"}
    assert all(callable(getattr(AsyncLLM, name)) for name in methods)
    assert not hasattr(AsyncLLM, "encode")
