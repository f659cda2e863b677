"""What a request may ask of this model and this engine, checked when it arrives."""

from __future__ import annotations

from collections.abc import Iterable

from nv_core import RequestError, SamplingParams

MAX_BANNED_WORDS = 1024
_MAX_BANNED_WORD_TOKENS = 128
_MAX_STOPS = 256
_MAX_STOP_CHARACTERS = 2**16


def check_sampling_params(
    params: SamplingParams,
    *,
    vocab_size: int,
    max_logprobs: int,
    eos_token_ids: Iterable[int] = (),
) -> None:
    """Refuses what cannot be served.

    Args:
        params: What the caller asked for.
        vocab_size: Number of token ids that the model has.
        max_logprobs: Most log-probabilities of one position; -1 for no limit.
        eos_token_ids: What ends a sequence of this model, and so is not sampled before
            `min_tokens`.

    Raises:
        RequestError: A token id is none of the model's, no token is left to sample, or there are
            too many log-probabilities, banned words or stop texts.
    """
    _check_amounts(params, vocab_size)
    _check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_token_ids("logit_bias", params.logit_bias or (), vocab_size)
    for word in params.bad_words:
        if isinstance(word, str):
            raise RequestError(
                f"bad_words holds {word!r}, which is text; give it as a list of token ids"
            )
        if len(word) > _MAX_BANNED_WORD_TOKENS:
            raise RequestError(
                f"bad_words holds a run of {len(word)} tokens; at most {_MAX_BANNED_WORD_TOKENS} "
                "are allowed: give the part of it that must not be completed"
            )
        _check_token_ids("bad_words", word, vocab_size)
    num_banned = len(params.bad_words)
    if params.min_tokens:
        num_banned += len(params.stop_token_ids)
    if num_banned > MAX_BANNED_WORDS:
        raise RequestError(
            f"bad_words, and stop_token_ids with min_tokens={params.min_tokens}, ban {num_banned} "
            f"runs of tokens; at most {MAX_BANNED_WORDS} are allowed: use logit_bias or "
            "allowed_token_ids for single tokens"
        )
    _check_that_tokens_are_left(params, vocab_size, eos_token_ids)
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and max_logprobs >= 0 and not 0 <= wanted <= max_logprobs:
            raise RequestError(
                f"{name}={wanted} is more than max_logprobs={max_logprobs} allows; ask for less, "
                "or make the engine with a higher max_logprobs (-1 for no limit)"
            )


def _check_amounts(params: SamplingParams, vocab_size: int) -> None:
    """Refuses so many texts or ids that all other requests would wait for what they cost."""
    num_characters = sum(map(len, params.stop))
    if len(params.stop) > _MAX_STOPS or num_characters > _MAX_STOP_CHARACTERS:
        raise RequestError(
            f"stop holds {len(params.stop)} texts of {num_characters} characters together; at most "
            f"{_MAX_STOPS} texts of {_MAX_STOP_CHARACTERS} characters are allowed: give fewer or "
            "shorter ones"
        )
    for name in ("stop_token_ids", "allowed_token_ids"):
        num_ids = len(getattr(params, name) or ())
        if num_ids > vocab_size:
            raise RequestError(
                f"{name} holds {num_ids} token ids, and the model has {vocab_size}; give each once"
            )


def _check_that_tokens_are_left(
    params: SamplingParams, vocab_size: int, eos_token_ids: Iterable[int]
) -> None:
    """Refuses parameters that forbid every token; looks at each id that they name once.

    Longer bad words are left alone: which token they forbid depends on the output.
    """
    forbidden = {word[0]: "bad_words" for word in params.bad_words if len(word) == 1}
    if params.min_tokens > 0:
        forbidden.update(dict.fromkeys(params.stop_token_ids, "stop_token_ids before min_tokens"))
        # A request that goes on past the model's end tokens may sample them at any time.
        if not params.ignore_eos:
            forbidden.update(dict.fromkeys(eos_token_ids, "end-of-sequence before min_tokens"))
    if params.allowed_token_ids is None:
        is_left = len(forbidden) < vocab_size
        reasons = set(forbidden.values())
    else:
        is_left = any(token_id not in forbidden for token_id in params.allowed_token_ids)
        reasons = {forbidden.get(token_id, "") for token_id in params.allowed_token_ids}
    if not is_left:
        allowed = "the vocabulary" if params.allowed_token_ids is None else "allowed_token_ids"
        raise RequestError(
            f"{allowed} without what {' and '.join(sorted(reasons))} forbid is empty, so no token "
            "is left to sample; leave at least one that nothing forbids"
        )


def _check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise RequestError(
                f"{name} holds {token_id}; the model's token ids are in [0, {vocab_size})"
            )
