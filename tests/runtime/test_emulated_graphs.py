"""The runner with graphs, on a CPU; see `emulated_graphs` for what stands in for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nv_runtime.captured_graphs
import nv_runtime.cuda_graphs
import tiny_checkpoints
from emulated_graphs import EmulatedGraph, Emulator, Output
from nv_core import SamplingParams, Step
from nv_runtime import LLM
from tiny_engines import options


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"))


def make_llm(checkpoint: Path, **changes: Any) -> LLM:  # noqa: ANN401 - LLM's own options
    defaults = options(max_model_len=256, num_gpu_blocks_override=300, skip_tokenizer_init=True)
    return LLM(str(checkpoint), **{**defaults, **changes})


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def random_requests(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(131) for _ in range(rng.randrange(1, 60))] for _ in range(20)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 1.2, "top_k": 5},
        {"temperature": 0.7, "repetition_penalty": 1.3},
        {"temperature": 0.8, "frequency_penalty": 0.9, "presence_penalty": -0.5, "top_p": 0.9},
        {"temperature": 1.1, "logit_bias": {3: 4.0, 9: -50.0}, "min_p": 0.05},
        {"temperature": 1.3, "allowed_token_ids": list(range(5, 131, 3))},
        {"temperature": 0.6, "bad_words": [[7], [5, 9], [1, 2, 3, 4]]},
        {"temperature": 1.0, "min_tokens": 4, "stop_token_ids": list(range(0, 131, 9))},
    ]
    params = [
        SamplingParams(
            seed=i, max_tokens=rng.randrange(4, 30), ignore_eos=True, **rng.choice(kinds)
        )
        for i in range(20)
    ]
    return prompts, params


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_graphs_change_no_token(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    ahead: bool,  # noqa: FBT001 - a parameter
) -> None:
    requests = random_requests(seed)
    options = {"max_num_seqs": 7, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 48}
    with make_llm(checkpoint, **options) as llm:
        expected = run(llm, *requests)
    with monkeypatch.context() as patch:
        emulator = Emulator(patch)
        with make_llm(checkpoint, async_scheduling=ahead, **options) as llm:
            assert run(llm, *requests) == expected
            assert run(llm, *requests) == expected
        assert sum(graph.num_replays for graph in emulator.graphs) > 20


class ChunksThatReserve:
    """Admits a whole prompt's blocks at once, and computes it a few tokens at a time."""

    def schedule(self, step: Step) -> None:
        for seq in [*step.running, *step.waiting]:
            step.take(seq, 16 if step.uncached_tokens(seq) > 1 else None, reserve=seq.num_tokens)


@pytest.mark.parametrize("policy", ["mixed", "prefill_first", ChunksThatReserve()])
def test_short_chunks_of_a_long_prompt_hold_more_blocks_than_they_have_computed(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: Any,  # noqa: ANN401
) -> None:
    monkeypatch.setattr(nv_runtime.cuda_graphs, "_SMALLEST_CONTEXT_BOUND", 16)
    prompts = [[i % 131 for i in range(200)], [5] * 30]
    params = [SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)] * 2
    with make_llm(checkpoint) as llm:
        expected = run(llm, prompts, params)
    with monkeypatch.context() as patch:
        emulator = Emulator(patch)
        options = {"scheduling_policy": policy, "max_num_batched_tokens": 24}
        with make_llm(checkpoint, **options) as llm:
            assert run(llm, prompts, params) == expected
        assert emulator.graphs


@pytest.mark.parametrize("num_captures", [0, 1, 3])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_no_memory_for_a_graph_changes_no_token(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_captures: int,
    error: type[Exception],
) -> None:
    prompts, params = random_requests(7)
    with make_llm(checkpoint, enforce_eager=True) as llm:
        expected = run(llm, prompts, params)
    emulator = Emulator(monkeypatch)
    num_attempts = 0

    def capture(run: Callable[[], Output], *where: object) -> tuple[EmulatedGraph, Output]:
        nonlocal num_attempts
        num_attempts += 1
        if len(emulator.graphs) < num_captures:
            return emulator.capture(run, *where)
        try:
            raise error("CUDA out of memory")
        finally:
            # Ending a capture that failed fails as well.
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(nv_runtime.captured_graphs, "capture", capture)
    with make_llm(checkpoint, async_scheduling=True) as llm:
        assert run(llm, prompts, params) == expected
        llm.llm_engine.scheduler.check_invariants()
    assert len(emulator.graphs) == num_captures
    assert num_attempts - num_captures in (1, 2)  # once for each kind of graph
    warnings = [record for record in caplog.records if "no memory is left" in record.message]
    assert len(warnings) == num_attempts - num_captures


def test_other_errors_of_a_capture_are_not_swallowed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Emulator(monkeypatch)

    def capture(*_: object) -> None:
        raise RuntimeError("a kernel that cannot be captured")

    monkeypatch.setattr(nv_runtime.captured_graphs, "capture", capture)
    with (
        make_llm(checkpoint) as llm,
        pytest.raises(RuntimeError, match="a kernel that cannot be captured"),
    ):
        run(llm, *random_requests(7))
