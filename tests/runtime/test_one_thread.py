"""One LLM serves one thread at a time: a second is refused, and costs the first nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import tiny_checkpoints
from nv_core import SamplingParams
from nv_runtime import LLM, ConcurrentUseError
from nv_runtime.one_thread import OneThread

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    checkpoint = tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True)
    options: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 60, "block_size": 4}
    with LLM(str(checkpoint), device="cpu", show_progress=False, **options) as llm:
        yield llm


def in_another_thread(call: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the call returns
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(timeout=60)


def tokens(llm: LLM) -> list[int]:
    return list(llm.generate("the fox", GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def during_generate(llm: LLM, action: Callable[[], None]) -> list[int]:
    """Runs an action between two steps of `generate`; returns what that returns."""
    step = llm.llm_engine.step
    calls: list[None] = []

    def step_and_act() -> list[Any]:
        calls.append(None)
        if len(calls) == 3:
            action()
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.llm_engine, "step", step_and_act)
        return tokens(llm)


def test_a_second_thread_is_refused_whatever_it_calls(llm: LLM) -> None:
    expected = tokens(llm)
    stream = llm.stream("shore", GREEDY)
    next(stream)
    message = [{"role": "user", "content": "hi"}]
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate("a", GREEDY, use_tqdm=False),
        lambda: llm.chat(message, GREEDY, use_tqdm=False, chat_template="{{ messages }}"),
        lambda: llm.stream("a", GREEDY),
        lambda: next(stream),
        stream.close,
        llm.reset_prefix_cache,
        llm.shutdown,
    ]
    num_refused = 0

    def intrude() -> None:
        nonlocal num_refused
        for call in calls:
            with pytest.raises(ConcurrentUseError, match="AsyncLLM"):
                in_another_thread(call)
            num_refused += 1

    assert during_generate(llm, intrude) == expected
    assert num_refused == len(calls)
    assert issubclass(ConcurrentUseError, RuntimeError)
    # The stream lost nothing by it.
    *_, last = stream
    assert last.finished
    assert len(last.outputs[0].token_ids) == 6
    assert not llm.llm_engine.has_unfinished


def test_threads_may_take_turns_and_a_stream_may_move(llm: LLM) -> None:
    expected = tokens(llm)
    assert in_another_thread(lambda: tokens(llm)) == expected
    stream = llm.stream("the fox", GREEDY)
    next(stream)
    assert in_another_thread(lambda: next(stream)).outputs[0].token_ids
    *_, last = stream
    assert list(last.outputs[0].token_ids) == expected


def test_one_thread_may_generate_while_a_stream_is_open_and_inside_a_call(llm: LLM) -> None:
    expected = tokens(llm)
    inner: list[list[int]] = []
    with llm.stream("shore", GREEDY) as stream:
        next(stream)
        assert during_generate(llm, lambda: inner.append(tokens(llm))) == expected
    assert inner == [expected]
    assert not llm.llm_engine.has_unfinished


@pytest.mark.parametrize("collect", [lambda f: f(), in_another_thread], ids=["same", "other"])
def test_a_stream_collected_in_the_middle_of_a_call_is_aborted_after_it(
    llm: LLM, collect: Callable[[Callable[[], Any]], Any]
) -> None:
    expected = tokens(llm)
    ring: list[Any] = [llm.stream("shore", SamplingParams(max_tokens=50, ignore_eos=True))]
    ring.append(ring)
    del ring
    assert during_generate(llm, lambda: collect(gc.collect)) == expected
    assert not llm.llm_engine.has_unfinished


def test_what_is_left_over_runs_once_and_outside() -> None:
    guard = OneThread()
    done: list[str] = []
    with guard:
        with guard:
            guard.when_free(lambda: done.append("inner"))
            in_another_thread(lambda: guard.when_free(lambda: done.append("other")))
        assert done == []
    assert done == ["inner", "other"]
    guard.when_free(lambda: done.append("now"))
    assert done == ["inner", "other", "now"]


def test_two_threads_at_once_get_right_answers_or_a_refusal(llm: LLM) -> None:
    expected = tokens(llm)
    barrier = threading.Barrier(2)

    def race() -> list[int] | None:
        barrier.wait()
        try:
            return tokens(llm)
        except ConcurrentUseError:
            return None

    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            answers = [future.result(60) for future in [pool.submit(race), pool.submit(race)]]
            assert any(answers)
            assert all(answer in (None, expected) for answer in answers)
