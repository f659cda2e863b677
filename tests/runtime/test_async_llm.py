"""AsyncLLM: many callers at once, each with what it asked for, and none in the way of another."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoints
from nv_core import EngineDeadError, RequestError, RequestOutputKind, SamplingParams
from nv_runtime import LLM, AsyncLLM, EngineConfig, RequestOutput
from nv_runtime.metrics import Counter
from nv_runtime.model_runner import ModelRunner
from nv_runtime.request import Request
from tiny_engines import assert_idle, joined, options, tokens_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ENDLESS = GREEDY.clone(max_tokens=None)
DELTA = GREEDY.clone(output_kind=RequestOutputKind.DELTA)
PROMPTS = ["the quick", "brown fox", "shore", "1 2 3", "Köln", "こんにちは"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, RequestOutput]:
    """What the synchronous engine answers, greedily."""
    with LLM(str(checkpoint), **options()) as llm:
        return dict(zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True))


@pytest.fixture(params=[False, True], ids=["in step", "one step ahead"])
def llm(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(str(checkpoint), **options(async_scheduling=request.param))
    yield llm
    llm.shutdown()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, timeout=30))


async def outputs_of(generator: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in generator]


async def begun(
    generator: AsyncGenerator[RequestOutput, None],
) -> asyncio.Task[list[RequestOutput]]:
    """Waits for the first output and leaves the others to a task."""
    has_begun = asyncio.Event()

    async def collect() -> list[RequestOutput]:
        outputs = []
        async for output in generator:
            outputs.append(output)
            has_begun.set()
        return outputs

    task = asyncio.create_task(collect())
    await has_begun.wait()
    return task


async def settled(llm: AsyncLLM) -> None:
    """Waits until the engine has nothing to do, and checks that nothing is left."""
    engine = llm._parts.engine
    while await asyncio.wrap_future(llm._thread.call(lambda: engine.has_work)):
        await asyncio.sleep(0.001)
    await asyncio.wrap_future(llm._thread.call(lambda: assert_idle(engine)))
    assert not llm._thread._server._clients
    assert not llm._thread._server._client_of


def test_one_caller_gets_what_the_synchronous_engine_answers(
    llm: AsyncLLM, expected: dict[str, RequestOutput]
) -> None:
    async def main() -> None:
        outputs = await outputs_of(llm.generate("the quick", GREEDY, "mine"))
        assert {output.request_id for output in outputs} == {"mine"}
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        final, wanted = outputs[-1], expected["the quick"]
        assert tokens_of(final) == tokens_of(wanted)
        assert final.outputs[0].text == wanted.outputs[0].text
        for output in outputs:
            assert tokens_of(final)[: len(tokens_of(output))] == tokens_of(output)
        await settled(llm)

    run(main())


def test_many_callers_at_once(llm: AsyncLLM, expected: dict[str, RequestOutput]) -> None:
    async def one(number: int) -> None:
        prompt = PROMPTS[number % len(PROMPTS)]
        kind = list(RequestOutputKind)[number % 3]
        params = GREEDY.clone(output_kind=kind)
        outputs = await outputs_of(llm.generate(prompt, params, priority=number))
        wanted = expected[prompt].outputs[0]
        answer = joined(outputs) if kind is RequestOutputKind.DELTA else joined(outputs[-1:])
        assert answer == (wanted.text, list(wanted.token_ids))
        if kind is RequestOutputKind.FINAL_ONLY:
            assert len(outputs) == 1

    async def main() -> None:
        await asyncio.gather(*(one(number) for number in range(60)))
        await settled(llm)

    run(main())


def test_a_slow_caller_costs_nothing_and_loses_nothing(
    llm: AsyncLLM, expected: dict[str, RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: dict[str, int] = {}
    original = Request.take_output

    def counting(request: Request) -> RequestOutput:
        taken[request.request_id] = taken.get(request.request_id, 0) + 1
        return original(request)

    monkeypatch.setattr(Request, "take_output", counting)

    async def main() -> None:
        slow = llm.generate("the quick", DELTA, "slow")
        first = await anext(slow)
        # Many requests come and go while it does not look.
        for number in range(5):
            outputs = await outputs_of(llm.generate("shore", GREEDY, str(number)))
            assert tokens_of(outputs[-1]) == tokens_of(expected["shore"])
        # One output was made while it worked on the first, none after that.
        assert taken["slow"] == 2
        rest = await outputs_of(slow)
        assert len(rest) <= 2
        wanted = expected["the quick"].outputs[0]
        assert joined([first, *rest]) == (wanted.text, list(wanted.token_ids))
        await settled(llm)

    run(main())


LEAVING: dict[str, Callable[[AsyncLLM], Coroutine[Any, Any, None]]] = {}


def leaving(how: Callable[[AsyncLLM], Coroutine[Any, Any, None]]) -> None:
    LEAVING[how.__name__.strip("_")] = how


@leaving
async def _closed(llm: AsyncLLM) -> None:
    generator = llm.generate("the quick", ENDLESS)
    await anext(generator)
    await generator.aclose()
    await generator.aclose()


@leaving
async def _cancelled(llm: AsyncLLM) -> None:
    task = await begun(llm.generate("the quick", ENDLESS))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@leaving
async def _cancelled_at_once(llm: AsyncLLM) -> None:
    task = asyncio.create_task(outputs_of(llm.generate("the quick", ENDLESS)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@leaving
async def _failed(llm: AsyncLLM) -> None:
    async def use() -> None:
        generator = llm.generate("the quick", ENDLESS)
        try:
            async for _ in generator:
                raise LookupError
        finally:
            await generator.aclose()

    with pytest.raises(LookupError):
        await use()


@leaving
async def _dropped(llm: AsyncLLM) -> None:
    await anext(llm.generate("the quick", ENDLESS))
    gc.collect()
    # asyncio itself closes what is dropped, a few turns of its loop later.
    for _ in range(5):
        await asyncio.sleep(0)


@leaving
async def _never_started(llm: AsyncLLM) -> None:
    llm.generate("the quick", ENDLESS)


@pytest.mark.parametrize("how", LEAVING)
def test_who_leaves_ends_only_his_own_request(
    llm: AsyncLLM, expected: dict[str, RequestOutput], how: str
) -> None:
    async def main() -> None:
        other = asyncio.create_task(outputs_of(llm.generate("shore", GREEDY, "other")))
        await LEAVING[how](llm)
        engine = llm._parts.engine
        left = await asyncio.wrap_future(llm._thread.call(lambda: set(engine._requests)))
        assert left <= {"other"}
        assert tokens_of((await other)[-1]) == tokens_of(expected["shore"])
        await settled(llm)

    run(main())


def test_abort_by_name_answers_the_one_who_iterates(llm: AsyncLLM) -> None:
    async def main() -> None:
        tasks = [await begun(llm.generate("the quick", ENDLESS, name)) for name in ("a", "b", "c")]
        await llm.abort(["a", "nobody"])
        await llm.abort("b")
        await llm.abort("b")
        for task in tasks[:2]:
            final = (await task)[-1]
            assert final.finished
            assert final.outputs[0].finish_reason == "abort"
        final = (await tasks[2])[-1]
        assert final.outputs[0].finish_reason == "length"
        await settled(llm)

    run(main())


def test_abort_of_what_is_no_name_ends_nothing(llm: AsyncLLM) -> None:
    async def main() -> None:
        task = await begun(llm.generate("the quick", ENDLESS, "a"))
        values: list[Any] = [5, None, [["a"]], ["a", 5], b"a", {"a": 1}.items()]
        for value in values:
            with pytest.raises(RequestError, match=r"request_id must be a str or several, got .+"):
                await llm.abort(value)
        assert (await task)[-1].outputs[0].finish_reason == "length"
        await llm.abort(name for name in ("a", "b"))
        await settled(llm)

    run(main())


def test_who_waits_in_the_queue_can_be_aborted_too(checkpoint: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(str(checkpoint), **options(max_num_seqs=1)) as llm:
            running = llm.generate("the quick", ENDLESS)
            await anext(running)
            waiting = asyncio.create_task(outputs_of(llm.generate("shore", GREEDY, "waiting")))
            engine = llm._parts.engine
            while not await asyncio.wrap_future(
                llm._thread.call(lambda: "waiting" in engine._requests)
            ):
                await asyncio.sleep(0)
            await llm.abort("waiting")
            (output,) = await waiting
            assert output.outputs[0].finish_reason == "abort"
            assert tokens_of(output) == []
            await running.aclose()
            await settled(llm)

    run(main())


def test_a_name_in_use_is_refused_and_its_owner_is_left_alone(llm: AsyncLLM) -> None:
    async def main() -> None:
        owner = await begun(llm.generate("the quick", ENDLESS, "name"))
        with pytest.raises(RequestError, match="'name' belongs to an unfinished request"):
            await anext(llm.generate("shore", GREEDY, "name"))
        assert (await owner)[-1].outputs[0].finish_reason == "length"
        again = await outputs_of(llm.generate("shore", GREEDY, "name"))
        assert again[-1].finished
        await settled(llm)

    run(main())


def test_an_engine_failure_reaches_everybody(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    boom = RuntimeError("the device fell over")

    def fail(*_: object) -> None:
        raise boom

    async def main() -> None:
        await llm.check_health()
        assert llm.is_running
        generators = [llm.generate(prompt, ENDLESS) for prompt in PROMPTS]
        for generator in generators:
            await anext(generator)
        monkeypatch.setattr(ModelRunner, "launch", fail)
        for generator in generators:
            with pytest.raises(EngineDeadError, match="the device fell over") as caught:
                await outputs_of(generator)
            assert caught.value.__cause__ is boom
        for later in (
            lambda: anext(llm.generate("the", GREEDY)),
            lambda: llm.abort("x"),
            llm.check_health,
            llm.reset_prefix_cache,
        ):
            with pytest.raises(EngineDeadError, match="serves no more requests"):
                await later()
        assert llm.errored
        assert not llm.is_running
        llm.shutdown()
        with pytest.raises(EngineDeadError):
            await llm.check_health()

    run(main())


@pytest.mark.parametrize("prompts", [["a", "b"], [{"prompt": "a"}], [[1, 2], [3]]])
def test_a_list_of_prompts_is_refused_with_what_to_do(llm: AsyncLLM, prompts: Any) -> None:  # noqa: ANN401
    async def main() -> None:
        with pytest.raises(RequestError, match=r"AsyncLLM\.generate takes one.*gather"):
            await anext(llm.generate(prompts, GREEDY))

    run(main())


def test_shutdown_answers_everybody_and_is_final(llm: AsyncLLM) -> None:
    async def main() -> None:
        tasks = [await begun(llm.generate(prompt, ENDLESS)) for prompt in PROMPTS]
        llm.shutdown()
        llm.shutdown()
        reasons = {(await task)[-1].outputs[0].finish_reason for task in tasks}
        assert reasons <= {"abort", "length"}
        assert "abort" in reasons
        with pytest.raises(RequestError, match="has been shut down"):
            await anext(llm.generate("the", GREEDY))
        with pytest.raises(RequestError, match="has been shut down"):
            await llm.abort("x")
        assert not llm.is_running
        assert not llm.errored

    run(main())
    assert not [t for t in threading.enumerate() if t.name == "nv-engine"]


def test_callers_in_several_event_loops(llm: AsyncLLM, expected: dict[str, RequestOutput]) -> None:
    answers: dict[str, list[int]] = {}

    def serve(prompt: str) -> None:
        outputs = asyncio.run(outputs_of(llm.generate(prompt, GREEDY)))
        answers[prompt] = tokens_of(outputs[-1])

    threads = [threading.Thread(target=serve, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert answers == {prompt: tokens_of(output) for prompt, output in expected.items()}


def test_an_event_loop_that_is_closed_takes_its_requests_along(llm: AsyncLLM) -> None:
    event_loop = asyncio.new_event_loop()
    generator = llm.generate([5, 6], ENDLESS)
    event_loop.run_until_complete(anext(generator))
    event_loop.close()
    run(settled(llm))
    # Keep the generator until here: dropping it would be another way to leave.
    del generator


def test_an_engine_that_nobody_holds_ends(checkpoint: Path) -> None:
    llm = AsyncLLM(str(checkpoint), **options())
    thread = llm._thread._thread
    runner = llm._parts.engine.runner
    assert isinstance(runner, ModelRunner)
    model = weakref.ref(runner._model)
    del runner
    asyncio.run(outputs_of(llm.generate("the", GREEDY)))
    del llm
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert model() is None


def test_a_program_that_forgets_to_shut_down_ends(checkpoint: Path) -> None:
    program = f"""
import asyncio
from nv_runtime import AsyncLLM, SamplingParams
llm = AsyncLLM({str(checkpoint)!r}, **{options()!r})
async def main():
    generator = llm.generate("the", SamplingParams(max_tokens=None, ignore_eos=True))
    print(len((await anext(generator)).prompt_token_ids))
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 0


def test_callers_that_come_and_go_at_random(
    llm: AsyncLLM, expected: dict[str, RequestOutput]
) -> None:
    dice = random.Random(7)

    async def one(number: int) -> None:
        prompt = dice.choice(PROMPTS)
        fate = dice.choice(["stay", "stay", "close", "abort", "bad"])
        await asyncio.sleep(dice.random() * 0.05)
        seen: list[RequestOutput] = []
        if fate == "bad":
            with pytest.raises(RequestError):
                await outputs_of(llm.generate([-1], GREEDY, str(number)))
            return
        generator = llm.generate(prompt, DELTA, str(number))
        async for output in generator:
            seen.append(output)
            if fate == "close" and len(seen) == dice.randrange(1, 6):
                await generator.aclose()
            if fate == "abort" and len(seen) == 2:
                await llm.abort(str(number))
            await asyncio.sleep(dice.choice([0, 0, 0.003]))
        wanted = expected[prompt].outputs[0]
        text, tokens = joined(seen)
        assert list(wanted.token_ids)[: len(tokens)] == tokens
        if fate == "stay":
            assert (text, tokens) == (wanted.text, list(wanted.token_ids))

    async def main() -> None:
        await asyncio.gather(*(one(number) for number in range(120)))
        await settled(llm)

    run(main())


def test_conversations_and_defaults(llm: AsyncLLM, checkpoint: Path) -> None:
    conversation = [{"role": "user", "content": "what is the capital of France?"}]
    with LLM(str(checkpoint), **options()) as sync:
        (wanted,) = sync.chat(conversation, GREEDY, use_tqdm=False)

    async def main() -> None:
        outputs = await outputs_of(llm.chat(conversation, GREEDY, "chat"))
        assert tokens_of(outputs[-1]) == tokens_of(wanted)
        assert outputs[-1].prompt == wanted.prompt
        assert (await llm.get_tokenizer()).encode("a")
        assert llm.max_model_len == 128
        (output,) = await outputs_of(
            llm.generate("a", GREEDY.clone(output_kind=RequestOutputKind.FINAL_ONLY))
        )
        assert output.finished
        with pytest.raises(RequestError, match="lora_request is not supported"):
            await anext(llm.generate("a", lora_request=1))  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="sampling_params must be"):
            await anext(llm.generate("a", {"temperature": 1}))  # type: ignore[arg-type]
        assert llm.get_default_sampling_params() == SamplingParams()

    run(main())


def test_a_second_prompt_finds_the_first_ones_blocks_until_they_are_reset(llm: AsyncLLM) -> None:
    async def main() -> None:
        hits = []
        for _ in range(2):
            hits.append((await outputs_of(llm.generate([7] * 9, GREEDY)))[-1].num_cached_tokens)
        await llm.reset_prefix_cache()
        hits.append((await outputs_of(llm.generate([7] * 9, GREEDY)))[-1].num_cached_tokens)
        assert hits == [0, 8, 0]

    run(main())


def test_metrics_are_read_between_steps(checkpoint: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(str(checkpoint), **options(disable_log_stats=False)) as llm:
            await outputs_of(llm.generate("shore", GREEDY))
            values = {m.name: m.value for m in await llm.get_metrics() if isinstance(m, Counter)}
            assert values["nv:generation_tokens"] == 12
        async with AsyncLLM(str(checkpoint), **options()) as llm:
            with pytest.raises(RequestError, match="disable_log_stats=False"):
                await llm.get_metrics()

    run(main())


def test_made_from_a_configuration_and_left_by_with(
    checkpoint: Path, expected: dict[str, RequestOutput]
) -> None:
    config = EngineConfig(model=str(checkpoint), **options())

    async def main() -> None:
        async with AsyncLLM.from_engine_args(config) as llm:
            outputs = await outputs_of(llm.generate("shore", GREEDY))
            assert tokens_of(outputs[-1]) == tokens_of(expected["shore"])
        assert not llm.is_running

    run(main())
