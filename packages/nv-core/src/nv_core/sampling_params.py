"""SamplingParams: what a caller asks of one request.

The scheduler reads only the fields that decide when a request ends; the sampler of the
runtime reads the others. Names, defaults and ranges are those of vLLM, so that code written
for it keeps its meaning.
"""

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any

from nv_core.errors import RequestError
from nv_core.integers import check_integer, shown
from nv_core.keywords import refuse_unknown_keywords

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this one mean greedy decoding, as in vLLM."""

MAX_ANSWERS = 16384
"""Most answers to one prompt, as in vLLM."""

LARGEST_LOGIT_BIAS = 100.0
"""Larger biases are cut to this one, as in vLLM."""


class RequestOutputKind(enum.Enum):
    """What each output of a growing answer holds."""

    CUMULATIVE = 0
    """All of the answer so far."""
    DELTA = 1
    """What is new since the last output."""
    FINAL_ONLY = 2
    """The whole answer, once, when it is complete."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request and when to stop it.

    Args:
        n: Number of answers to the prompt; 1 with greedy decoding, where all would be equal.
        temperature: Divides the logits before sampling; 0 (or below 1e-5) is greedy decoding.
        top_p: Keeps the smallest set of tokens whose probability reaches this; in (0, 1].
        top_k: Keeps this many most probable tokens; 0 or -1 keeps all.
        min_p: Drops tokens less probable than this share of the best one's; in [0, 1].
        presence_penalty: Is subtracted from the logit of every token that stands in the output; in
            [-2, 2].
        frequency_penalty: Is subtracted from a token's logit once for each time that it stands in
            the output; in [-2, 2].
        repetition_penalty: Divides positive and multiplies negative logits of every token that
            stands in the prompt or the output; greater than 0, 1 changes nothing.
        logit_bias: Is added to the logits of these token ids, after cutting to [-100, 100].
        allowed_token_ids: The only token ids that may be sampled; None allows all.
        bad_words: Texts that the output must not hold, each as it stands and with a space before
            it. Instead of a text, a list of token ids forbids just that run of tokens.
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
        logprobs: For each output token, return its log-probability and those of this many most
            probable tokens; 0 returns the token's alone, -1 those of all tokens, None nothing, and
            True means 1. They are of the model's own logits, before all that stands above.
        prompt_logprobs: The same for the prompt's tokens. Such a request computes its whole prompt
            and takes nothing of it from the prefix cache.
        skip_special_tokens: Leaves special tokens out of the output text.
        spaces_between_special_tokens: Puts spaces between special tokens in the output text, where
            the tokenizer's own rules do.
        detokenize: Makes output text at all.
        output_kind: What each output of a stream holds.
        structured_outputs: Not supported yet: anything but None is refused.
        extra_args: For the caller's own plug-ins; nothing here reads it.

    Raises:
        RequestError: A value is out of range; the message names field, value and range.
        TypeError: An unknown keyword; the message names the nearest known one.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: None = None
    extra_args: Mapping[str, Any] | None = field(default=None, hash=False)

    def __new__(cls, **values: object) -> "SamplingParams":
        """Refuses unknown keywords before the generated `__init__` sees them."""
        refuse_unknown_keywords(cls.__name__, values, (field.name for field in fields(cls)))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Checks every field; turns lists into tuples, and -1 into what it stands for."""
        self._normalise()
        check_integer("n", self.n, minimum=1, maximum=MAX_ANSWERS)
        self._check_numbers()
        self._check_lengths()
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "detokenize",
        ):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}")
        if self.extra_args is not None and not isinstance(self.extra_args, Mapping):
            raise RequestError(f"extra_args must be a dict or None, got {self.extra_args!r}")
        self._check_combinations()

    def _normalise(self) -> None:
        """Gives every field its normal form: plain numbers, tuples, None for "not set"."""
        values = {item.name: _plain_number(getattr(self, item.name)) for item in fields(self)}
        values["stop_token_ids"] = _token_ids("stop_token_ids", self.stop_token_ids)
        values["stop"] = _stop_texts(self.stop)
        values["bad_words"] = _bad_words(self.bad_words)
        values["logit_bias"] = _logit_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            values["allowed_token_ids"] = _token_ids("allowed_token_ids", self.allowed_token_ids)
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(values[name], bool):
                values[name] = 1 if values[name] else None
        if _is_minus_one(values["seed"]):
            values["seed"] = None
        if _is_minus_one(values["top_k"]):
            values["top_k"] = 0
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        """Checks the fields that change probabilities, and those that report them."""
        _check_number("temperature", self.temperature, minimum=0.0)
        _check_number("top_p", self.top_p, minimum=0.0, maximum=1.0, open_minimum=True)
        _check_number("min_p", self.min_p, minimum=0.0, maximum=1.0)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), minimum=-2.0, maximum=2.0)
        _check_number("repetition_penalty", self.repetition_penalty, minimum=0.0, open_minimum=True)
        check_integer("top_k", self.top_k, minimum=0, hint="0 or -1 keeps every token")
        if self.seed is not None:
            check_integer("seed", self.seed, minimum=-(2**63), maximum=2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=-1, hint="-1 returns all tokens")

    def _check_lengths(self) -> None:
        check_integer("min_tokens", self.min_tokens, minimum=0)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, minimum=1, hint="None means no limit")
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens={self.min_tokens} is greater than max_tokens={self.max_tokens}; "
                    "lower min_tokens or raise max_tokens"
                )

    def _check_combinations(self) -> None:
        """Refuses fields that contradict each other, and what is not built."""
        if self.n > 1 and self.is_greedy:
            raise RequestError(
                f"n must be 1 with greedy decoding (temperature={self.temperature:g}), got "
                f"{self.n}: all answers would be equal; raise temperature"
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop={self.stop!r} needs the output text; leave detokenize=True, or use "
                "stop_token_ids"
            )
        if self.allowed_token_ids == ():
            raise RequestError(
                "allowed_token_ids must hold at least one token id; None allows all tokens"
            )
        if self.structured_outputs is not None:
            raise RequestError(
                f"structured_outputs={self.structured_outputs!r} is not supported yet; leave it "
                "None"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken instead of a draw."""
        return self.temperature < GREEDY_TEMPERATURE

    def clone(self, **changes: Any) -> "SamplingParams":  # noqa: ANN401 - each field has its type
        """Returns a copy with some fields changed, checked like a new one."""
        return replace(self, **changes)


def _is_minus_one(value: Any) -> bool:  # noqa: ANN401 - a caller may pass anything
    # An array would answer the comparison with an array.
    return isinstance(value, (int, float)) and value == -1


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _items(name: str, value: Any, of: str) -> list[Any]:  # noqa: ANN401 - a caller may pass anything
    if not isinstance(value, (str, bytes)):
        try:
            return list(value)
        except TypeError:  # no iterable, or one that has no length after all, such as np.array(3)
            pass
    raise RequestError(f"{name} must be a list of {of}, got {value!r}")


def _plain_number(value: Any) -> Any:  # noqa: ANN401 - a caller may pass anything
    """Turns numbers of other libraries into Python's own; leaves everything else alone."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _token_ids(name: str, value: Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = tuple(_plain_number(token_id) for token_id in _items(name, value, "token ids"))
    for token_id in ids:
        check_integer(name, token_id, minimum=0)
    return ids


def _logit_bias(value: Mapping[int, float] | None) -> dict[int, float] | None:
    """Cuts biases to what is allowed; ids may be texts, as they are in JSON."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {value!r}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        is_text = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        token_id = int(key) if is_text else _plain_number(key)
        check_integer("logit_bias", token_id, minimum=0, hint="its keys are token ids")
        number = _plain_number(bias)
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number or number != number:  # NaN is nothing, itself included
            raise RequestError(f"logit_bias must map token ids to numbers, got {key!r}: {bias!r}")
        biases[token_id] = float(max(-LARGEST_LOGIT_BIAS, min(LARGEST_LOGIT_BIAS, number)))
    return biases or None


def _bad_words(
    value: Iterable[str | Iterable[int]] | None,
) -> tuple[str | tuple[int, ...], ...]:
    if value is None:
        return ()
    words = tuple(
        word if isinstance(word, str) else _token_ids("bad_words", word)
        for word in _items("bad_words", value, "texts")
    )
    if not all(word.strip() if isinstance(word, str) else word for word in words):
        raise RequestError(
            f"bad_words must hold texts that are more than spaces, got {list(words)!r}"
        )
    return words


def _stop_texts(value: str | Iterable[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = (value,) if isinstance(value, str) else tuple(_items("stop", value, "texts"))
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
    if is_number and _is_finite(value):
        above = value > minimum if open_minimum else value >= minimum
        if above and (maximum is None or value <= maximum):
            return
    bracket = "(" if open_minimum else "["
    upper = "inf)" if maximum is None else f"{maximum:g}]"
    raise RequestError(
        f"{name} must be a number in {bracket}{minimum:g}, {upper}, got {shown(value)}"
    )
