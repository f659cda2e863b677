"""SamplingParams: ranges, normal forms, and messages that name the field."""

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest

from nv_core import NvError, RequestError, SamplingParams

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
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_bad_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"{name} must be") as caught:
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
