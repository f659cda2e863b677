"""Prompts in all the forms that callers may write them, brought into one.

A prompt is text, `{"prompt": text}`, `{"prompt_token_ids": [...]}` or a list of token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict, cast

from typing_extensions import NotRequired

from nv_core import RequestError, SamplingParams

if TYPE_CHECKING:
    from nv_runtime.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A prompt given as text; for `cache_salt` see `nv_core.Scheduler.add`."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt given as token ids, perhaps with the text that they came from."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | TextPrompt | TokensPrompt | Sequence[int]
"""One prompt, in any of its forms."""


_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt ready for the scheduler.

    Attributes:
        text: The text it was given as; None if it was given as token ids.
        token_ids: Its tokens; not checked yet.
        cache_salt: Only prompts of the same salt share cached prefixes; not checked yet.
    """

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tells one prompt from a list of them.

    A list of integers is one prompt, any other list (an empty one too) is a list of prompts.
    """
    if isinstance(prompts, (str, Mapping)):
        return [cast("Prompt", prompts)]
    if hasattr(prompts, "tolist"):  # an array or a tensor
        prompts = cast("Sequence[Prompt]", prompts.tolist())
    if not isinstance(prompts, Sequence):
        raise RequestError(
            "prompts must be text, a mapping with 'prompt' or 'prompt_token_ids', a list of token "
            f"ids, or a list of these; got {type(prompts).__name__}"
        )
    if prompts and all(isinstance(item, Integral) for item in prompts):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def split_sampling_params(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    default: SamplingParams,
    num_prompts: int,
) -> list[SamplingParams]:
    """Gives each prompt its parameters.

    Args:
        sampling_params: None, one for all prompts, or one for each.
        default: What None means.
        num_prompts: How many prompts there are.

    Raises:
        RequestError: The number of parameters differs from that of the prompts.
    """
    if sampling_params is None:
        return [default] * num_prompts
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, Sequence) or not all(
        isinstance(item, SamplingParams) for item in sampling_params
    ):
        raise RequestError(
            "sampling_params must be None, a SamplingParams, or a list of them, got "
            f"{sampling_params!r}"
        )
    if len(sampling_params) != num_prompts:
        raise RequestError(
            f"sampling_params has {len(sampling_params)} entries for {num_prompts} prompts; give "
            "one for all or one for each"
        )
    return list(sampling_params)


def split_priorities(priority: int | Sequence[int] | None, num_prompts: int) -> list[int]:
    """Gives each prompt its priority; 0 where none was given.

    Args:
        priority: None, one for all prompts, or one for each.
        num_prompts: How many prompts there are.

    Raises:
        RequestError: The number of priorities differs from that of the prompts.
    """
    if priority is None or not isinstance(priority, Sequence):
        return [0 if priority is None else priority] * num_prompts
    if len(priority) != num_prompts:
        raise RequestError(
            f"priority has {len(priority)} entries for {num_prompts} prompts; give one for all or "
            "one for each"
        )
    return list(priority)


def tokenize_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> TokenizedPrompt:
    """Turns any form of a prompt into tokens.

    Raises:
        RequestError: The form is unknown, or text came without a tokenizer to read it.
    """
    if not isinstance(prompt, Mapping):
        return _tokenize(prompt, tokenizer)
    fields = {key: value for key, value in prompt.items() if value is not None}
    if fields.keys() - _KEYS or not fields.keys() & {"prompt", "prompt_token_ids"}:
        raise RequestError(
            "a prompt mapping has 'prompt' or 'prompt_token_ids', perhaps 'cache_salt', and no "
            f"other keys (only text models are served), got {list(prompt)}"
        )
    salt: Any = fields.get("cache_salt")
    text: Any = fields.get("prompt")
    if "prompt_token_ids" in fields:
        return TokenizedPrompt(text, _as_token_ids(fields["prompt_token_ids"]), salt)
    return replace(_tokenize(text, tokenizer), cache_salt=salt)


def require_one_prompt(prompt: object) -> None:
    """Refuses a list of prompts where one prompt is expected.

    Raises:
        RequestError: It is such a list.
    """
    if not isinstance(prompt, (list, tuple)) or not prompt:
        return
    if isinstance(prompt[0], (str, Mapping, list, tuple)):
        raise RequestError(
            f"prompt is a list of {len(prompt)} prompts, and AsyncLLM.generate takes one; call it "
            "once for each prompt, at the same time, as with asyncio.gather"
        )


def is_text(prompt: Prompt) -> bool:
    """Whether a prompt must be tokenised, which takes time when it is long."""
    if isinstance(prompt, Mapping):
        return prompt.get("prompt_token_ids") is None
    return isinstance(prompt, str)


def _tokenize(prompt: object, tokenizer: Tokenizer | None) -> TokenizedPrompt:
    if not isinstance(prompt, str):
        return TokenizedPrompt(None, _as_token_ids(prompt))
    if tokenizer is None:
        raise RequestError(
            "prompt is text, but the engine has no tokenizer (skip_tokenizer_init=True); "
            "pass token ids"
        )
    token_ids = tokenizer.encode(prompt)
    if not token_ids:
        raise RequestError("the prompt is empty: its text has no tokens")
    return TokenizedPrompt(prompt, token_ids)


def _as_token_ids(value: object) -> list[int]:
    if hasattr(value, "tolist"):  # an array or a tensor
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise RequestError(f"prompt_token_ids must be a list of token ids, got {value!r:.80}")
    return list(value)


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """Returns the tokenizer.

    Raises:
        RequestError: There is none.
    """
    if tokenizer is None:
        raise RequestError("the engine has no tokenizer (skip_tokenizer_init=True); pass token ids")
    return tokenizer
