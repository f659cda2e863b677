"""generation_config.json: defaults and end tokens."""

from __future__ import annotations

from typing import Any

import pytest

from nv_core import SamplingParams
from nv_core.errors import ConfigError
from nv_runtime.generation_config import default_sampling_params, eos_token_ids

QWEN3 = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


def test_values_in_the_file_become_defaults() -> None:
    expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert default_sampling_params(QWEN3) == expected
    everything = {"min_p": 0.1, "repetition_penalty": 1.2, "max_new_tokens": 512}
    assert default_sampling_params({**QWEN3, **everything}) == expected.clone(
        min_p=0.1, repetition_penalty=1.2, max_tokens=512
    )


def test_absent_and_null_values_leave_our_defaults() -> None:
    assert default_sampling_params({}) == SamplingParams()
    assert default_sampling_params({"temperature": None, "top_k": None}) == SamplingParams()


def test_do_sample_alone_changes_nothing() -> None:
    assert default_sampling_params({"do_sample": False}) == SamplingParams()
    assert default_sampling_params({"do_sample": False, "temperature": 0.6}).temperature == 0.6


def test_a_wrong_value_names_the_file() -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_p must be .* got 7"):
        default_sampling_params({"top_p": 7})


def test_overrides_stand_in_place_of_the_files_values() -> None:
    params = default_sampling_params(QWEN3, {"temperature": 0.1, "top_k": None})
    assert params == SamplingParams(temperature=0.1, top_p=0.95)
    assert default_sampling_params({}, {"max_new_tokens": 7}).max_tokens == 7
    with pytest.raises(ConfigError, match=r"'max_tokens'; it may have temperature, .*max_new_toke"):
        default_sampling_params({}, {"max_tokens": 7})
    with pytest.raises(ConfigError, match=r"override_generation_config, .*: min_p must be"):
        default_sampling_params({}, {"min_p": 7})


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, ()), (2, (2,)), (0, (0,)), ([5, 6, 5], (5, 6)), ([], ())],
)
def test_end_tokens_are_read_in_all_spellings(value: Any, expected: tuple[int, ...]) -> None:  # noqa: ANN401
    assert eos_token_ids({"eos_token_id": value}, source="config.json") == expected
    assert eos_token_ids({}, source="config.json") == ()


@pytest.mark.parametrize("value", ["2", [2, "3"], -1, True, 2.0, {"id": 2}])
def test_wrong_end_tokens_name_the_file(value: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match=r"config\.json: eos_token_id must be"):
        eos_token_ids({"eos_token_id": value}, source="config.json")
