"""Stop texts: found however the text is cut into tokens, cut off exactly, and never leaked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_checkpoints
from nv_core import SamplingParams
from nv_runtime import LLM, RequestOutput
from nv_runtime.stop_strings import StopStrings
from stop_oracle import first_match

texts = st.text(alphabet="abX", max_size=30)
stop_lists = st.lists(st.text(alphabet="abX", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(deadline=None, max_examples=300)
@given(text=texts, stops=stop_lists, cuts=st.lists(st.integers(0, 30), max_size=8))
def test_the_match_does_not_depend_on_the_pieces(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopStrings(stops)
    num_searched = 0
    found = None
    for end in [*sorted(cut for cut in cuts if cut < len(text)), len(text)]:
        found = matcher.find(text[:end], num_searched=num_searched)
        if found:
            break
        num_searched = end
    assert found == first_match(text, stops)


@settings(deadline=None, max_examples=300)
@given(text=texts, rest=texts, stops=stop_lists)
def test_what_is_shown_is_never_taken_back(text: str, rest: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    if first_match(text, stops) is not None:
        return
    shown = len(text) - matcher.num_held_back(text)
    match = first_match(text + rest, stops)
    assert match is None or match.start >= shown
    # And no more is held back than could still become a stop text.
    held = text[shown:]
    assert not held or any(stop.startswith(held) for stop in stops)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path: Path = tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True)
    with LLM(
        str(path),
        device="cpu",
        dtype="float32",
        block_size=4,
        max_model_len=128,
        num_gpu_blocks_override=200,
        async_scheduling=True,
        show_progress=False,
    ) as llm:
        yield llm


def run(llm: LLM, **params: Any) -> RequestOutput:  # noqa: ANN401 - fields of SamplingParams
    sampling = SamplingParams(temperature=1.0, seed=3, ignore_eos=True, max_tokens=40, **params)
    return llm.generate("the quick", sampling, use_tqdm=False)[0]


def test_a_stop_text_ends_the_request_at_once(llm: LLM) -> None:
    free = run(llm).outputs[0]
    for length in (1, 2, 5):
        for place in (3, len(free.text) // 2):
            stop = free.text[place : place + length]
            (expected,) = [m for m in [first_match(free.text, [stop])] if m]
            stopped = run(llm, stop=["~never~", stop]).outputs[0]
            assert stopped.text == free.text[: expected.start]
            assert stopped.finish_reason == "stop"
            assert stopped.stop_reason == stop
            # The tokens go just as far as the text needs.
            count = len(stopped.token_ids)
            assert list(stopped.token_ids) == list(free.token_ids)[:count]
            decode = llm.get_tokenizer().decode
            assert stop in decode(free.token_ids[:count])
            assert stop not in decode(free.token_ids[: count - 1])
            included = run(llm, stop=stop, include_stop_str_in_output=True).outputs[0]
            assert included.text == free.text[: expected.end]


def test_streams_hold_back_what_may_become_a_stop_text(llm: LLM) -> None:
    free = run(llm).outputs[0].text
    stop = free[6:12]
    shown = ""
    params = SamplingParams(temperature=1.0, seed=3, ignore_eos=True, max_tokens=40, stop=stop)
    for output in llm.stream("the quick", params):
        text = output.outputs[0].text
        assert text.startswith(shown)
        shown = text
    assert shown == free[: free.index(stop)]


def test_text_held_back_is_delivered_at_the_end(llm: LLM) -> None:
    free = run(llm).outputs[0]
    almost = run(llm, stop=free.text[-1] + "~never~").outputs[0]
    assert almost.text == free.text
    assert almost.finish_reason == "length"
    assert almost.stop_reason is None


def test_stop_texts_wait_for_min_tokens(llm: LLM) -> None:
    free = run(llm)
    stop = free.outputs[0].text[2]
    late = run(llm, stop=stop, min_tokens=20).outputs[0]
    assert len(late.token_ids) >= 20
    assert late.text.startswith(free.outputs[0].text[:3])


def test_others_go_on_and_everything_is_freed(llm: LLM) -> None:
    free = run(llm).outputs[0]
    stop = SamplingParams(
        temperature=1.0, seed=3, ignore_eos=True, max_tokens=40, stop=free.text[4]
    )
    go_on = SamplingParams(temperature=1.0, seed=3, ignore_eos=True, max_tokens=40)
    outputs = llm.generate(["the quick"] * 4, [stop, go_on, stop, go_on], use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["stop", "length"] * 2
    assert [list(o.outputs[0].token_ids) for o in outputs[1::2]] == [list(free.token_ids)] * 2
    scheduler = llm._open_parts().engine.scheduler
    scheduler.check_invariants()
    assert scheduler.num_free_blocks == 200
