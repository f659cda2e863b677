"""AsyncLLM over two ranks: the same answers, and a rank that dies is everybody's error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoints
from forked_ranks import In, die, fork_ranks
from nv_core import EngineDeadError, SamplingParams
from nv_runtime import LLM, AsyncLLM, RequestOutput
from nv_runtime.ranks.errors import RankError
from tiny_checkpoints import TinySpec
from tiny_engines import options, tokens_of

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8] * 20, [9, 10]]
RANKS: dict[str, Any] = options(
    tensor_parallel_size=2, rank_timeout_s=60, rank_start_timeout_s=60, skip_tokenizer_init=True
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write_checkpoint(
        tmp_path_factory.mktemp("tiny"), TinySpec(num_heads=4, num_kv_heads=2)
    )


async def last_of(generator: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    outputs = [output async for output in generator]
    return outputs[-1]


def test_tasks_get_what_one_rank_answers(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(checkpoint), **options(skip_tokenizer_init=True)) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    fork_ranks(monkeypatch)

    async def main() -> None:
        async with AsyncLLM(str(checkpoint), **RANKS) as llm:
            answers = await asyncio.gather(*(last_of(llm.generate(p, GREEDY)) for p in PROMPTS))
            assert [tokens_of(a) for a in answers] == [tokens_of(o) for o in outputs]

    asyncio.run(asyncio.wait_for(main(), timeout=60))


def test_a_rank_that_dies_is_everybodys_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks(monkeypatch, {1: In("nv_runtime.model_runner:ModelRunner", "launch", die, 2)})

    async def main() -> None:
        llm = AsyncLLM(str(checkpoint), **RANKS)
        results = await asyncio.gather(
            *(last_of(llm.generate(p, GREEDY)) for p in PROMPTS), return_exceptions=True
        )
        for result in results:
            assert isinstance(result, EngineDeadError)
            assert isinstance(result.__cause__, RankError)
        with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
            await last_of(llm.generate(PROMPTS[0], GREEDY))
        llm.shutdown()

    asyncio.run(asyncio.wait_for(main(), timeout=60))
