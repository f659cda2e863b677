"""SamplingParams: what a caller asks of one request.

The scheduler reads only the fields that decide when a request ends; the sampler of the
runtime reads the others. Names, defaults and ranges are those of vLLM, so that code written
for it keeps its meaning.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from nv_core.errors import RequestError
from nv_core.keywords import refuse_unknown_keywords

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this one mean greedy decoding, as in vLLM."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request and when to stop it.

    Args:
        temperature: Divides the logits before sampling; 0 (or below 1e-5) is greedy decoding.
        top_p: Keeps the smallest set of tokens whose probability reaches this; in (0, 1].
        top_k: Keeps this many most probable tokens; 0 or -1 keeps all.
        min_p: Drops tokens less probable than this share of the best one's; in [0, 1].
        repetition_penalty: Divides positive and multiplies negative logits of every token that
            stands in the prompt or the output; greater than 0, 1 changes nothing.
        max_tokens: Number of output tokens after which the request ends; None runs to the
            model's or the pool's limit.
        min_tokens: Number of output tokens before which no end-of-sequence or stop token is
            sampled, and stop texts do not count (one that is complete by then is passed over).
        seed: Makes the request's draws reproducible whatever runs beside it; None (or -1)
            lets the engine choose one.
        ignore_eos: Goes on past the model's end-of-sequence tokens.
        stop_token_ids: Further token ids that end the request; the token stays in the output.
        stop: A text or texts that end the request as soon as the output text holds one; the text
            is cut before it, its tokens stay in the output.
        include_stop_str_in_output: Leaves the stop text that was met in the output text.
        skip_special_tokens: Leaves special tokens out of the output text.
        detokenize: Makes output text at all.

    Raises:
        RequestError: A value is out of range; the message names field, value and range.
        TypeError: An unknown keyword; the message names the nearest known one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __new__(cls, **values: object) -> "SamplingParams":
        """Refuses unknown keywords before the generated `__init__` sees them."""
        refuse_unknown_keywords(cls.__name__, values, (field.name for field in fields(cls)))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Checks every field; turns lists into tuples, and -1 into what it stands for."""
        for field in fields(self):
            object.__setattr__(self, field.name, _plain_number(getattr(self, field.name)))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "stop", _stop_texts(self.stop))
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _check_number("temperature", self.temperature, minimum=0.0)
        _check_number("top_p", self.top_p, minimum=0.0, maximum=1.0, open_minimum=True)
        _check_number("min_p", self.min_p, minimum=0.0, maximum=1.0)
        _check_number("repetition_penalty", self.repetition_penalty, minimum=0.0, open_minimum=True)
        _check_integer("top_k", self.top_k, minimum=0, hint="0 or -1 keeps every token")
        _check_integer("min_tokens", self.min_tokens, minimum=0)
        if self.seed is not None:
            _check_integer("seed", self.seed, minimum=-(2**63), maximum=2**64 - 1)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, minimum=1, hint="None means no limit")
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens={self.min_tokens} is greater than max_tokens={self.max_tokens}; "
                    "lower min_tokens or raise max_tokens"
                )
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "detokenize",
        ):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop={self.stop!r} needs the output text; leave detokenize=True, or use "
                "stop_token_ids"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken instead of a draw."""
        return self.temperature < GREEDY_TEMPERATURE

    def clone(self, **changes: Any) -> "SamplingParams":  # noqa: ANN401 - each field has its type
        """Returns a copy with some fields changed, checked like a new one."""
        return replace(self, **changes)


def _plain_number(value: Any) -> Any:  # noqa: ANN401 - a caller may pass anything
    """Turns numbers of other libraries into Python's own; leaves everything else alone."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _token_ids(value: Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise RequestError(f"stop_token_ids must be a list of token ids, got {value!r}")
    ids = tuple(_plain_number(token_id) for token_id in value)
    for token_id in ids:
        _check_integer("stop_token_ids", token_id, minimum=0)
    return ids


def _stop_texts(value: str | Iterable[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise RequestError(f"stop must be a text or a list of texts, got {value!r}")
    texts = (value,) if isinstance(value, str) else tuple(value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise RequestError(f"stop must hold texts of at least one character, got {text!r}")
    return texts


def _check_number(
    name: str,
    value: Any,  # noqa: ANN401 - a caller may pass anything; that is what is checked here
    *,
    minimum: float,
    maximum: float | None = None,
    open_minimum: bool = False,
) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and math.isfinite(value):
        above = value > minimum if open_minimum else value >= minimum
        if above and (maximum is None or value <= maximum):
            return
    bracket = "(" if open_minimum else "["
    upper = "inf)" if maximum is None else f"{maximum:g}]"
    raise RequestError(f"{name} must be a number in {bracket}{minimum:g}, {upper}, got {value!r}")


def _check_integer(
    name: str,
    value: Any,  # noqa: ANN401 - a caller may pass anything; that is what is checked here
    *,
    minimum: int,
    maximum: int | None = None,
    hint: str = "",
) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and value >= minimum and (maximum is None or value <= maximum):
        return
    allowed = f"at least {minimum}" if maximum is None else f"in [{minimum}, {maximum}]"
    note = f" ({hint})" if hint else ""
    raise RequestError(f"{name} must be an integer {allowed}{note}, got {value!r}")
