"""AsyncLLM on a CUDA device: a thread other than the one that loaded the model runs the steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_checkpoints
from nv_core import RequestOutputKind, SamplingParams
from nv_runtime import LLM, AsyncLLM, RequestOutput
from tiny_checkpoints import TinySpec
from tiny_engines import joined, options, tokens_of

pytestmark = pytest.mark.gpu

PROMPTS = [list(range(3, 3 + length)) for length in (5, 40, 17, 64, 1, 30)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=5, max_tokens=25, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=6, top_k=9, top_p=0.9, max_tokens=20, ignore_eos=True),
]
REQUESTS = [(prompt, PARAMS[index % 3]) for index, prompt in enumerate(PROMPTS * 4)]


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_tasks_get_what_the_synchronous_engine_answers(tmp_path: Path, *, eager: bool) -> None:
    # head_dim 64 is the smallest that every attention backend takes.
    spec = TinySpec(family="qwen3", head_dim=64, hidden_size=128)
    path = str(tiny_checkpoints.write_checkpoint(tmp_path, spec))
    settings: dict[str, Any] = options(
        device="cuda",
        block_size=16,
        attention_backend="triton",
        enforce_eager=eager,
        skip_tokenizer_init=True,
    )
    with LLM(path, **settings) as llm:
        prompts, params = zip(*REQUESTS, strict=True)
        wanted = [tokens_of(o) for o in llm.generate(prompts, params, use_tqdm=False)]

    async def deltas_of(generator: AsyncGenerator[RequestOutput, None]) -> list[int]:
        return joined([output async for output in generator])[1]

    async def leave(llm: AsyncLLM) -> None:
        for count in range(1, 8):
            generator = llm.generate(PROMPTS[1], PARAMS[1])
            for _ in range(count):
                await anext(generator)
            await generator.aclose()

    async def main() -> None:
        async with AsyncLLM(path, **settings) as llm:
            tasks = [
                deltas_of(llm.generate(p, s.clone(output_kind=RequestOutputKind.DELTA)))
                for p, s in REQUESTS
            ]
            results = await asyncio.gather(*tasks, leave(llm))
            assert results[: len(wanted)] == wanted

    asyncio.run(asyncio.wait_for(main(), timeout=120))
