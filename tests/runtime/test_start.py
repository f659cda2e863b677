"""What a start imports, and what it says about its phases."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from nv_runtime import LLM
from nv_runtime.bench.shapes import materialised

NOT_NEEDED = {
    # Triton's compiler, on a device that it does not compile for
    "triton",
    # text, in an engine that makes none
    "tokenizers",
    "jinja2",
    # downloads, the command line, and what only the tests need
    "huggingface_hub",
    "click",
    "rich",
    "transformers",
    "gguf",
    # PyTorch's own compiler
    "torch._dynamo",
    "torch._inductor",
    "sympy",
}

START = """
import json, sys
import torch
before = set(sys.modules)
from nv_runtime import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", show_progress=False, **json.loads(sys.argv[2])) as llm:
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_a_start_imports_only_what_it_needs() -> None:
    with materialised("qwen3-tiny") as (path, options):
        command = [sys.executable, "-c", START, path, json.dumps(options)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = set(json.loads(done.stdout))
    assert "nv_runtime.llm" in imported
    assert not imported & NOT_NEEDED


def test_the_log_says_how_long_each_phase_took(caplog: pytest.LogCaptureFixture) -> None:
    with materialised("qwen3-tiny") as (path, options), caplog.at_level(logging.INFO):
        LLM(path, device="cpu", show_progress=False, **options).shutdown()
    (line,) = (r.getMessage() for r in caplog.records if r.getMessage().startswith("ready in"))
    for phase in ("configuration and tokenizer", "weights", "KV cache"):
        assert phase in line
