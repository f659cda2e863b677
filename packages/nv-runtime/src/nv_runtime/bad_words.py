"""Bad words: from texts to the runs of tokens that the sampler forbids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nv_core import RequestError, SamplingParams
from nv_runtime.request_checks import MAX_BANNED_WORDS

if TYPE_CHECKING:
    from nv_runtime.tokenizer import Tokenizer

_MAX_CHARACTERS = 2**16


def with_tokenized_bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Returns parameters whose `bad_words` are token ids; those given if they are already.

    As in vLLM, a word is forbidden as it stands and, where that gives other tokens of the same
    number, with a space before it. A word that the model spells with other tokens than the
    tokenizer does can still appear.

    Raises:
        RequestError: A word is text and there is no tokenizer, or the tokenizer has no tokens for
            it, or there are so many or so long ones that others would wait for this.
    """
    if not any(isinstance(word, str) for word in params.bad_words):
        return params
    if tokenizer is None:
        raise RequestError(
            f"bad_words={list(params.bad_words)!r} holds text, but the engine has no tokenizer "
            "(skip_tokenizer_init=True); give each as a list of token ids"
        )
    num_characters = sum(len(word) for word in params.bad_words if isinstance(word, str))
    if len(params.bad_words) > MAX_BANNED_WORDS or num_characters > _MAX_CHARACTERS:
        raise RequestError(
            f"bad_words holds {len(params.bad_words)} words, those in text of {num_characters} "
            f"characters together; at most {MAX_BANNED_WORDS} words of {_MAX_CHARACTERS} "
            "characters are allowed"
        )
    runs: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        spellings = _spellings(word, tokenizer) if isinstance(word, str) else [tuple(word)]
        runs.update(dict.fromkeys(spellings))
    return params.clone(bad_words=list(runs))


def _spellings(word: str, tokenizer: Tokenizer) -> Sequence[tuple[int, ...]]:
    try:
        plain, spaced = (
            tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False))
            for prefix in ("", " ")
        )
    except RequestError as error:
        raise RequestError(
            f"bad_words holds {word!r}, which is no text: it has a lone surrogate"
        ) from error
    if not plain:
        raise RequestError(f"bad_words holds {word!r}, for which the tokenizer has no tokens")
    is_other = spaced[:1] != plain[:1] and len(spaced) == len(plain)
    return [plain, spaced] if is_other else [plain]
