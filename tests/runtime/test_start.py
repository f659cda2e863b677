"""What a start imports, and what it says about its phases."""

from __future__ import annotations

import gc
import json
import logging
import re
import subprocess
import sys
from time import monotonic

import pytest
import torch

import nv_runtime.builder
import nv_runtime.start_times
from nv_core import CapacityError
from nv_runtime import LLM, SamplingParams
from nv_runtime.bench.shapes import materialised
from nv_runtime.prompt import TokenizedPrompt
from nv_runtime.start_times import StartTimes

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


PHASES = [
    "configuration",
    "device",
    "tokenizer",
    "attention backend",
    "weights",
    "KV cache",
    "engine",
    "kernels",
    "CUDA graphs",
]


def test_the_log_has_a_table_of_phases_and_a_line_for_the_first_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "nv_runtime.start_times")
    start = monotonic()
    with (
        materialised("qwen3-tiny") as (path, options),
        LLM(path, device="cpu", show_progress=False, **options) as llm,
    ):
        assert [phase.name for phase in llm.start_phases] == PHASES
        (table,) = caplog.messages
        head, *rows = table.splitlines()
        assert re.fullmatch(r"ready in \d+\.\d\d s; imported before that: .*nv \d+\.\d\d s", head)
        for phase, row in zip(llm.start_phases, rows, strict=True):
            assert row == f"  {phase.name:<17} {phase.seconds:6.2f} s  {phase.detail}".rstrip()
        for _ in range(2):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
        phases = {phase.name: phase for phase in llm.start_phases}
    assert list(phases) == [*PHASES, "first token"]
    assert re.fullmatch(r"0\.01 GB, \d+\.\d\d GB/s", phases["weights"].detail)
    assert "blocks of 16 tokens" in phases["KV cache"].detail
    assert phases["kernels"].detail == "0 compiled, 0 loaded from the cache"
    assert all(phase.seconds >= 0 for phase in phases.values())
    assert sum(phase.seconds for phase in phases.values()) <= monotonic() - start
    assert len(caplog.messages) == 2
    assert caplog.messages[1].startswith("first token ")


class Work:
    """Kernels and captures, as `StartTimes` sees both."""

    num_graphs = num_compiled = num_from_cache = 0
    seconds = 0.0
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Start:
    """A start on a clock that the test moves; kernels and captures move it, too."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        patch.setattr(nv_runtime.start_times, "monotonic", lambda: self.now)
        self.times = StartTimes({"torch": 2.0, "nv": 0.5})
        self.kernels, self.captures = Work(), Work()
        self.times.watch_kernels(self.kernels)
        self.times.watch_captures(self.captures)

    def compile(self, seconds: float) -> None:
        self.kernels.num_compiled += 1
        self.kernels.seconds += seconds
        self.now += seconds

    def capture(self, seconds: float) -> None:
        self.captures.num_graphs += 1
        self.captures.seconds += seconds
        self.now += seconds

    @property
    def rows(self) -> dict[str, tuple[float, str]]:
        return {phase.name: (phase.seconds, phase.detail) for phase in self.times.phases}


def test_every_moment_of_a_start_counts_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    start = Start(monkeypatch)
    start.now += 4
    start.times.end("weights", num_bytes=6_000_000_000)
    start.now += 1
    start.compile(8)
    start.capture(16)
    start.times.end("engine")
    start.times.log_ready()
    assert "ready in 29.00 s; imported before that: torch 2.00 s, nv 0.50 s\n" in caplog.text
    # Nobody asks for anything; graphs are captured meanwhile.
    start.now += 1000
    start.compile(100)
    start.capture(200)
    start.times.skip()
    start.now += 32
    start.compile(64)
    start.capture(128)
    start.times.note_first_token()
    assert start.rows == {
        "weights": (4, "6.00 GB, 1.50 GB/s"),
        "engine": (1, ""),
        "kernels": (8 + 64, "3 compiled, 0 loaded from the cache"),
        "CUDA graphs": (16 + 128, "3 captured"),
        "first token": (32, "its request, without kernels and graphs"),
    }
    assert (
        "first token 224.00 s after its request, 253.00 s of start and request together: kernels "
        "64.00 s (3 compiled, 0 loaded from the cache until now), CUDA graphs 128.00 s (3 captured "
        "until now), everything else 32.00 s"
    ) in caplog.text
    assert start.kernels.is_closed
    # What comes later is no part of the start.
    rows = start.rows
    start.capture(7)
    assert start.rows == rows


def test_a_first_request_that_ends_without_a_token_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with materialised("qwen3-tiny") as (path, options):
        llm = LLM(path, device="cpu", show_progress=False, **options)
    with llm:
        engine, clock = llm.llm_engine, [monotonic()]
        monkeypatch.setattr(nv_runtime.start_times, "monotonic", lambda: clock[0])
        prompt = TokenizedPrompt(None, [1, 2, 3])
        for waits in (500.0, 30.0):
            request = engine.add_request(prompt, SamplingParams(max_tokens=1))
            clock[0] += waits
            if waits == 500.0:
                engine.abort_request(request.request_id)
                clock[0] += 7000
        while engine.has_unfinished:
            engine.step()
        assert llm.start_phases[-1].name == "first token"
        assert llm.start_phases[-1].seconds == pytest.approx(30)


def test_times_of_imports_are_known_where_torch_came_with_them() -> None:
    report = (
        "from nv_runtime.import_times import IMPORT_SECONDS as s; print(list(s), min(s.values()))"
    )
    for first, names in (("from nv_runtime import LLM", ["torch", "nv"]), ("import torch", ["nv"])):
        command = [sys.executable, "-c", f"{first}\nimport nv_runtime\nnv_runtime.LLM\n{report}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found, _, least = done.stdout.rpartition(" ")
        assert found == str(names)
        assert float(least) > 0


@pytest.mark.parametrize("ends", ["by a failure", "unused"])
def test_nothing_listens_for_kernels_after_an_engine_that_made_no_token(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    watches: list[Work] = []

    def make(_device: torch.device) -> Work:
        watches.append(Work())
        return watches[-1]

    monkeypatch.setattr(nv_runtime.builder, "KernelWatch", make)
    with materialised("qwen3-tiny") as (path, options):
        options |= {"device": "cpu", "show_progress": False}
        if ends == "by a failure":
            with pytest.raises(CapacityError):
                LLM(path, kv_cache_memory_bytes=1, **options)
        else:
            llm = LLM(path, num_gpu_blocks_override=4, **options)
            assert not watches[0].is_closed
            del llm
            gc.collect()
    assert [watch.is_closed for watch in watches] == [True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_and_graphs_of_a_start_on_a_gpu_are_counted() -> None:
    with (
        materialised("qwen3-tiny") as (path, options),
        LLM(path, show_progress=False, kv_cache_memory_bytes=2**26, **options) as llm,
    ):
        # A prompt of one token is a decode step, which is captured at once.
        llm.generate([[1]], SamplingParams(max_tokens=1), use_tqdm=False)
        phases = {phase.name: phase for phase in llm.start_phases}
    assert phases["device"].detail.startswith("cuda")
    assert phases["CUDA graphs"].detail == "1 captured"
    assert phases["CUDA graphs"].seconds > 0
    # What earlier tests of this process have loaded is not loaded again.
    assert re.fullmatch(r"\d+ compiled, \d+ loaded from the cache", phases["kernels"].detail)
