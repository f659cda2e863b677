"""Greedy tokens equal transformers', token for token, in float32 on the CPU.

Every tiny model answers the same prompts alone, batched, cut into chunks at several budgets, with
prefix hits, and under forced preemption. KV memory is filled with NaN before use, so that reading
any slot that was not written shows in the tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import nv_runtime.builder
import tiny_checkpoints
from nv_core import SamplingParams
from nv_kernels import LayerKVCache
from nv_runtime import LLM, RequestOutput
from nv_runtime.kv_cache import allocate_kv_cache
from tiny_checkpoints import TinySpec
from tiny_engines import options

NUM_OUTPUT_TOKENS = 12
SPECS = {
    "qwen3": TinySpec(family="qwen3"),
    "qwen3-tied-gqa8": TinySpec(
        family="qwen3", tie_word_embeddings=True, num_heads=8, num_kv_heads=1, head_dim=16
    ),
    "qwen3-gqa1-odd": TinySpec(family="qwen3", vocab_size=257, num_heads=3, num_kv_heads=3),
    "qwen2": TinySpec(family="qwen2", head_dim=None),
    "qwen2-tied-gqa4": TinySpec(
        family="qwen2", head_dim=None, tie_word_embeddings=True, num_heads=8, num_kv_heads=2
    ),
    "llama": TinySpec(family="llama", head_dim=32),
    "llama-tied": TinySpec(
        family="llama", head_dim=None, tie_word_embeddings=True, vocab_size=199, num_kv_heads=1
    ),
    "mistral": TinySpec(family="mistral", head_dim=None),
}


@dataclass(frozen=True)
class Case:
    path: Path
    prompts: list[list[int]]
    expected: list[list[int]]


def make_prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(vocab_size)
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 24, 31, 32, 33, 48, 63, 64]
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    shared = prompts[-1]
    prompts += [shared[:32] + prompts[8], shared[:48], shared]
    return prompts


@pytest.fixture(scope="module", params=SPECS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    spec = SPECS[request.param]
    path = tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp(request.param), spec)
    model = tiny_checkpoints.make_model(spec)
    prompts = make_prompts(spec.vocab_size)
    return Case(
        path,
        prompts,
        [tiny_checkpoints.reference_greedy(model, p, NUM_OUTPUT_TOKENS) for p in prompts],
    )


@pytest.fixture
def make_llm(case: Case, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    def poisoned(*args: Any, **kwargs: Any) -> tuple[LayerKVCache, ...]:  # noqa: ANN401
        caches = allocate_kv_cache(*args, **kwargs)
        for cache in caches:
            cache.key.fill_(torch.nan)
            cache.value.fill_(torch.nan)
        return caches

    monkeypatch.setattr(nv_runtime.builder, "allocate_kv_cache", poisoned)

    def make(**changes: Any) -> LLM:  # noqa: ANN401 - LLM's own options
        defaults = options(num_gpu_blocks_override=1000, skip_tokenizer_init=True)
        return LLM(str(case.path), **{**defaults, **changes})

    return make


def generate(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    return llm.generate(prompts, params, use_tqdm=False)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_alone(case: Case, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(enable_prefix_caching=False)
    outputs = [generate(llm, [prompt])[0] for prompt in case.prompts]
    assert tokens_of(outputs) == case.expected


@pytest.mark.parametrize(("block_size", "ahead"), [(1, False), (3, True), (16, True), (256, False)])
def test_batched(
    case: Case,
    make_llm: Callable[..., LLM],
    block_size: int,
    ahead: bool,  # noqa: FBT001 - a parameter
) -> None:
    outputs = generate(make_llm(block_size=block_size, async_scheduling=ahead), case.prompts)
    assert tokens_of(outputs) == case.expected


@pytest.mark.parametrize(("budget", "ahead"), [(1, False), (5, True), (16, False), (37, True)])
@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_chunked(
    case: Case,
    make_llm: Callable[..., LLM],
    budget: int,
    ahead: bool,  # noqa: FBT001 - a parameter
    policy: str,
) -> None:
    llm = make_llm(max_num_batched_tokens=budget, scheduling_policy=policy, async_scheduling=ahead)
    assert tokens_of(generate(llm, case.prompts)) == case.expected


def test_with_prefix_hits(case: Case, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(async_scheduling=True)
    generate(llm, case.prompts)
    again = generate(llm, case.prompts)
    assert tokens_of(again) == case.expected
    for prompt, output in zip(case.prompts, again, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // 4 * 4
    # A conversation goes on: the answer itself is in the cache by now.
    turns = [prompt + answer for prompt, answer in zip(case.prompts, case.expected, strict=True)]
    warm = generate(llm, turns)
    cold = generate(make_llm(enable_prefix_caching=False), turns)
    assert tokens_of(warm) == tokens_of(cold)
    assert all(
        (output.num_cached_tokens or 0) >= len(t) - 8 for output, t in zip(warm, turns, strict=True)
    )


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_under_preemption(
    case: Case,
    make_llm: Callable[..., LLM],
    policy: str,
    ahead: bool,  # noqa: FBT001 - a parameter
) -> None:
    llm = make_llm(
        num_gpu_blocks_override=40,
        scheduling_policy=policy,
        max_num_batched_tokens=64,
        async_scheduling=ahead,
    )
    outputs = generate(llm, case.prompts)
    assert tokens_of(outputs) == case.expected
    preemptions = [output.metrics.num_preemptions for output in outputs if output.metrics]
    assert sum(preemptions) > 0
