"""Parameters that forbid every token are refused, with the fields that do it; all others pass."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from nv_core import RequestError, SamplingParams
from nv_runtime.request_checks import check_sampling_params

VOCAB_SIZE = 3
EOS = 2


def check(**params: Any) -> None:  # noqa: ANN401 - the fields of SamplingParams
    check_sampling_params(
        SamplingParams(**params), vocab_size=VOCAB_SIZE, max_logprobs=20, eos_token_ids=[EOS]
    )


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        ({"allowed_token_ids": [1], "bad_words": [[1]]}, ("allowed_token_ids", "bad_words")),
        (
            {"allowed_token_ids": [1], "stop_token_ids": [1], "min_tokens": 1},
            ("allowed_token_ids", "stop_token_ids", "min_tokens"),
        ),
        (
            {"allowed_token_ids": [EOS], "min_tokens": 1},
            ("allowed_token_ids", "end-of-sequence", "min_tokens"),
        ),
        (
            {"allowed_token_ids": [0, 1, EOS], "bad_words": [[0], [1]], "min_tokens": 1},
            ("allowed_token_ids", "bad_words", "end-of-sequence", "min_tokens"),
        ),
        ({"bad_words": [[0], [1], [2]]}, ("vocabulary", "bad_words")),
    ],
)
def test_the_message_names_the_fields(params: dict[str, Any], fields: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match="no token is left to sample") as error:
        check(**params)
    assert all(field in str(error.value) for field in fields)


def test_exactly_what_leaves_no_token_is_refused() -> None:
    subsets = [[t for t in range(VOCAB_SIZE) if bits >> t & 1] for bits in range(1 << VOCAB_SIZE)]
    num_refused = 0
    for allowed, bad, stop, min_tokens, ignore_eos in product(
        [None, *subsets[1:]], subsets, subsets, (0, 2), (False, True)
    ):
        left = set(range(VOCAB_SIZE) if allowed is None else allowed) - set(bad)
        if min_tokens:
            left -= set(stop) | (set() if ignore_eos else {EOS})
        params: dict[str, Any] = {
            "allowed_token_ids": allowed,
            # A run of several tokens forbids none of them by itself.
            "bad_words": [*([token] for token in bad), [0, 1]],
            "stop_token_ids": stop,
            "min_tokens": min_tokens,
            "ignore_eos": ignore_eos,
        }
        if left:
            check(**params)
            continue
        num_refused += 1
        with pytest.raises(RequestError, match="no token is left to sample"):
            check(**params)
    assert num_refused > 100


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_more_ids_than_there_are_tokens_are_refused(field: str) -> None:
    check(**{field: [0, 1, 1]})
    with pytest.raises(RequestError, match=rf"{field} holds 4 token ids, and the model has 3"):
        check(**{field: [0, 1, 1, 0]})


def test_so_many_stop_texts_that_they_hold_up_others_are_refused() -> None:
    check(stop=["x" * 256] * 256)
    check(stop="x" * 65536)
    for stop in (["x"] * 257, "x" * 65537, ["x" * 300] * 256):
        with pytest.raises(RequestError, match=r"stop holds \d+ texts of \d+ characters together"):
            check(stop=stop)
