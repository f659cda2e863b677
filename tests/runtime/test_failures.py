"""Whatever fails in a step: its requests end, nothing leaks, later answers are right."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoints
from nv_core import RequestError, SamplingParams, Scheduler, Sequence, Step
from nv_core.policies import Mixed
from nv_runtime import LLM
from nv_runtime.answer import Answer
from nv_runtime.device_batch import DeviceBatch
from nv_runtime.model_runner import ModelRunner
from nv_runtime.one_thread import OneThread
from nv_runtime.outputs import RequestOutput
from nv_runtime.request import Request
from tiny_engines import options

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PENALISED = GREEDY.clone(repetition_penalty=1.2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True)


def make_llm(checkpoint: Path, **changes: Any) -> LLM:  # noqa: ANN401 - LLM's own options
    defaults = options(num_gpu_blocks_override=100, max_num_seqs=3)
    return LLM(str(checkpoint), **{**defaults, **changes})


@pytest.fixture(params=[False, True], ids=["in step", "one step ahead"])
def llm(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLM]:
    with make_llm(checkpoint, async_scheduling=request.param) as llm:
        yield llm


def answers(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(["the fox", "a dog", "1 2 3", "sea"], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_idle(llm: LLM) -> None:
    engine = llm._open_parts().engine
    engine.scheduler.check_invariants()
    assert not engine.scheduler.has_unfinished
    assert engine.scheduler.num_free_blocks == 100
    assert engine.scheduler.num_in_flight == 0
    assert not engine._requests
    assert not engine._owners


class BoomError(Exception):
    pass


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (ModelRunner, "launch"),
        (ModelRunner, "collect"),
        (DeviceBatch, "follow"),
        (DeviceBatch, "prepare_decode"),
        (DeviceBatch, "send"),
        (Request, "note_progress"),
        (Request, "note_scheduled"),
    ],
)
@pytest.mark.parametrize("after", [0, 1, 4, 9])
@pytest.mark.parametrize("params", [GREEDY, PENALISED])
def test_a_failure_anywhere_in_a_step(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    after: int,
    params: SamplingParams,
) -> None:
    expected = answers(llm, params)
    original = getattr(owner, method)
    for when in ("before", "behind"):
        calls = 0

        def failing(*args: Any, when: str = when, **options: Any) -> Any:  # noqa: ANN401
            nonlocal calls
            calls += 1
            if calls == after + 1 and when == "before":
                raise BoomError
            result = original(*args, **options)
            if calls == after + 1:
                raise BoomError
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, method, failing)
            with pytest.raises(BoomError):
                answers(llm, params)
        assert_idle(llm)
        assert answers(llm, params) == expected
        assert_idle(llm)


def test_a_stream_whose_step_failed_ends_with_an_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream(["the fox", "a dog"], GREEDY)
    next(stream)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise BoomError

        patch.setattr(ModelRunner, "collect", fail)
        with pytest.raises(BoomError):
            list(stream)
    rest = list(stream)
    assert {output.outputs[0].finish_reason for output in rest} == {"error"}
    assert len(rest) == 2
    assert_idle(llm)


class MoodyPolicy(Mixed):
    """Works, but for one step."""

    is_moody = False

    def schedule(self, step: Step) -> None:
        super().schedule(step)
        if self.is_moody:
            self.is_moody = False
            raise BoomError


@pytest.mark.parametrize("ahead", [False, True])
def test_a_policy_that_raises_costs_nobody_anything(
    checkpoint: Path,
    ahead: bool,  # noqa: FBT001 - a parameter
) -> None:
    policy = MoodyPolicy()
    with make_llm(checkpoint, scheduling_policy=policy, async_scheduling=ahead) as llm:
        expected = answers(llm)[:2]
        streams = [llm.stream(prompt, GREEDY) for prompt in ("the fox", "a dog")]
        next(streams[0])
        policy.is_moody = True
        with pytest.raises(BoomError):
            list(streams[0])
        finals = [list(stream)[-1] for stream in streams]
        assert [list(final.outputs[0].token_ids) for final in finals] == expected
        assert [final.outputs[0].finish_reason for final in finals] == ["length"] * 2
        assert_idle(llm)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e39},
        {"top_k": 2**63},
        {"temperature": 1e39, "top_k": 2**70, "top_p": 1e-300},
        {"temperature": 2e-5, "min_p": 1.0},
        {"repetition_penalty": 1e300},
        {"min_tokens": 3, "stop_token_ids": [330]},
        {"seed": 2**64 - 1},
    ],
)
def test_an_odd_value_costs_nobody_anything(llm: LLM, params: dict[str, Any]) -> None:
    expected = answers(llm)[0]
    stream = llm.stream("the fox", GREEDY)
    next(stream)
    odd = SamplingParams(max_tokens=4, ignore_eos=True, **params)
    (output,) = llm.generate("a dog", odd, use_tqdm=False)
    assert output.finished
    assert list(list(stream)[-1].outputs[0].token_ids) == expected
    assert_idle(llm)


def test_a_tiny_top_p_keeps_the_best_token(llm: LLM) -> None:
    expected = answers(llm)
    tiny = GREEDY.clone(temperature=1.0, top_p=1e-60, seed=1)
    assert answers(llm, tiny) == expected


def test_a_failure_while_requests_are_added_leaves_none(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[Any] = ["fine", {3: 4, "a": 1}]
    with pytest.raises(RequestError, match="prompt 1: "):
        llm.generate(prompts, GREEDY)
    assert_idle(llm)
    tokenizer = llm.get_tokenizer()
    original, calls = tokenizer.encode, 0

    def interrupted(text: str, **options: Any) -> list[int]:  # noqa: ANN401
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return original(text, **options)

    monkeypatch.setattr(tokenizer, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c", "d"], GREEDY, use_tqdm=False)
    assert_idle(llm)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Scheduler, "add"), (Scheduler, "fork"), (Request, "__init__"), (Answer, "__init__")],
)
def test_a_failure_while_one_request_is_added_leaves_nothing_of_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    expected = answers(llm)
    original = getattr(owner, name)
    calls = 0

    def failing(*args: Any, **options: Any) -> Any:  # noqa: ANN401
        nonlocal calls
        calls += 1
        if calls == (2 if owner is Answer else 1):
            raise BoomError
        return original(*args, **options)

    stream = llm.stream("the fox", GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(BoomError):
            llm.generate("a dog", GREEDY.clone(n=3, temperature=0.8), use_tqdm=False)
    assert list(list(stream)[-1].outputs[0].token_ids) == expected[0]
    assert_idle(llm)
    assert answers(llm) == expected


def test_an_interrupt_among_many_prompts_waits_for_one_of_them(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To turn many texts into tokens takes long."""
    tokenizer = llm.get_tokenizer()
    original, seen = tokenizer.encode, 0

    def encode(text: str, **options: Any) -> list[int]:  # noqa: ANN401
        nonlocal seen
        seen += 1
        if seen == 3:
            signal.raise_signal(signal.SIGINT)
        return original(text, **options)

    monkeypatch.setattr(tokenizer, "encode", encode)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a fox"] * 50, GREEDY, use_tqdm=False)
    assert seen == 3
    assert_idle(llm)


class InterruptedBar:
    """A progress bar under which the user presses Ctrl-C when the first request has ended."""

    def __init__(self, closed: list[InterruptedBar]) -> None:
        self._closed = closed

    def set_postfix_str(self, *_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    def close(self) -> None:
        self._closed.append(self)


def generate_and_interrupt(llm: LLM) -> None:
    closed: list[InterruptedBar] = []
    uneven = [GREEDY.clone(max_tokens=count) for count in (2, 8, 8, 8)]
    try:
        llm.generate(
            ["the fox", "a dog", "1 2 3", "sea"],
            uneven,
            use_tqdm=lambda **_: InterruptedBar(closed),
        )
    finally:
        assert closed


def generate_from_a_bad_list(llm: LLM) -> None:
    llm.generate(["the fox", "a dog", "sea", {3: 4}], GREEDY)  # type: ignore[arg-type]


def close_a_stream(llm: LLM) -> None:
    with llm.stream(["the fox", "a dog", "1 2 3", "sea"], GREEDY) as stream:
        next(stream)


def abort_all(llm: LLM) -> None:
    stream = llm.stream(["the fox", "a dog", "1 2 3", "sea"], GREEDY)
    next(stream)
    llm.llm_engine.abort_all()


@pytest.mark.parametrize(
    "call", [generate_and_interrupt, generate_from_a_bad_list, close_a_stream, abort_all]
)
def test_interrupts_while_requests_are_aborted_leave_none_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, call: Callable[[LLM], None]
) -> None:
    """An impatient user presses Ctrl-C again and again."""
    expected = answers(llm)
    abort, num_aborted = Scheduler.abort, 0

    def interrupted(scheduler: Scheduler, seq_id: int) -> Sequence | None:
        nonlocal num_aborted
        num_aborted += 1
        signal.raise_signal(signal.SIGINT)
        return abort(scheduler, seq_id)

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "abort", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(llm)
    assert num_aborted >= 3
    llm.llm_engine.step()  # collects what is still in flight
    assert_idle(llm)
    assert answers(llm) == expected


@pytest.mark.parametrize("where", ["__init__", "set_postfix_str", "update", "close"])
def test_a_progress_bar_that_fails_leaves_no_request(llm: LLM, where: str) -> None:
    class Bar:
        def __init__(self, **_: object) -> None:
            self.do("__init__")

        def do(self, name: str) -> None:
            if name == where:
                raise BoomError

        def set_postfix_str(self, *_: object, **__: object) -> None:
            self.do("set_postfix_str")

        def update(self, _: int) -> None:
            self.do("update")

        def close(self) -> None:
            self.do("close")

    expected = answers(llm)
    uneven = [GREEDY.clone(max_tokens=count) for count in (2, 8)]
    with pytest.raises(BoomError):
        llm.generate(["the fox", "a dog"], uneven, use_tqdm=Bar)
    llm._open_parts().engine.step()  # collects what is still in flight
    assert_idle(llm)
    assert answers(llm) == expected


def test_a_stream_interrupted_while_it_hands_out_an_output_leaves_no_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Request.take_output

    def interrupted_before(_: Request) -> RequestOutput:
        raise KeyboardInterrupt

    def interrupted_after(request: Request) -> RequestOutput:
        original(request)
        raise KeyboardInterrupt

    for interrupted in (interrupted_before, interrupted_after):
        for goes_on in (True, False):
            stream = llm.stream(["the fox", "a dog"], GREEDY)
            next(stream)
            with monkeypatch.context() as patch:
                patch.setattr(Request, "take_output", interrupted)
                # Among them, with the later kind, are the last outputs of both.
                for _ in range(30 if interrupted is interrupted_after and goes_on else 3):
                    with pytest.raises((KeyboardInterrupt, StopIteration)):
                        next(stream)
            if goes_on:
                assert all(output.finished for output in list(stream)[-1:])
            stream.close()
            llm._open_parts().engine.step()  # collects what is still in flight
            assert_idle(llm)


def test_end_tokens_beyond_the_vocabulary_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_checkpoints.write_checkpoint(
        tmp_path, tokenizer=True, generation_config={"eos_token_id": [2, 9999]}
    )
    with make_llm(path) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, min_tokens=3)
        assert llm.generate("the fox", params, use_tqdm=False)[0].finished
    assert "[9999] are ignored" in caplog.text


def test_a_shut_down_engine_says_so_and_is_gone(checkpoint: Path) -> None:
    import weakref

    llm = make_llm(checkpoint)
    stream = llm.stream(["the fox", "a dog"], GREEDY)
    next(stream)
    runner: Any = llm._open_parts().engine.runner
    model = weakref.ref(runner._model)
    del runner
    llm.shutdown()
    assert {output.outputs[0].finish_reason for output in stream} == {"abort"}
    for use in (
        llm.get_tokenizer,
        llm.get_default_sampling_params,
        lambda: llm.max_model_len,
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
    ):
        with pytest.raises(RequestError, match="shut down"):
            use()
    del stream
    assert model() is None, "the model is kept alive by a cycle"


def test_request_ids(llm: LLM) -> None:
    from nv_runtime.prompt import TokenizedPrompt

    engine = llm._open_parts().engine
    prompt = TokenizedPrompt(None, [1, 2, 3])
    names = ("1", None, None)
    requests = [engine.add_request(prompt, GREEDY, request_id=name) for name in names]
    assert len({request.request_id for request in requests}) == 3
    with pytest.raises(RequestError, match="'1' belongs to an unfinished request"):
        engine.add_request(prompt, GREEDY, request_id="1")
    with pytest.raises(RequestError, match="must be a str"):
        engine.add_request(prompt, GREEDY, request_id=7)  # type: ignore[arg-type]
    engine.abort_all()
    assert_idle(llm)


def test_times_in_an_output_do_not_change_later(llm: LLM) -> None:
    outputs = list(llm.stream("the fox", GREEDY))
    assert outputs[0].metrics is not None
    assert outputs[0].metrics.finished_time is None
    assert outputs[-1].metrics is not None
    assert outputs[-1].metrics.finished_time is not None


class Bouncer(Mixed):
    """Drops every prompt of more than ten tokens."""

    def schedule(self, step: Step) -> None:
        for seq in list(step.waiting):
            if len(seq.token_ids) > 10:
                step.drop(seq, "too long for this house")
        super().schedule(step)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_that_the_policy_drops_is_answered(
    checkpoint: Path,
    ahead: bool,  # noqa: FBT001 - a parameter
) -> None:
    with make_llm(checkpoint, scheduling_policy=Bouncer(), async_scheduling=ahead) as llm:
        outputs = llm.generate([[5] * 3, [6] * 11, [7] * 4], GREEDY, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        assert [answer.finish_reason for answer in answers] == ["length", "error", "length"]
        assert answers[1].stop_reason == "too long for this house"
        assert list(answers[1].token_ids) == []
        assert all(output.finished for output in outputs)
        assert_idle(llm)
        (alone,) = llm.generate([[6] * 12], GREEDY, use_tqdm=False)
        assert alone.outputs[0].finish_reason == "error"
        assert_idle(llm)


class DropsThenRaises(Mixed):
    """Drops the oldest running sequence and raises, once."""

    is_armed = False

    def schedule(self, step: Step) -> None:
        if self.is_armed:
            self.is_armed = False
            step.drop(next(iter(step.running)), "late")
            raise BoomError
        super().schedule(step)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_dropped_request_may_be_forgotten_before_the_plan_that_names_it(
    checkpoint: Path,
    ahead: bool,  # noqa: FBT001 - a parameter
) -> None:
    policy = DropsThenRaises()
    with make_llm(checkpoint, scheduling_policy=policy, async_scheduling=ahead) as llm:
        expected = answers(llm)[1]
        first, second = llm.stream("the fox", GREEDY), llm.stream("a dog", GREEDY)
        next(first)
        next(second)
        policy.is_armed = True
        with pytest.raises(BoomError):
            list(first)
        first.close()
        assert list(list(second)[-1].outputs[0].token_ids) == expected
        assert_idle(llm)


def test_closing_a_stream_ends_nobody_who_has_its_old_name(llm: LLM) -> None:
    from nv_runtime.prompt import TokenizedPrompt
    from nv_runtime.stream import OutputStream

    engine = llm._open_parts().engine
    prompt = TokenizedPrompt(None, [1, 2, 3])
    short = engine.add_request(prompt, GREEDY.clone(max_tokens=1), request_id="a")
    stream = OutputStream(engine, [short], OneThread())
    while not short.is_finished:
        engine.step()
    other = engine.add_request(prompt, GREEDY, request_id="a")
    stream.close()
    assert not other.is_finished
    engine.abort_all()


def test_stop_texts_without_a_tokenizer_are_refused(checkpoint: Path) -> None:
    with make_llm(checkpoint, skip_tokenizer_init=True) as llm:
        with pytest.raises(RequestError, match=r"stop=.*skip_tokenizer_init"):
            llm.generate([1, 2], GREEDY.clone(stop="e"))
        assert_idle(llm)


def test_a_wrong_policy_names_the_option(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="scheduling_policy: policy must be one of"):
        make_llm(checkpoint, scheduling_policy="nope")
