"""Several ranks give the tokens of one rank, in float32 on the CPU.

Every family, batched, cut into chunks, with prefix hits, under preemption, with replicated KV heads
and padded vocabularies, and every kind of sampling. Unused KV memory is NaN on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import nv_runtime.builder
import tiny_checkpoints
from forked_ranks import In, biased, fill_with_nan, fork_ranks, poisoned_pool
from nv_core import SamplingParams
from nv_runtime import LLM, RequestOutput
from nv_runtime.kv_cache import allocate_kv_cache
from tiny_checkpoints import TinySpec
from tiny_engines import options

pytestmark = pytest.mark.slow

NUM_OUTPUT_TOKENS = 7

# 131, 97 and 257 divide by neither 2 nor 4; with 4 ranks, 1 and 2 KV heads are replicated; of those
# that share 9 tokens, the first holds all and the others nothing but padding.
SPECS = {
    "qwen3": TinySpec(family="qwen3"),
    "qwen3-tied-one-kv-head": TinySpec(
        family="qwen3", tie_word_embeddings=True, num_heads=8, num_kv_heads=1, head_dim=16
    ),
    "qwen2": TinySpec(family="qwen2", head_dim=None, vocab_size=257),
    "llama-all-biases": TinySpec(
        family="llama", head_dim=32, attention_bias=True, mlp_bias=True, num_kv_heads=4
    ),
    "mistral": TinySpec(family="mistral", head_dim=None, vocab_size=97),
    "nine-tokens": TinySpec(family="llama", vocab_size=9),
}


@dataclass(frozen=True)
class Case:
    path: Path
    prompts: list[list[int]]
    params: list[SamplingParams]


def make_case(path: Path, spec: TinySpec) -> Case:
    rng = random.Random(spec.vocab_size)
    lengths = [1, 4, 5, 17, 33, 48, 9, 12]
    prompts = [[rng.randrange(spec.vocab_size) for _ in range(length)] for length in lengths]
    prompts += [prompts[-1][:32] + prompts[2], prompts[-1]]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 1.3, "seed": 5},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.7, "min_p": 0.02},
        {"temperature": 0.0, "repetition_penalty": 1.4},
        {"temperature": 0.9, "frequency_penalty": 0.8, "logit_bias": {3: 2.0}, "min_tokens": 3},
        {"temperature": 1.1, "allowed_token_ids": [1, 2, 5, 7], "bad_words": [[5], [1, 2]]},
    ]
    params = [
        SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, **kinds[index % len(kinds)])
        for index in range(len(prompts))
    ]
    return Case(tiny_checkpoints.write_checkpoint(path, spec), prompts, params)


@pytest.fixture(scope="module", params=SPECS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp(request.param), SPECS[request.param])


@pytest.fixture(scope="module")
def expected(case: Case) -> list[list[int]]:
    with make_llm(case, tensor_parallel_size=1) as llm:
        return tokens_of(generate(llm, case))


def make_llm(case: Case, **changes: Any) -> LLM:  # noqa: ANN401 - LLM's own options
    defaults = options(num_gpu_blocks_override=300, skip_tokenizer_init=True, rank_timeout_s=120)
    return LLM(str(case.path), **{**defaults, **changes})


@pytest.fixture
def start(case: Case, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    def start(size: int, **options: Any) -> LLM:  # noqa: ANN401
        fork_ranks(monkeypatch, dict.fromkeys(range(1, size), poisoned_pool))

        def poisoned(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return fill_with_nan(allocate_kv_cache, *args, **kwargs)

        monkeypatch.setattr(nv_runtime.builder, "allocate_kv_cache", poisoned)
        return make_llm(case, tensor_parallel_size=size, **options)

    return start


def generate(llm: LLM, case: Case) -> list[RequestOutput]:
    return llm.generate(case.prompts, case.params, use_tqdm=False)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("size", [2, 4])
def test_chunked_preempted_and_with_prefix_hits(
    start: Callable[..., LLM], case: Case, expected: list[list[int]], size: int
) -> None:
    options = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 34}
    with start(size, async_scheduling=size == 2, **options) as llm:
        outputs = generate(llm, case)
        assert tokens_of(outputs) == expected
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
        again = generate(llm, case)
    # Requests without a seed draw by their number: compare the others.
    fixed = [i for i, p in enumerate(case.params) if p.seed is not None or p.is_greedy]
    assert [tokens_of(again)[i] for i in fixed] == [expected[i] for i in fixed]
    assert sum(output.num_cached_tokens or 0 for output in again) > 0


only_one_family = pytest.mark.parametrize("case", ["qwen3"], indirect=True)


@only_one_family
@pytest.mark.parametrize(("block_size", "size"), [(16, 2), (16, 4), (256, 2), (512, 4)])
def test_block_sizes(
    start: Callable[..., LLM],
    case: Case,
    expected: list[list[int]],
    block_size: int,
    size: int,
) -> None:
    ahead = block_size == 16
    options = {"block_size": block_size, "num_gpu_blocks_override": 20, "async_scheduling": ahead}
    with start(size, **options) as llm:
        assert tokens_of(generate(llm, case)) == expected


@only_one_family
def test_ranks_that_would_sample_differently_follow_rank_0(
    case: Case, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The filters of rank 1 are biased on purpose; the tokens of rank 0 count on both."""
    fork_ranks(monkeypatch, {1: In("nv_runtime.sampler", "sample_tokens", biased)})
    with make_llm(case, tensor_parallel_size=2) as llm:
        assert tokens_of(generate(llm, case)) == expected


@only_one_family
def test_log_probabilities_are_those_of_one_rank(start: Callable[..., LLM], case: Case) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=2)

    def found(llm: LLM) -> list[tuple[int, float]]:
        outputs = llm.generate(case.prompts, params, use_tqdm=False)
        positions = [
            position
            for output in outputs
            for position in [*(output.prompt_logprobs or []), *(output.outputs[0].logprobs or [])]
            if position is not None
        ]
        return [(token, value.logprob) for p in positions for token, value in p.items()]

    with make_llm(case, tensor_parallel_size=1) as llm:
        expected = found(llm)
    with start(2, max_num_batched_tokens=16) as llm:
        ours = found(llm)
    assert len(expected) > 300
    assert [token for token, _ in ours] == [token for token, _ in expected]
    assert [value for _, value in ours] == pytest.approx([v for _, v in expected], abs=1e-4)
