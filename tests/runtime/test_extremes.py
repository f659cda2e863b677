"""What a single request, a key or a full disk may do to an engine: nothing."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoints
from nv_core import FinishReason, RequestError, SamplingParams, Scheduler, SchedulerConfig
from nv_runtime import LLM, AsyncLLM
from nv_runtime.answer import Answer
from nv_runtime.frozen_heap import FrozenHeap
from nv_runtime.request import Request
from tiny_engines import options

OPTIONS = options(max_model_len=64, num_gpu_blocks_override=100, skip_tokenizer_init=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), **OPTIONS) as llm:
        yield llm


def tokens_of(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("min_tokens", [2**30, 2**31, 2**64, 10**30])
def test_min_tokens_beyond_every_length_ban_the_stop_tokens_for_good(
    llm: LLM, min_tokens: int
) -> None:
    stops = list(range(0, 131, 2))
    params = SamplingParams(
        temperature=1, seed=1, min_tokens=min_tokens, max_tokens=None, stop_token_ids=stops
    )
    tokens = tokens_of(llm, [5, 6, 7], params)
    assert len(tokens) == 61
    assert not set(tokens) & set(stops)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"bad_words": [[1]] * 1025}, "ban 1025 runs of tokens; at most 1024"),
        ({"bad_words": [[1] * 129]}, "a run of 129 tokens; at most 128"),
        (
            {"bad_words": [[1]] * 1000, "min_tokens": 2, "stop_token_ids": range(100)},
            "stop_token_ids with min_tokens=2, ban 1100",
        ),
    ],
)
def test_bans_that_would_take_everybodys_memory_are_refused(
    llm: LLM, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([1, 2, 3], SamplingParams(**params), use_tqdm=False)


def test_rows_that_once_had_bans_are_free_of_them(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = tokens_of(llm, [1, 2, 3], plain)
    words = [[token] for token in range(0, 131, 3)] + [[expected[0], expected[1]], [7] * 20]
    assert tokens_of(llm, [1, 2, 3], plain.clone(bad_words=words)) != expected
    assert tokens_of(llm, [1, 2, 3], plain) == expected


def test_an_interrupt_while_a_request_is_added_leaves_a_good_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    expected = tokens_of(llm, [4, 5, 6], params)
    real = Request

    def interrupted(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - stands in for a class
        signal.raise_signal(signal.SIGINT)
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr("nv_runtime.engine.Request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3], [4]], params, use_tqdm=False)
    scheduler = llm.llm_engine.scheduler
    scheduler.check_invariants()
    assert not scheduler.has_unfinished
    assert gc.get_freeze_count() == 0
    assert tokens_of(llm, [4, 5, 6], params) == expected


def test_an_interrupt_within_a_step_waits_for_its_end(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = tokens_of(llm, [4, 5, 6], params)
    scheduler = llm.llm_engine.scheduler
    commit = scheduler.commit

    def interrupted(*args: Any) -> Any:  # noqa: ANN401 - stands in for the method
        signal.raise_signal(signal.SIGINT)
        return commit(*args)

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3], [4]], params, use_tqdm=False)
    scheduler.check_invariants()
    assert not scheduler.has_unfinished
    assert tokens_of(llm, [4, 5, 6], params) == expected


def test_a_heap_that_others_froze_is_counted_once_in_a_run(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    count = gc.get_freeze_count

    def counting() -> int:
        asked.append(count())
        return asked[-1]

    gc.freeze()
    try:
        monkeypatch.setattr(gc, "get_freeze_count", counting)
        llm.generate([[1, 2]] * 20, SamplingParams(max_tokens=2), use_tqdm=False)
    finally:
        gc.unfreeze()
    assert len(asked) == 1
    assert FrozenHeap()  # dropped at once, which unfreezes nothing


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_ends_the_step_log_and_nothing_else(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(str(checkpoint), **OPTIONS) as llm:
        expected = tokens_of(llm, [1, 2, 3], params)
    with (
        caplog.at_level(logging.WARNING),
        LLM(str(checkpoint), step_log="/dev/full", **OPTIONS) as llm,
    ):
        for _ in range(2):
            assert tokens_of(llm, [1, 2, 3], params) == expected
    assert "the step log ends here" in caplog.text

    async def serve() -> list[int]:
        engine = AsyncLLM(str(checkpoint), step_log="/dev/full", **OPTIONS)
        endless = SamplingParams(max_tokens=None, ignore_eos=True)

        async def last() -> int:
            tokens: list[int] = []
            async for output in engine.generate([1, 2, 3], endless):
                tokens = list(output.outputs[0].token_ids)
            return len(tokens)

        tasks = [asyncio.create_task(last()) for _ in range(3)]
        await asyncio.sleep(0.05)
        engine.shutdown()
        return await asyncio.wait_for(asyncio.gather(*tasks), timeout=30)

    assert len(asyncio.run(serve())) == 3


class HalfACharacter:
    """A decoder that holds back what is not a whole character until the end."""

    def push(self, token_ids: list[int]) -> str:
        return "a" * (len(token_ids) - 1)

    def finish(self) -> str:
        return "\ufffd"


class Tokenizer:
    def stream_decoder(self, **_options: bool) -> HalfACharacter:
        return HalfACharacter()


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR, FinishReason.LENGTH])
def test_half_a_character_of_a_broken_off_answer_is_no_stop_text(reason: FinishReason) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=9, block_size=4))
    seq = scheduler.add([1, 2], SamplingParams(stop=["\ufffd"], max_tokens=9))
    answer = Answer(seq, index=0, tokenizer=Tokenizer())  # type: ignore[arg-type]
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, {seq.seq_id: 5})
    assert not answer.meets_stop_text()
    scheduler.finish(seq.seq_id, reason)
    output = answer.take(delta=False)
    is_whole = reason is FinishReason.LENGTH
    assert output.finish_reason == ("stop" if is_whole else reason.value)
    assert output.stop_reason == ("\ufffd" if is_whole else None)
