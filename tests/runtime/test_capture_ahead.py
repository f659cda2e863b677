"""Graphs that are captured before a step needs them: at the start, when asked for, in idle time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import nv_runtime.captured_graphs
import tiny_checkpoints
from emulated_graphs import Emulator, Output, emulate_and
from forked_ranks import In, die, do_nothing, fork_ranks
from nv_core import ConfigError, SamplingParams
from nv_runtime import LLM, AsyncLLM, EngineConfig
from nv_runtime.cuda_graphs import MAX_GRAPHS_AHEAD, batch_buckets
from nv_runtime.model_runner import ModelRunner
from nv_runtime.ranks.errors import RankError
from tiny_checkpoints import TinySpec
from tiny_engines import options, tokens_of

MAX_NUM_SEQS = 13
SIZES = batch_buckets(MAX_NUM_SEQS)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
FILTERED = SamplingParams(temperature=0.8, top_k=5, seed=3, max_tokens=6, ignore_eos=True)
PENALISED = GREEDY.clone(repetition_penalty=1.2)
PROMPTS = [[5 + i, 17, 3 * i] for i in range(MAX_NUM_SEQS)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = TinySpec(num_heads=4, num_kv_heads=2)
    return tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"), spec)


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Emulator:
    return Emulator(monkeypatch)


def settings(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - LLM's own options
    defaults: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": MAX_NUM_SEQS}
    return options(**{**defaults, **changes})


def answers(llm: LLM, params: SamplingParams | None = GREEDY) -> list[list[list[int]]]:
    """Batches of every size."""
    return [
        [tokens_of(output) for output in llm.generate(PROMPTS[:size], params, use_tqdm=False)]
        for size in range(1, MAX_NUM_SEQS + 1)
    ]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[list[int]]]:
    with LLM(str(checkpoint), **settings()) as llm:
        return answers(llm)


def test_a_start_that_captures_leaves_nothing_to_capture(
    checkpoint: Path,
    emulator: Emulator,
    expected: list[list[list[int]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with LLM(str(checkpoint), **settings(graph_capture="start", show_progress=True)) as llm:
        bar = capsys.readouterr().err
        assert "Capturing CUDA graphs: 100%" in bar
        assert f"{len(SIZES)}/{len(SIZES)}" in bar
        rows = {phase.name: phase.detail for phase in llm.start_phases}
        assert rows["CUDA graphs"] == f"{len(SIZES)} captured"
        assert answers(llm) == expected
        assert emulator.num_decode_graphs == len(SIZES)
        assert llm.capture_graphs() == 0
        assert capsys.readouterr().err == ""


def test_a_start_without_show_progress_shows_none(
    checkpoint: Path, emulator: Emulator, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(str(checkpoint), **settings(graph_capture="start")):
        assert emulator.num_decode_graphs == len(SIZES)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("when", ["lazy", "idle"])
def test_a_program_of_its_own_thread_captures_what_it_needs(
    checkpoint: Path, emulator: Emulator, when: str
) -> None:
    with LLM(str(checkpoint), **settings(graph_capture=when)) as llm:
        assert emulator.graphs == []
        llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
        assert emulator.num_decode_graphs == 1
        assert llm.capture_graphs(use_tqdm=False) == len(SIZES) - 1
        assert emulator.num_decode_graphs == len(SIZES)


def test_captures_between_the_steps_of_a_stream_change_no_token(
    checkpoint: Path, emulator: Emulator
) -> None:
    long = [GREEDY.clone(max_tokens=20), FILTERED.clone(max_tokens=20)]
    with LLM(str(checkpoint), **settings(enforce_eager=True)) as llm:
        wanted = [tokens_of(o) for o in llm.generate(PROMPTS[:2], long, use_tqdm=False)]
    with LLM(str(checkpoint), **settings(async_scheduling=True)) as llm:
        found: dict[str, list[int]] = {}
        for number, output in enumerate(llm.stream(PROMPTS[:2], long)):
            found[output.request_id] = tokens_of(output)
            if number in (2, 9):
                llm.capture_graphs(use_tqdm=False)
        assert list(found.values()) == wanted
    assert emulator.num_decode_graphs >= len(SIZES)


def test_what_requests_ask_for_decides_what_is_captured_ahead(
    checkpoint: Path, emulator: Emulator
) -> None:
    """Also that their number has a limit."""
    with LLM(str(checkpoint), **settings()) as llm:
        assert llm.capture_graphs(use_tqdm=False) == len(SIZES)
        llm.generate(PROMPTS, FILTERED, use_tqdm=False)
        assert llm.capture_graphs(use_tqdm=False) == len(SIZES) - 1
        assert emulator.num_decode_graphs == MAX_GRAPHS_AHEAD * len(SIZES)
        answers(llm, FILTERED)
        assert emulator.num_decode_graphs == MAX_GRAPHS_AHEAD * len(SIZES)
        llm.generate(PROMPTS, PENALISED, use_tqdm=False)
        assert llm.capture_graphs(use_tqdm=False) == 0


@pytest.mark.parametrize("values", [{"repetition_penalty": 1.2}, {"top_k": 5}])
def test_requests_without_parameters_find_the_graphs_of_the_start(
    checkpoint: Path, emulator: Emulator, values: dict[str, Any]
) -> None:
    more = {"max_new_tokens": 5, **values}
    with LLM(str(checkpoint), **settings(override_generation_config=more)) as llm:
        wanted = answers(llm, None)
    emulator.graphs.clear()
    changes = settings(override_generation_config=more, graph_capture="start")
    with LLM(str(checkpoint), **changes) as llm:
        assert emulator.num_decode_graphs == len(SIZES)
        assert answers(llm, None) == wanted
        assert emulator.num_decode_graphs == len(SIZES)


def test_captures_end_where_memory_does(
    checkpoint: Path, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(run: Callable[[], Output], *where: object) -> object:
        if len(emulator.graphs) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return emulator.capture(run, *where)

    monkeypatch.setattr(nv_runtime.captured_graphs, "capture", capture)
    with LLM(str(checkpoint), **settings(graph_capture="start")) as llm:
        assert len(emulator.graphs) == 2
        assert llm.capture_graphs(use_tqdm=False) == 0
        assert len(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == MAX_NUM_SEQS


def test_without_graphs_there_is_nothing_to_capture(checkpoint: Path) -> None:
    with LLM(str(checkpoint), **settings(graph_capture="start")) as llm:
        assert llm.capture_graphs() == 0


def test_unknown_times_of_capture_are_refused() -> None:
    message = "graph_capture must be one of idle, lazy, start, got 'eager'"
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", graph_capture="eager")


def wait_until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


async def answer(llm: AsyncLLM, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    outputs = [output async for output in llm.generate(prompt, params)]
    return tokens_of(outputs[-1])


async def all_answers(llm: AsyncLLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return await asyncio.gather(*(answer(llm, prompt, params) for prompt in PROMPTS))


def test_an_engine_with_nothing_to_do_captures_all_sizes(
    checkpoint: Path, emulator: Emulator, expected: list[list[list[int]]]
) -> None:
    llm = AsyncLLM(str(checkpoint), **settings())
    wait_until(lambda: emulator.num_decode_graphs == len(SIZES))
    assert asyncio.run(all_answers(llm)) == expected[-1]
    assert emulator.num_decode_graphs == len(SIZES)
    # Requests that ask for more bring graphs of their own, the other sizes in the pause after them.
    asyncio.run(answer(llm, PROMPTS[0], FILTERED))
    wait_until(lambda: emulator.num_decode_graphs == 2 * len(SIZES))
    llm.shutdown()


@pytest.mark.parametrize("changes", [{"graph_capture": "lazy"}, {"enforce_eager": True}])
def test_idle_time_is_left_alone_where_it_should_be(
    checkpoint: Path,
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
) -> None:
    if "enforce_eager" in changes:
        monkeypatch.setattr(nv_runtime.builder, "uses_graphs", lambda *_: False)
    llm = AsyncLLM(str(checkpoint), **settings(**changes))
    # The thread has been idle before and after each of these.
    for _ in range(3):
        asyncio.run(answer(llm, PROMPTS[0]))
    assert emulator.num_decode_graphs == (0 if "enforce_eager" in changes else 1)
    if "enforce_eager" not in changes:
        assert asyncio.run(llm.capture_graphs()) == len(SIZES) - 1
    llm.shutdown()


def test_whoever_comes_waits_for_one_capture_at_most(
    checkpoint: Path, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes during a capture is served before the next one begins."""
    events: list[str] = []
    is_capturing, may_go_on = threading.Event(), threading.Event()
    launch, capture_next_graph = ModelRunner.launch, ModelRunner.capture_next_graph

    def capture_ahead(runner: ModelRunner) -> bool:
        events.append("capture ahead")
        is_capturing.set()
        assert may_go_on.wait(30)
        return capture_next_graph(runner)

    def note_launch(runner: ModelRunner, plan: Any) -> Any:  # noqa: ANN401
        events.append("launch")
        return launch(runner, plan)

    monkeypatch.setattr(ModelRunner, "capture_next_graph", capture_ahead)
    monkeypatch.setattr(ModelRunner, "launch", note_launch)
    llm = AsyncLLM(str(checkpoint), **settings())

    async def serve() -> list[int]:
        task = asyncio.create_task(answer(llm, PROMPTS[0]))
        await asyncio.sleep(0)
        await asyncio.to_thread(is_capturing.wait, 30)
        # The request is in the thread's queue by now, and the capture goes on.
        may_go_on.set()
        return await task

    assert len(asyncio.run(serve())) == GREEDY.max_tokens
    first, last = events.index("launch"), len(events) - 1 - events[::-1].index("launch")
    assert events[:first] == ["capture ahead"]
    assert "capture ahead" not in events[first:last]
    wait_until(lambda: emulator.num_decode_graphs == len(SIZES))
    llm.shutdown()


def test_an_engine_that_captures_can_be_stopped(
    checkpoint: Path, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_capturing = threading.Event()

    def capture(run: Callable[[], Output], *where: object) -> object:
        is_capturing.set()
        time.sleep(0.05)
        return emulator.capture(run, *where)

    monkeypatch.setattr(nv_runtime.captured_graphs, "capture", capture)
    llm = AsyncLLM(str(checkpoint), **settings())
    assert is_capturing.wait(30)
    llm.shutdown()
    assert len(emulator.graphs) < len(SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["start", "idle"])
def test_ranks_capture_together(
    checkpoint: Path,
    emulator: Emulator,
    expected: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    fork_ranks(monkeypatch, {1: partial(emulate_and, do_nothing)})
    changes = settings(tensor_parallel_size=2, graph_capture=when, rank_timeout_s=30)
    if when == "start":
        with LLM(str(checkpoint), **changes) as llm:
            assert emulator.num_decode_graphs == len(SIZES)
            assert answers(llm) == expected
    else:
        engine = AsyncLLM(str(checkpoint), **changes)
        wait_until(lambda: emulator.num_decode_graphs == len(SIZES))
        assert asyncio.run(all_answers(engine)) == expected[-1]
        engine.shutdown()
    assert emulator.num_decode_graphs == len(SIZES)


@pytest.mark.slow
def test_a_rank_that_is_lost_while_it_captures_ends_the_start(
    checkpoint: Path,
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dies = In("nv_runtime.model_runner:ModelRunner", "capture_next_graph", die, 2)
    fork_ranks(monkeypatch, {1: partial(emulate_and, dies)})
    changes = settings(tensor_parallel_size=2, graph_capture="start", rank_timeout_s=30)
    with pytest.raises(RankError, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
        LLM(str(checkpoint), **changes)
