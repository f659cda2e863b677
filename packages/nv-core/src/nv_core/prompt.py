"""Checks what a caller gives with a request, before anything else sees it."""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan
from operator import index
from typing import Any

from nv_core.block_hash import pack_tokens, unpack_tokens
from nv_core.config import SchedulerConfig
from nv_core.errors import RequestError
from nv_core.integers import MAX_INTEGER, check_integer


def check_prompt(
    prompt_token_ids: Iterable[int], config: SchedulerConfig, *, max_prompt_tokens: int
) -> tuple[list[int], bytes]:
    """Returns a prompt's tokens, as a new list of plain integers and packed for hashing.

    Args:
        prompt_token_ids: What the caller gave; any iterable of any kind of integer will do.
        config: Limits that the prompt must keep.
        max_prompt_tokens: Most tokens of a prompt under these limits.

    Raises:
        RequestError: It is empty, holds something that is no token id, or can never fit.
    """
    if isinstance(prompt_token_ids, (str, bytes)):
        raise RequestError("prompt_token_ids must be token ids, got text; tokenize it first")
    if not isinstance(prompt_token_ids, Iterable):
        raise RequestError(f"prompt_token_ids must be token ids, got {prompt_token_ids!r}")
    values = list(prompt_token_ids)
    if not values:
        raise RequestError("prompt_token_ids is empty; a prompt needs at least one token")
    limit = config.vocab_size or 2**32
    try:
        packed = pack_tokens(values)
        tokens = unpack_tokens(packed)
    except (OverflowError, TypeError):
        tokens = []
    if not tokens or max(tokens) >= limit:
        bad = next(value for value in values if not _is_token_id(value, limit))
        raise RequestError(
            f"prompt_token_ids holds {bad!r}; token ids are integers in [0, {limit})"
        )
    if len(tokens) > max_prompt_tokens:
        raise RequestError(_too_long(len(tokens), config, max_prompt_tokens))
    return tokens, packed


def check_time(name: str, value: float | None) -> None:
    """Refuses what is no point in time.

    Raises:
        RequestError: It is neither None nor a number.
    """
    if value is None:
        return
    if isinstance(value, int):
        check_integer(name, value, minimum=-MAX_INTEGER, hint="seconds of the caller's clock")
    elif not isinstance(value, float) or isnan(value):
        raise RequestError(f"{name} must be seconds of the caller's clock, or None, got {value!r}")


def check_labels(*, request_id: str | None, priority: int, user: str | None) -> None:
    """Refuses labels that a policy could not compare.

    Raises:
        RequestError: One is not of its kind.
    """
    check_integer("priority", priority, minimum=-MAX_INTEGER, hint="lower is more urgent")
    for name, value in (("request_id", request_id), ("user", user)):
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{name} must be a str or None, got {value!r}")


def check_prediction(predicted_output_tokens: int | None) -> None:
    """Refuses what is no length.

    Raises:
        RequestError: It is neither None nor a number of tokens.
    """
    if predicted_output_tokens is not None:
        check_integer("predicted_output_tokens", predicted_output_tokens, minimum=0)


def _is_token_id(value: Any, limit: int) -> bool:  # noqa: ANN401 - that is what is checked here
    try:
        return 0 <= index(value) < limit
    except TypeError:
        return False


def _too_long(num_tokens: int, config: SchedulerConfig, max_prompt_tokens: int) -> str:
    if config.max_model_len == max_prompt_tokens + 1:
        limit = f"max_model_len={config.max_model_len} (prompt and at least one output token)"
    else:
        limit = (
            f"the KV pool: {config.num_blocks} blocks of {config.block_size} tokens hold "
            f"{config.num_blocks * config.block_size}"
        )
    return (
        f"the prompt has {num_tokens} tokens and can never fit {limit}; "
        f"shorten it to {max_prompt_tokens} tokens or raise that limit"
    )
