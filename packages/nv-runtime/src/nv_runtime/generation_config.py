"""What a checkpoint's generation_config.json says: default sampling and end-of-sequence tokens.

The file is taken at its word: every sampling value that it holds becomes the default, as in vLLM,
and nothing else is read into it. In particular `do_sample: false` beside a temperature does not
turn sampling off, and neither the file's absence nor `do_sample` alone makes decoding greedy; a
caller who wants greedy decoding passes `temperature=0`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nv_core import SamplingParams
from nv_core.errors import ConfigError, RequestError

__all__ = ["default_sampling_params", "eos_token_ids"]

_FIELD_OF = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_sampling_params(
    generation_config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Makes the sampling parameters for requests that bring none.

    Args:
        generation_config: Content of generation_config.json; empty if the file is absent. Read
            are temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens (as
            `max_tokens`); a value of null counts as absent.
        overrides: Values of the same names that stand in place of the file's.

    Raises:
        ConfigError: A value is out of range, or an override has another name.
    """
    unknown = sorted((overrides or {}).keys() - _FIELD_OF.keys())
    if unknown:
        raise ConfigError(
            f"override_generation_config has {', '.join(map(repr, unknown))}; it may have "
            f"{', '.join(_FIELD_OF)}"
        )
    from_file = {name: generation_config.get(name) for name in _FIELD_OF}
    own = _values_of({**from_file, **(overrides or {})})
    try:
        return SamplingParams(**own)
    except RequestError as error:
        if overrides:
            raise ConfigError(
                f"override_generation_config, or the generation_config.json under it: {error}"
            ) from error
        raise ConfigError(
            f"generation_config.json: {error}; correct the file, or pass generation_config='vllm' "
            "to leave its sampling out."
        ) from error


def _values_of(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        _FIELD_OF[name]: value for name, value in generation_config.items() if value is not None
    }


def eos_token_ids(config: Mapping[str, Any], *, source: str) -> tuple[int, ...]:
    """Reads `eos_token_id` of a config.json or generation_config.json.

    Args:
        config: The file's content.
        source: The file's name, for the error message.

    Returns:
        The ids in the file's order without repeats; empty if there are none.

    Raises:
        ConfigError: The value is neither a token id nor a list of them.
    """
    value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, (list, tuple)) else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ConfigError(
                f"{source}: eos_token_id must be a token id or a list of token ids, got {value!r}"
            )
    return tuple(dict.fromkeys(ids))
