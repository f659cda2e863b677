"""Text is made while steps run, not all at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny_checkpoints
from nv_core import SamplingParams
from nv_runtime import LLM
from nv_runtime.answer import Answer
from nv_runtime.outputs import CompletionOutput

PROMPTS = ["the fox", "a dog in the sea", "1 2 3"]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_little_is_left_to_decode_when_answers_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, async_scheduling: bool
) -> None:
    path = tiny_checkpoints.write_checkpoint(tmp_path, tokenizer=True)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=150, ignore_eos=True)
    take = Answer.take
    left: list[int] = []

    def note(answer: Answer, *, delta: bool) -> CompletionOutput:
        left.append(answer.sequence.num_tokens - answer._num_decoded)
        return take(answer, delta=delta)

    with LLM(
        str(path), device="cpu", show_progress=False, async_scheduling=async_scheduling
    ) as llm:
        streamed = {output.prompt: output.outputs[0].text for output in llm.stream(PROMPTS, params)}
        monkeypatch.setattr(Answer, "take", note)
        outputs = llm.generate(PROMPTS, [params, params, params], use_tqdm=False)
    assert len(left) == 3
    assert max(left) <= 33
    assert {len(output.outputs[0].token_ids) for output in outputs} == {150}
    # Seeds are the same, so the words are, whenever they were decoded.
    assert {output.prompt: output.outputs[0].text for output in outputs} == streamed
