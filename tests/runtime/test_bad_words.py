"""Bad words: which runs of tokens a text stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoints
from nv_core import RequestError, SamplingParams
from nv_runtime import LLM
from nv_runtime.bad_words import with_tokenized_bad_words
from nv_runtime.tokenizer import Tokenizer, load_tokenizer_from_directory
from tiny_engines import options, tokens_of
from tiny_tokenizers import KINDS, save_tokenizer


@pytest.fixture(scope="module", params=sorted(KINDS))
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    path: Path = save_tokenizer(request.param, tmp_path_factory.mktemp(request.param))
    return load_tokenizer_from_directory(path)


def runs_of(tokenizer: Tokenizer | None, *words: Any) -> list[tuple[int, ...]]:  # noqa: ANN401
    params = SamplingParams(bad_words=list(words), seed=3)
    resolved = with_tokenized_bad_words(params, tokenizer)
    assert resolved.seed == 3
    return [tuple(word) for word in resolved.bad_words if not isinstance(word, str)]


@pytest.mark.parametrize("word", ["fox", "the", "quick", "世界", "it's", "x y"])
def test_a_word_is_meant_with_and_without_a_space(tokenizer: Tokenizer, word: str) -> None:
    plain = tokenizer.encode(word, add_special_tokens=False)
    spaced = tokenizer.encode(" " + word, add_special_tokens=False)
    runs = runs_of(tokenizer, word)
    assert runs[0] == tuple(plain)
    # The spelling with a space counts where it is as long and begins otherwise, as in vLLM.
    is_other = len(spaced) == len(plain) and spaced[0] != plain[0]
    assert runs[1:] == ([tuple(spaced)] if is_other else [])
    assert runs_of(tokenizer, "  " + word) == runs


def test_tokens_are_taken_as_they_are_and_nothing_twice(tokenizer: Tokenizer) -> None:
    assert runs_of(tokenizer, [1, 2], [3], [1, 2]) == [(1, 2), (3,), (1, 2)]
    mixed = runs_of(tokenizer, [1, 2], "fox", "fox", [1, 2])
    assert len(mixed) == len(set(mixed))
    assert mixed[0] == (1, 2)
    nothing = SamplingParams()
    assert with_tokenized_bad_words(nothing, tokenizer) is nothing


def test_texts_need_a_tokenizer() -> None:
    assert runs_of(None, [1, 2]) == [(1, 2)]
    with pytest.raises(RequestError, match=r"bad_words=\['fox'\] holds text.*token ids"):
        runs_of(None, "fox")


@pytest.mark.parametrize("words", [["fox"] * 1025, [[1]] * 1024 + ["fox"], ["fox " * 20_000]])
def test_so_many_words_that_others_would_wait_are_refused(
    tokenizer: Tokenizer,
    words: Any,  # noqa: ANN401
) -> None:
    with pytest.raises(RequestError, match=r"at most 1024 words of 65536 characters are allowed"):
        runs_of(tokenizer, *words)
    assert runs_of(tokenizer, *["fox"] * 1024)


def test_a_word_that_is_no_text_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"bad_words holds 'a\\ud800', which is no text"):
        runs_of(tokenizer, "fox", "a\ud800")


def test_a_bad_word_is_not_said(tmp_path: Path) -> None:
    path = tiny_checkpoints.write_checkpoint(tmp_path, tokenizer=True)
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    num_banned = 0
    with LLM(str(path), **options(async_scheduling=True)) as llm:
        tokenizer = llm.get_tokenizer()
        for prompt in ("the quick", "shore", "1 2 3", "Paris"):
            free = tokens_of(llm.generate(prompt, greedy, use_tqdm=False)[0])
            # A word that the model says, and that the tokenizer spells with the same token.
            for token_id in free:
                word = tokenizer.decode([token_id])
                if word.strip() and tokenizer.encode(word) == [token_id]:
                    params = greedy.clone(bad_words=[word])
                    banned = tokens_of(llm.generate(prompt, params, use_tqdm=False)[0])
                    assert token_id not in banned
                    assert banned[: free.index(token_id)] == free[: free.index(token_id)]
                    num_banned += 1
                    break
    assert num_banned >= 2
