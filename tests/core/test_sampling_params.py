"""SamplingParams: ranges, normal forms, and messages that name the field."""

import copy
import dataclasses
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from nv_core import NvError, RequestError, RequestOutputKind, SamplingParams

BAD_VALUES: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "0.5"),
    ("temperature", None),
    ("temperature", True),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", -0.5),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("top_k", -2),
    ("top_k", 0.4),
    ("top_k", True),
    ("min_tokens", -1),
    ("min_tokens", 1.0),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2.0),
    ("seed", 1.5),
    ("seed", 2**64),
    ("ignore_eos", 1),
    ("skip_special_tokens", None),
    ("detokenize", "yes"),
    ("stop_token_ids", "12"),
    ("stop_token_ids", 12),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", [True]),
    ("n", 0),
    ("n", 16385),
    ("n", True),
    ("n", 1.0),
    ("presence_penalty", 2.1),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", None),
    ("repetition_penalty", math.inf),
    ("logit_bias", [1]),
    ("logit_bias", {"x": 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1.5: 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {1: "2"}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: None}),
    ("allowed_token_ids", "12"),
    ("allowed_token_ids", 3),
    ("allowed_token_ids", [-1]),
    ("bad_words", "word"),
    ("bad_words", 3),
    ("bad_words", [3]),
    ("bad_words", [[-1]]),
    ("logprobs", -2),
    ("logprobs", 1.5),
    ("logprobs", "5"),
    ("prompt_logprobs", -2),
    ("output_kind", "delta"),
    ("output_kind", 1),
    ("spaces_between_special_tokens", None),
    ("extra_args", [1]),
]


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "top_k", "seed", "temperature", "n"])
def test_an_integer_too_long_to_be_written_out_is_refused_by_name(name: str) -> None:
    options: dict[str, Any] = {name: 1 << 16609}
    with pytest.raises(RequestError, match=f"{name} must be .*one of 16610 bits"):
        SamplingParams(**options)


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_bad_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"{name} must") as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, NvError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", 2.5),
        ("top_p", 1e-6),
        ("top_p", 1),
        ("top_k", 50),
        ("min_p", 1.0),
        ("repetition_penalty", 0.5),
        ("max_tokens", None),
        ("max_tokens", 1),
        ("seed", 0),
        ("seed", 2**64 - 1),
        ("n", 16384),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("logprobs", 0),
        ("logprobs", -1),
        ("prompt_logprobs", 100_000),
        ("output_kind", RequestOutputKind.DELTA),
        ("extra_args", {"any": object}),
    ],
)
def test_edges_of_the_ranges_are_allowed(name: str, value: object) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value  # type: ignore[arg-type]


def test_minus_one_means_off() -> None:
    params = SamplingParams(top_k=-1, seed=-1)
    assert params.top_k == 0
    assert params.seed is None


def test_min_tokens_must_not_exceed_max_tokens() -> None:
    SamplingParams(min_tokens=16)
    SamplingParams(min_tokens=99, max_tokens=None)
    with pytest.raises(RequestError, match="min_tokens=17 is greater than max_tokens=16"):
        SamplingParams(min_tokens=17)


def test_unknown_keyword_names_the_nearest_or_all() -> None:
    with pytest.raises(TypeError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'zzz'; known keywords: .*max_tokens.*top_p"):
        SamplingParams(zzz=1)  # type: ignore[call-arg]


def test_stop_token_ids_from_any_iterable() -> None:
    ids: Any = iter([3, 4])
    assert SamplingParams(stop_token_ids=ids).stop_token_ids == (3, 4)
    none: Any = None
    assert SamplingParams(stop_token_ids=none).stop_token_ids == ()


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9e-6, True), (1e-5, False)])
def test_greedy_below_the_smallest_temperature(temperature: float, greedy: bool) -> None:  # noqa: FBT001
    assert SamplingParams(temperature=temperature).is_greedy is greedy


def test_survives_pickle_and_copy() -> None:
    params = SamplingParams(min_tokens=4, stop_token_ids=(5, 6), ignore_eos=True, seed=7)
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params


def test_clone_is_checked_like_a_new_one() -> None:
    params = SamplingParams(temperature=0.3)
    assert params.clone(top_k=5) == SamplingParams(temperature=0.3, top_k=5)
    with pytest.raises(RequestError, match="top_p must be"):
        params.clone(top_p=2)


def test_frozen() -> None:
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("stop", "expected"), [(None, ()), ("END", ("END",)), (["a", "b"], ("a", "b")), ([], ())]
)
def test_stop_texts_in_every_form(stop: Any, expected: tuple[str, ...]) -> None:  # noqa: ANN401
    assert SamplingParams(stop=stop).stop == expected


@pytest.mark.parametrize("stop", ["", ["a", ""], [1], 3, b"END"])
def test_bad_stop_texts_are_refused(stop: Any) -> None:  # noqa: ANN401 - that is the point
    with pytest.raises(RequestError, match="stop must"):
        SamplingParams(stop=stop)


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": (),
        "max_tokens": 16,
        "min_tokens": 0,
        "seed": None,
        "ignore_eos": False,
        "stop_token_ids": (),
        "stop": (),
        "include_stop_str_in_output": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "detokenize": True,
        "output_kind": RequestOutputKind.CUMULATIVE,
        "structured_outputs": None,
        "extra_args": None,
    }


@pytest.mark.parametrize(
    "name",
    [
        "seed",
        "stop",
        "stop_token_ids",
        "bad_words",
        "logprobs",
        "prompt_logprobs",
        "logit_bias",
        "allowed_token_ids",
        "structured_outputs",
        "extra_args",
    ],
)
def test_none_is_the_default_of_what_may_be_left_out(name: str) -> None:
    assert SamplingParams(**{name: None}) == SamplingParams()  # type: ignore[arg-type]


def test_logprobs_may_be_a_yes_or_no() -> None:
    params = SamplingParams(logprobs=True, prompt_logprobs=False)
    assert (params.logprobs, params.prompt_logprobs) == (1, None)


def test_logit_bias_is_cut_and_its_keys_may_be_texts() -> None:
    bias: Any = {"7": 250, 3: -1000.0, 5: 0.5}
    assert SamplingParams(logit_bias=bias).logit_bias == {7: 100.0, 3: -100.0, 5: 0.5}
    assert SamplingParams(logit_bias={}).logit_bias is None
    kept = SamplingParams(logit_bias=bias)
    bias[9] = 1.0
    assert kept.logit_bias is not None
    assert 9 not in kept.logit_bias


def test_bad_words_are_texts_or_token_ids() -> None:
    assert SamplingParams(bad_words=["a", [1, 2]]).bad_words == ("a", (1, 2))
    empties: list[Any] = ["", "  ", []]
    for empty in empties:
        with pytest.raises(RequestError, match="bad_words must hold"):
            SamplingParams(bad_words=["a", empty])


def test_a_list_of_no_allowed_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="allowed_token_ids must hold at least one"):
        SamplingParams(allowed_token_ids=[])


def test_greedy_decoding_has_one_answer() -> None:
    assert SamplingParams(n=3).n == 3
    with pytest.raises(RequestError, match="n must be 1 with greedy decoding"):
        SamplingParams(n=2, temperature=0)


def test_structured_outputs_are_refused_for_now() -> None:
    with pytest.raises(RequestError, match=r"structured_outputs=.* is not supported yet"):
        SamplingParams(structured_outputs={"json": {}})  # type: ignore[arg-type]


def test_all_fields_but_mappings_take_part_in_the_hash() -> None:
    assert hash(SamplingParams(logit_bias={1: 2.0})) == hash(SamplingParams())
    assert hash(SamplingParams(bad_words=["a"])) != hash(SamplingParams())


def test_stop_texts_need_text() -> None:
    with pytest.raises(RequestError, match="leave detokenize=True"):
        SamplingParams(stop="END", detokenize=False)


class OtherInt(int):
    pass


def test_numbers_of_other_libraries_are_numbers() -> None:
    # Fractions stand in for numpy's scalars, which register with `numbers` in the same way.
    from fractions import Fraction

    params = SamplingParams(temperature=Fraction(1, 2), top_p=Fraction(3, 4), top_k=OtherInt(5))  # type: ignore[arg-type]
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.75, 5)
    assert type(params.temperature) is float
    with pytest.raises(RequestError, match="top_k must be an integer"):
        SamplingParams(top_k=Fraction(5, 2))  # type: ignore[arg-type]


class ArrayOfNoDimension:
    """As np.array(3): it has __iter__, and using it raises TypeError."""

    def __iter__(self) -> Iterator[int]:
        raise TypeError("iteration over a 0-d array")

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "options",
    [
        *({name: 10**400} for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
        *({name: 10**400} for name in ("presence_penalty", "frequency_penalty")),
        *({name: ArrayOfNoDimension()} for name in ("top_k", "seed", "stop", "bad_words")),
        *({name: ArrayOfNoDimension()} for name in ("stop_token_ids", "allowed_token_ids")),
        {"logit_bias": {"9" * 5000: 1}},
        {"logit_bias": {1: float("nan")}},
    ],
)
def test_values_that_break_arithmetic_are_refused_like_others(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        SamplingParams(**options)


def test_a_bias_that_no_float_holds_is_cut_like_others() -> None:
    assert SamplingParams(logit_bias={1: 10**400}).logit_bias == {1: 100.0}
