"""What a request may ask of this model and this engine, checked when it arrives."""

from __future__ import annotations

from collections.abc import Iterable

from nv_core import RequestError, SamplingParams

_MAX_BANNED_WORDS = 1024
_MAX_BANNED_WORD_TOKENS = 128


def check_sampling_params(params: SamplingParams, *, vocab_size: int, max_logprobs: int) -> None:
    """Refuses what cannot be served.

    Args:
        params: What the caller asked for.
        vocab_size: Number of token ids that the model has.
        max_logprobs: Most log-probabilities of one position; -1 for no limit.

    Raises:
        RequestError: A token id is none of the model's, or there are too many log-probabilities.
    """
    _check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_token_ids("logit_bias", params.logit_bias or (), vocab_size)
    for word in params.bad_words:
        if isinstance(word, str):
            raise RequestError(
                f"bad_words holds {word!r}, which is text; give it as a list of token ids"
            )
        _check_token_ids("bad_words", word, vocab_size)
        if len(word) > _MAX_BANNED_WORD_TOKENS:
            raise RequestError(
                f"bad_words holds a run of {len(word)} tokens; at most {_MAX_BANNED_WORD_TOKENS} "
                "are allowed: give the part of it that must not be completed"
            )
    num_banned = len(params.bad_words)
    if params.min_tokens:
        num_banned += len(params.stop_token_ids)
    if num_banned > _MAX_BANNED_WORDS:
        raise RequestError(
            f"bad_words, and stop_token_ids with min_tokens={params.min_tokens}, ban {num_banned} "
            f"runs of tokens; at most {_MAX_BANNED_WORDS} are allowed: use logit_bias or "
            "allowed_token_ids for single tokens"
        )
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and max_logprobs >= 0 and not 0 <= wanted <= max_logprobs:
            raise RequestError(
                f"{name}={wanted} is more than max_logprobs={max_logprobs} allows; ask for less, "
                "or make the engine with a higher max_logprobs (-1 for no limit)"
            )


def _check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise RequestError(
                f"{name} holds {token_id}; the model's token ids are in [0, {vocab_size})"
            )
