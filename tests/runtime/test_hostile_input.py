"""What callers get wrong: the right error to that caller, everyone else unharmed, nothing left.

Every row goes through three doors (one bad prompt in a list for `generate`, a stream of its own,
AsyncLLM) while another request runs, whose answer must not change.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tiny_checkpoints
from nv_core import RequestError, SamplingParams
from nv_runtime import LLM, AsyncLLM, RequestOutput
from tiny_engines import assert_idle, options, tokens_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Hostile(NamedTuple):
    """A request that cannot be served.

    Attributes:
        prompt: What the caller gives as prompt.
        params: Fields of `SamplingParams`, or something else in its place.
        message: What the error says.
    """

    prompt: Any
    params: Any
    message: str


FINE: Any = "fine"
TABLE: dict[str, Hostile] = {
    # Prompts.
    "empty text": Hostile("", {}, "the prompt is empty"),
    "no tokens": Hostile({"prompt_token_ids": []}, {}, "prompt_token_ids is empty"),
    "token beyond the vocabulary": Hostile([331], {}, r"holds 331; .* \[0, 331\)"),
    "negative token": Hostile([5, -1], {}, "holds -1"),
    "token beyond 32 bits": Hostile([2**32], {}, "holds 4294967296"),
    "token beyond 64 bits": Hostile([2**63], {}, "holds 9223372036854775808"),
    "fraction for a token": Hostile([1.5], {}, "holds 1.5|prompt 1"),
    "None for a token": Hostile({"prompt_token_ids": [None]}, {}, "holds None"),
    "text for a token": Hostile({"prompt_token_ids": ["a"]}, {}, "holds 'a'"),
    "text for tokens": Hostile({"prompt_token_ids": "abc"}, {}, "must be a list of token ids"),
    "number for tokens": Hostile({"prompt_token_ids": 3}, {}, "must be a list of token ids"),
    "too long": Hostile([5] * 128, {}, "128 tokens .* max_model_len=128 .* 127"),
    "far too long": Hostile([5] * 100_000, {}, "100000 tokens .* max_model_len=128"),
    "lone surrogate": Hostile("a\ud800b", {}, "lone surrogate"),
    "unknown key": Hostile({"text": "hi"}, {}, "'prompt' or 'prompt_token_ids'"),
    "no key": Hostile({}, {}, "'prompt' or 'prompt_token_ids'"),
    "an image": Hostile({"prompt": "hi", "multi_modal_data": {"image": 1}}, {}, "only text models"),
    "number for text": Hostile({"prompt": 7}, {}, "must be a list of token ids"),
    "empty salt": Hostile({"prompt": "hi", "cache_salt": ""}, {}, "cache_salt must be"),
    "number for a salt": Hostile({"prompt": "hi", "cache_salt": 7}, {}, "cache_salt must be"),
    # Parameters.
    "temperature nan": Hostile(FINE, {"temperature": math.nan}, "temperature must be .* nan"),
    "temperature inf": Hostile(FINE, {"temperature": math.inf}, "temperature must be"),
    "temperature text": Hostile(FINE, {"temperature": "1"}, "temperature must be"),
    "temperature negative": Hostile(FINE, {"temperature": -1}, "temperature must be"),
    "top_p zero": Hostile(FINE, {"top_p": 0}, "top_p must be"),
    "top_p two": Hostile(FINE, {"top_p": 2}, "top_p must be"),
    "top_k fraction": Hostile(FINE, {"top_k": 0.4}, "top_k must be"),
    "top_k minus two": Hostile(FINE, {"top_k": -2}, "top_k must be"),
    "min_p negative": Hostile(FINE, {"min_p": -0.1}, "min_p must be"),
    "penalty zero": Hostile(FINE, {"repetition_penalty": 0}, "repetition_penalty must be"),
    "penalty three": Hostile(FINE, {"presence_penalty": 3}, "presence_penalty must be"),
    "n zero": Hostile(FINE, {"n": 0}, "n must be"),
    "n huge": Hostile(FINE, {"n": 10**9}, r"n must be .* \[1, 16384\]"),
    "n fraction": Hostile(FINE, {"n": 1.5}, "n must be"),
    "n with greedy": Hostile(FINE, {"n": 2, "temperature": 0}, "n must be 1 with greedy"),
    "max_tokens zero": Hostile(FINE, {"max_tokens": 0}, "max_tokens must be"),
    "max_tokens negative": Hostile(FINE, {"max_tokens": -1}, "max_tokens must be"),
    "min above max": Hostile(FINE, {"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is greater"),
    "seed beyond 64 bits": Hostile(FINE, {"seed": 2**64}, "seed must be"),
    "seed text": Hostile(FINE, {"seed": "a"}, "seed must be"),
    "empty stop": Hostile(FINE, {"stop": ["a", ""]}, "stop must hold"),
    "number as stop": Hostile(FINE, {"stop": [3]}, "stop must hold"),
    "stop without text": Hostile(FINE, {"stop": "a", "detokenize": False}, "needs the output text"),
    "stop token too large": Hostile(
        FINE, {"stop_token_ids": [400], "min_tokens": 2}, r"stop_token_ids holds 400.*\[0, 331\)"
    ),
    "bias beyond vocabulary": Hostile(FINE, {"logit_bias": {331: 1.0}}, "logit_bias holds 331"),
    "bias nan": Hostile(FINE, {"logit_bias": {3: math.nan}}, "logit_bias must"),
    "bias for a word": Hostile(FINE, {"logit_bias": {"abc": 1.0}}, "logit_bias must"),
    "nothing allowed": Hostile(FINE, {"allowed_token_ids": []}, "at least one token id"),
    "unknown allowed": Hostile(FINE, {"allowed_token_ids": [999]}, "allowed_token_ids holds 999"),
    "empty bad word": Hostile(FINE, {"bad_words": [""]}, "bad_words must"),
    "unknown bad token": Hostile(FINE, {"bad_words": [[331]]}, "bad_words holds 331"),
    "too many logprobs": Hostile(FINE, {"logprobs": 21}, "logprobs=21 is more than max_logprobs"),
    "logprobs minus two": Hostile(FINE, {"logprobs": -2}, "logprobs must be"),
    "structured outputs": Hostile(FINE, {"structured_outputs": {"json": "{}"}}, "not supported"),
    "output kind text": Hostile(FINE, {"output_kind": "delta"}, "output_kind must be"),
    "ignore_eos text": Hostile(FINE, {"ignore_eos": "yes"}, "ignore_eos must be"),
    "parameters as a dict": Hostile(FINE, [{"temperature": 1}], "sampling_params must be"),
}
ROWS = pytest.mark.parametrize("row", TABLE.values(), ids=TABLE.keys())


def params_of(row: Hostile) -> Any:  # noqa: ANN401 - it may be wrong on purpose
    return SamplingParams(**row.params) if isinstance(row.params, dict) else row.params[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), **options(async_scheduling=True)) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[int]:
    return tokens_of(llm.generate("the fox", GREEDY, use_tqdm=False)[0])


@ROWS
def test_one_bad_prompt_in_a_list(llm: LLM, expected: list[int], row: Hostile) -> None:
    running = llm.stream("the fox", GREEDY)
    next(running)
    with pytest.raises(RequestError, match=row.message):
        llm.generate(["a", row.prompt, "b"], [GREEDY, params_of(row), GREEDY], use_tqdm=False)
    assert tokens_of(list(running)[-1]) == expected
    assert_idle(llm.llm_engine)


@ROWS
def test_a_bad_stream(llm: LLM, expected: list[int], row: Hostile) -> None:
    running = llm.stream("the fox", GREEDY)
    next(running)
    with pytest.raises(RequestError, match=row.message):
        llm.stream([row.prompt], params_of(row))
    assert tokens_of(list(running)[-1]) == expected
    assert_idle(llm.llm_engine)


@pytest.fixture(scope="module")
def async_llm(checkpoint: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(str(checkpoint), **options(async_scheduling=True))
    yield llm
    llm.shutdown()


@ROWS
def test_a_bad_request_among_tasks(async_llm: AsyncLLM, expected: list[int], row: Hostile) -> None:
    async def last_of(generator: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
        outputs = [output async for output in generator]
        return outputs[-1]

    async def bad() -> RequestOutput:
        return await last_of(async_llm.generate(row.prompt, params_of(row)))

    async def main() -> None:
        good = async_llm.generate("the fox", GREEDY)
        await anext(good)
        results = await asyncio.gather(
            last_of(good),
            bad(),
            last_of(async_llm.generate("the fox", GREEDY)),
            bad(),
            return_exceptions=True,
        )
        for index in (0, 2):
            output = results[index]
            assert isinstance(output, RequestOutput)
            assert tokens_of(output) == expected
        for index in (1, 3):
            with pytest.raises(RequestError, match=row.message):
                raise results[index]  # type: ignore[misc]
        engine = async_llm._parts.engine
        while await asyncio.wrap_future(async_llm._thread.call(lambda: engine.has_work)):
            await asyncio.sleep(0)
        await asyncio.wrap_future(async_llm._thread.call(lambda: assert_idle(engine)))

    asyncio.run(asyncio.wait_for(main(), timeout=30))
