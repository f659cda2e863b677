"""A seed reproduces a request's tokens, whatever runs beside it and however the engine runs it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoints
from nv_core import RequestOutputKind, SamplingParams
from nv_runtime import LLM, AsyncLLM, RequestOutput
from tiny_engines import assert_idle, options, tokens_of

PROMPT = "the quick brown fox jumps over the lazy dog"
WAYS: list[dict[str, Any]] = [
    {"temperature": 1.3},
    {"temperature": 1.5, "top_k": 7},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 1.4, "min_p": 0.05},
    {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 1.2, "presence_penalty": 1.5, "frequency_penalty": 0.7, "logprobs": 2},
    {"temperature": 1.5, "allowed_token_ids": [*range(0, 99, 4)], "logit_bias": {4: 2.0, 8: -9.0}},
    {"temperature": 0.9, "bad_words": [[t] for t in range(0, 90, 3)] + [[1, 2], [5, 1, 7]]},
    {"temperature": 1.1, "min_tokens": 16, "stop_token_ids": [*range(0, 99, 2)]},
    {
        "temperature": 0.0,
        "repetition_penalty": 1.4,
        "frequency_penalty": -0.3,
        "prompt_logprobs": 1,
    },
]
SEEDED = [
    SamplingParams(seed=seed, max_tokens=16, ignore_eos=True, **way)
    for seed, way in enumerate(WAYS, start=42)
]
COMPANY: list[tuple[str, SamplingParams]] = [
    ("she sells sea shells on the sea shore", SamplingParams(max_tokens=30, ignore_eos=True)),
    ("x", SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)),
    ("1 2 3 4 5 6", SamplingParams(seed=42, top_k=3, max_tokens=18, ignore_eos=True)),
    (PROMPT, SamplingParams(seed=7, max_tokens=12, ignore_eos=True, repetition_penalty=1.2)),
    ("again and again", SamplingParams(n=3, seed=42, max_tokens=9, ignore_eos=True)),
]
ENGINES: dict[str, dict[str, Any]] = {
    "in step": {"async_scheduling": False},
    "one step ahead": {"async_scheduling": True},
    "chunks of 3": {"max_num_batched_tokens": 3},
    "chunks of 7, ahead": {"max_num_batched_tokens": 7, "async_scheduling": True},
    "no prefix cache": {"enable_prefix_caching": False},
    "prompts first": {"scheduling_policy": "prefill_first"},
    "two at a time": {"max_num_seqs": 2, "async_scheduling": True},
    "preempted": {"num_gpu_blocks_override": 26},
    "preempted, chunked, ahead": {
        "num_gpu_blocks_override": 26,
        "max_num_batched_tokens": 5,
        "async_scheduling": True,
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True)


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[list[int]]:
    """The tokens of each way of sampling, from a request that nothing runs beside or before."""
    tokens = []
    for params in SEEDED:
        with LLM(str(checkpoint), **options()) as llm:
            tokens.append(tokens_of(llm.generate(PROMPT, params, use_tqdm=False)[0]))
    assert len({tuple(row) for row in tokens}) == len(SEEDED)
    return tokens


def num_preemptions(outputs: list[RequestOutput]) -> int:
    return sum(output.metrics.num_preemptions for output in outputs if output.metrics is not None)


@pytest.mark.parametrize("name", ENGINES)
def test_in_company(checkpoint: Path, alone: list[list[int]], name: str) -> None:
    # Seeded requests stand between the others, each once before and once behind them.
    prompts = [PROMPT] * len(SEEDED) + [prompt for prompt, _ in COMPANY] + [PROMPT] * len(SEEDED)
    params = [*SEEDED, *(params for _, params in COMPANY), *reversed(SEEDED)]
    settings = options(**{"num_gpu_blocks_override": 400, **ENGINES[name]})
    with LLM(str(checkpoint), **settings) as llm:
        runs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
        assert_idle(llm.llm_engine, num_blocks=settings["num_gpu_blocks_override"])
    for outputs in runs:
        tokens = [tokens_of(output) for output in outputs]
        assert tokens[: len(alone)] == alone
        assert tokens[-len(alone) :] == alone[::-1]
    # What the name promises has happened.
    assert (num_preemptions(runs[0]) > 0) == name.startswith("preempted")
    assert (runs[1][0].num_cached_tokens == 0) == (name == "no prefix cache")
    seeded_neighbour = len(SEEDED) + 2
    assert tokens_of(runs[0][seeded_neighbour]) == tokens_of(runs[1][seeded_neighbour])


def test_in_tasks_that_come_and_go(checkpoint: Path, alone: list[list[int]]) -> None:
    async def tokens(llm: AsyncLLM, params: SamplingParams, delay: float) -> list[int]:
        await asyncio.sleep(delay)
        final = params.clone(output_kind=RequestOutputKind.FINAL_ONLY)
        (output,) = [output async for output in llm.generate(PROMPT, final)]
        return tokens_of(output)

    async def bystander(llm: AsyncLLM, prompt: str, params: SamplingParams) -> None:
        for count in range(1, 6):
            seen = 0
            generator = llm.generate(prompt, params)
            async for _ in generator:
                seen += 1
                if seen == count:
                    await generator.aclose()

    async def main() -> None:
        async with AsyncLLM(str(checkpoint), **options(async_scheduling=True)) as llm:
            others = [bystander(llm, prompt, params) for prompt, params in COMPANY]
            mine = [tokens(llm, p, 0.004 * place) for place, p in enumerate(SEEDED)]
            results = await asyncio.gather(*mine, *others)
        assert list(results[: len(alone)]) == alone

    asyncio.run(asyncio.wait_for(main(), timeout=60))
