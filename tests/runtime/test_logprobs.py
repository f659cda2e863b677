"""Log-probabilities of outputs and prompts, against the logits of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_checkpoints
from nv_core import RequestError, SamplingParams
from nv_runtime import LLM, RequestOutput, RequestOutputKind
from nv_runtime.outputs import Logprob
from tiny_engines import options

VOCAB = 131


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:  # noqa: ANN401 - a transformers model
    return tiny_checkpoints.load_reference(checkpoint)


def make_llm(checkpoint: Path, **changes: Any) -> LLM:  # noqa: ANN401 - LLM's own options
    defaults = {"num_gpu_blocks_override": 300, "skip_tokenizer_init": True}
    return LLM(str(checkpoint), **options(**{**defaults, **changes}))


def expected_logprobs(reference: Any, token_ids: list[int]) -> Tensor:  # noqa: ANN401
    """[position, token]: of the token that follows the position."""
    return tiny_checkpoints.reference_logits(reference, token_ids).double().log_softmax(dim=-1)


def assert_entry(entry: dict[int, Logprob], expected: Tensor, token: int, num_top: int) -> None:
    order = expected.argsort(descending=True).tolist()
    wanted = list(dict.fromkeys([token, *order[:num_top]]))
    assert list(entry) == wanted
    for token_id, logprob in entry.items():
        assert logprob.logprob == pytest.approx(float(expected[token_id]), abs=1e-4)
        assert logprob.rank == 1 + order.index(token_id)


def assert_logprobs(reference: Any, output: RequestOutput, params: SamplingParams) -> None:  # noqa: ANN401
    completion = output.outputs[0]
    prompt = output.prompt_token_ids
    token_ids = [*prompt, *completion.token_ids]
    expected = expected_logprobs(reference, token_ids)
    if params.logprobs is None:
        assert completion.logprobs is None
        assert completion.cumulative_logprob is None
    else:
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        for index, entry in enumerate(completion.logprobs, start=len(prompt)):
            assert_entry(entry, expected[index - 1], token_ids[index], params.logprobs)
        total = sum(
            float(expected[i - 1, token_ids[i]]) for i in range(len(prompt), len(token_ids))
        )
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for index, item in enumerate(output.prompt_logprobs[1:], start=1):
            assert item is not None
            assert_entry(item, expected[index - 1], prompt[index], params.prompt_logprobs)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"async_scheduling": True, "max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 16},
        {"num_gpu_blocks_override": 24, "async_scheduling": True},
    ],
    ids=["plain", "chunked and ahead", "preempted", "preempted and ahead"],
)
def test_logprobs_are_those_of_transformers(
    checkpoint: Path,
    reference: Any,  # noqa: ANN401
    changes: dict[str, Any],
) -> None:
    rng = random.Random(1)
    shared = [rng.randrange(VOCAB) for _ in range(20)]
    prompts = [shared + [rng.randrange(VOCAB) for _ in range(n)] for n in (1, 4, 9, 16, 3)]
    prompts += [[5], [7, 8]]
    params = [
        SamplingParams(logprobs=3, prompt_logprobs=0, temperature=0.8, seed=1, max_tokens=14),
        SamplingParams(logprobs=0, temperature=0, max_tokens=16),
        SamplingParams(prompt_logprobs=7, max_tokens=20),
        SamplingParams(temperature=0.9, top_k=4, max_tokens=20),
        SamplingParams(logprobs=20, prompt_logprobs=20, repetition_penalty=1.5, max_tokens=9),
        SamplingParams(logprobs=1, prompt_logprobs=2, bad_words=[[3], [4, 5]], max_tokens=5),
        SamplingParams(logprobs=2, prompt_logprobs=2, min_tokens=3, max_tokens=3),
    ]
    params = [p.clone(ignore_eos=True) for p in params]
    with make_llm(checkpoint, **changes) as llm:
        # Twice, so that the second run could hit the prefix cache.
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for output, asked in zip(outputs, params, strict=True):
                assert_logprobs(reference, output, asked)
    if "num_gpu_blocks_override" in changes:
        assert any(output.metrics and output.metrics.num_preemptions for output in outputs)
    assert outputs[4].num_cached_tokens == 0
    assert outputs[3].num_cached_tokens


def test_logprobs_in_a_stream_and_for_several_answers(checkpoint: Path, reference: Any) -> None:  # noqa: ANN401
    params = SamplingParams(
        n=2, seed=4, logprobs=2, prompt_logprobs=1, max_tokens=6, ignore_eos=True
    )
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    with make_llm(checkpoint) as llm:
        (whole,) = llm.generate([prompt], params, use_tqdm=False)
        deltas = list(llm.stream([prompt], params.clone(output_kind=RequestOutputKind.DELTA)))
    for index, completion in enumerate(whole.outputs):
        alone = RequestOutput("", None, prompt, [completion], prompt_logprobs=whole.prompt_logprobs)
        assert_logprobs(reference, alone, params)
        parts = [c.logprobs for d in deltas for c in d.outputs if c.index == index]
        assert [entry for part in parts if part for entry in part] == completion.logprobs
    assert whole.outputs[0].token_ids != whole.outputs[1].token_ids


def test_a_request_for_logprobs_changes_no_token(checkpoint: Path) -> None:
    params = SamplingParams(seed=3, temperature=0.9, top_p=0.9, max_tokens=12, ignore_eos=True)
    with make_llm(checkpoint) as llm:
        plain, asked = llm.generate(
            [[1, 2, 3]] * 2, [params, params.clone(logprobs=5, prompt_logprobs=5)], use_tqdm=False
        )
    assert plain.outputs[0].token_ids == asked.outputs[0].token_ids


def test_too_many_logprobs_are_refused_unless_the_limit_is_lifted(checkpoint: Path) -> None:
    everything = SamplingParams(logprobs=-1, prompt_logprobs=-1, max_tokens=2, ignore_eos=True)
    with make_llm(checkpoint) as llm:
        for params in (everything, SamplingParams(logprobs=21), SamplingParams(prompt_logprobs=21)):
            with pytest.raises(RequestError, match=r"logprobs=.* is more than max_logprobs=20"):
                llm.generate([[1, 2]], params, use_tqdm=False)
    with make_llm(checkpoint, max_logprobs=-1) as llm:
        (output,) = llm.generate([[1, 2]], everything, use_tqdm=False)
        (fifty,) = llm.generate([[1, 2]], SamplingParams(logprobs=50, max_tokens=1), use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[1] is not None
    for entry in (*output.outputs[0].logprobs, output.prompt_logprobs[1]):
        assert len(entry) == VOCAB
        total = torch.tensor([item.logprob for item in entry.values()]).logsumexp(dim=0)
        assert float(total) == pytest.approx(0, abs=1e-4)
    assert fifty.outputs[0].logprobs is not None
    assert len(fifty.outputs[0].logprobs[0]) in (50, 51)


def test_logprobs_have_texts_where_there_is_a_tokenizer(tmp_path: Path) -> None:
    path = tiny_checkpoints.write_checkpoint(tmp_path, tokenizer=True)
    params = SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, max_tokens=4)
    with make_llm(path, skip_tokenizer_init=False) as llm:
        (output,) = llm.generate("the fox", params, use_tqdm=False)
        (silent,) = llm.generate("the fox", params.clone(detokenize=False), use_tqdm=False)
        tokenizer = llm.get_tokenizer()
        assert output.outputs[0].logprobs is not None
        for entry in output.outputs[0].logprobs:
            for token_id, item in entry.items():
                text = tokenizer.decode([token_id], skip_special_tokens=False)
                assert item.decoded_token == text
    assert silent.outputs[0].logprobs is not None
    assert all(i.decoded_token is None for e in silent.outputs[0].logprobs for i in e.values())
