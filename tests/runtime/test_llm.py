"""LLM as a caller meets it: prompts in every form, streams, seeds, errors that cost one request."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_checkpoints
from nv_core import CapacityError, ConfigError, RequestError, SamplingParams
from nv_runtime import LLM, RequestOutput
from tiny_engines import options

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write_checkpoint(
        tmp_path_factory.mktemp("tiny"), tokenizer=True, generation_config={"temperature": 0.25}
    )


def make_llm(checkpoint: Path, **changes: Any) -> LLM:  # noqa: ANN401 - LLM's own options
    return LLM(str(checkpoint), **{**options(), **changes})


@pytest.fixture
def llm(checkpoint: Path) -> Iterator[LLM]:
    with make_llm(checkpoint) as llm:
        yield llm


def tokens_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def assert_idle(llm: LLM) -> None:
    scheduler = llm._open_parts().engine.scheduler
    scheduler.check_invariants()
    assert not scheduler.has_unfinished
    assert scheduler.num_free_blocks == 200
    assert not llm._open_parts().engine._requests
    assert not llm._open_parts().engine._owners


def test_every_form_of_a_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("the quick fox")
    forms: list[Any] = [
        "the quick fox",
        {"prompt": "the quick fox"},
        {"prompt_token_ids": ids},
        ids,
    ]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(tokens_of(o)) for o in outputs}) == 1
    assert [o.prompt for o in outputs] == ["the quick fox", "the quick fox", None, None]
    assert all(o.prompt_token_ids == ids and o.finished for o in outputs)
    for form in forms:
        (single,) = llm.generate(form, GREEDY, use_tqdm=False)
        assert tokens_of(single) == tokens_of(outputs[0])
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_outputs_come_in_input_order_with_their_own_parameters(llm: LLM) -> None:
    prompts = ["a", "the forest", "shore", "1 2 3"]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 2, 7, 1)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.prompt for o in outputs] == prompts
    assert [len(tokens_of(o)) for o in outputs] == [9, 2, 7, 1]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 4
    tokenizer = llm.get_tokenizer()
    assert all(o.outputs[0].text == tokenizer.decode(tokens_of(o)) for o in outputs)
    with pytest.raises(RequestError, match="3 entries for 4 prompts"):
        llm.generate(prompts, params[:3], use_tqdm=False)
    assert_idle(llm)


def test_default_parameters_come_from_the_generation_config(checkpoint: Path) -> None:
    assert make_llm(checkpoint).get_default_sampling_params().temperature == 0.25
    plain = make_llm(checkpoint, generation_config="vllm").get_default_sampling_params()
    assert plain == SamplingParams()


def test_a_generation_config_of_ones_own(checkpoint: Path, tmp_path: Path) -> None:
    def defaults(**options: Any) -> SamplingParams:  # noqa: ANN401 - LLM's own options
        with make_llm(checkpoint, **options) as llm:
            return llm.get_default_sampling_params()

    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5, "eos_token_id": [7, 9]}')
    assert defaults(generation_config=tmp_path) == SamplingParams(top_p=0.5)
    overrides = {"temperature": 0.75, "max_new_tokens": 5}
    expected = SamplingParams(temperature=0.75, max_tokens=5)
    assert defaults(override_generation_config=overrides) == expected
    assert defaults(generation_config="vllm", override_generation_config=overrides) == expected
    own = defaults(generation_config=str(tmp_path), override_generation_config=overrides)
    assert own == expected.clone(top_p=0.5)
    with make_llm(checkpoint, generation_config=tmp_path) as llm:
        ends = llm.llm_engine.scheduler.config.eos_token_ids
        # Those of the checkpoint stay: an answer that has ended for its model has ended.
        assert set(ends) >= {2, 7, 9}
    for wrong in ("vlm", tmp_path / "nowhere", 7):
        with pytest.raises(ConfigError, match="generation_config must be one of auto, vllm, or"):
            defaults(generation_config=wrong)
    with pytest.raises(ConfigError, match="override_generation_config must be a dict"):
        defaults(override_generation_config="temperature=1")


def test_chat_equals_the_rendered_prompt(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "what is the capital of France?"}]
    rendered = llm.render_chat(conversation)
    assert rendered["prompt"].endswith("<|im_start|>assistant\n")
    (chat,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    (generated,) = llm.generate(rendered["prompt_token_ids"], GREEDY, use_tqdm=False)
    assert tokens_of(chat) == tokens_of(generated)
    assert chat.prompt == rendered["prompt"]
    both = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert [tokens_of(o) for o in both] == [tokens_of(chat)] * 2
    with pytest.raises(RequestError, match="messages is empty"):
        llm.chat([], GREEDY)


def test_a_stream_grows_to_what_generate_returns(llm: LLM) -> None:
    prompts = ["the waves", "jumps over", "100"]
    expected = llm.generate(prompts, GREEDY, use_tqdm=False)
    seen: dict[str, list[RequestOutput]] = {}
    for output in llm.stream(prompts, GREEDY):
        seen.setdefault(output.request_id, []).append(output)
    assert len(seen) == 3
    for outputs, final in zip(seen.values(), expected, strict=True):
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        texts = [o.outputs[0].text for o in outputs]
        assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
        assert [len(tokens_of(o)) for o in outputs] == list(range(1, 9))
        assert texts[-1] == final.outputs[0].text
        assert tokens_of(outputs[-1]) == tokens_of(final)
    assert_idle(llm)


def test_streams_side_by_side(llm: LLM) -> None:
    expected = [tokens_of(o) for o in llm.generate(["again", "rolls"], GREEDY, use_tqdm=False)]
    first, second = llm.stream("again", GREEDY), llm.stream("rolls", GREEDY)
    next(first)
    last_of_second = list(second)[-1]
    last_of_first = list(first)[-1]
    assert [tokens_of(last_of_first), tokens_of(last_of_second)] == expected


@pytest.mark.parametrize("how", ["close", "drop", "with", "never started"])
def test_leaving_a_stream_aborts_its_requests(llm: LLM, how: str) -> None:
    stream = llm.stream(["the sea", "shells"], GREEDY)
    if how != "never started":
        next(stream)
    if how == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
    elif how == "with":
        with stream:
            pass
    else:
        del stream
    assert_idle(llm)


def test_a_seed_reproduces_a_request_whatever_runs_beside_it(llm: LLM, checkpoint: Path) -> None:
    seeded = SamplingParams(temperature=1.5, seed=42, max_tokens=12, ignore_eos=True)
    other = SamplingParams(temperature=1.0, top_k=3, max_tokens=9, ignore_eos=True)
    (alone,) = llm.generate("the dog", seeded, use_tqdm=False)
    mixed = llm.generate(["x", "the dog", "y z"], [other, seeded, GREEDY], use_tqdm=False)
    assert tokens_of(mixed[1]) == tokens_of(alone)
    with make_llm(checkpoint, max_num_batched_tokens=3, num_gpu_blocks_override=9) as small:
        crowd = small.generate(["x" * 8, "the dog", "y z"], [other, seeded, GREEDY], use_tqdm=False)
    assert tokens_of(crowd[1]) == tokens_of(alone)


def test_unseeded_requests_differ_and_follow_the_engine_seed(checkpoint: Path) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)

    def run(seed: int) -> list[list[int]]:
        with make_llm(checkpoint, seed=seed) as llm:
            return [tokens_of(o) for o in llm.generate(["the"] * 3, params, use_tqdm=False)]

    first = run(0)
    assert first[0] != first[1] != first[2]
    assert run(0) == first
    assert run(1) != first


def test_stops(llm: LLM) -> None:
    (free,) = llm.generate("over the lazy", GREEDY, use_tqdm=False)
    third = tokens_of(free)[2]
    first_place = tokens_of(free).index(third)
    stop = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[third])
    (stopped,) = llm.generate("over the lazy", stop, use_tqdm=False)
    assert tokens_of(stopped) == tokens_of(free)[: first_place + 1]
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].stop_reason == third
    later = stop.clone(min_tokens=5)
    (late,) = llm.generate("over the lazy", later, use_tqdm=False)
    assert third not in tokens_of(late)[:5]
    assert len(tokens_of(late)) >= 5


def test_a_prompt_may_fill_the_model_but_for_one_token(llm: LLM) -> None:
    (output,) = llm.generate([5] * 127, GREEDY, use_tqdm=False)
    assert len(tokens_of(output)) == 1
    assert output.outputs[0].finish_reason == "length"
    unlimited = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate([5] * 100, unlimited, use_tqdm=False)
    assert len(tokens_of(output)) == 28
    assert output.outputs[0].finish_reason == "length"


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "empty"),
    ({"prompt_token_ids": []}, "empty"),
    ([331], r"holds 331; token ids are integers in \[0, 331\)"),
    ([-1], "holds -1"),
    ([2**63], "holds 9223372036854775808"),
    ([1.5], "1.5"),
    ([5] * 128, "128 tokens.*max_model_len=128.*127"),
    ({"text": "hi"}, "'prompt' or 'prompt_token_ids'"),
    ({"prompt_token_ids": "hi"}, "must be a list of token ids"),
    (7, "prompts must be"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_a_bad_prompt_costs_only_its_own_call(llm: LLM, prompt: Any, message: str) -> None:  # noqa: ANN401
    expected = tokens_of(llm.generate("the fox", GREEDY, use_tqdm=False)[0])
    running = llm.stream("the fox", GREEDY)
    next(running)
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    if prompt != 7:
        with pytest.raises(RequestError, match=message):
            llm.generate(["fine", prompt, "fine too"], GREEDY, use_tqdm=False)
    assert tokens_of(list(running)[-1]) == expected
    assert_idle(llm)


def test_stop_tokens_must_be_in_the_vocabulary(llm: LLM) -> None:
    params = SamplingParams(stop_token_ids=[400], min_tokens=2)
    with pytest.raises(RequestError, match=r"stop_token_ids holds 400.*\[0, 331\)"):
        llm.generate("the", params, use_tqdm=False)
    assert_idle(llm)


def test_parameters_that_forbid_every_token_are_refused(llm: LLM) -> None:
    (end, *_) = llm.llm_engine.scheduler.config.eos_token_ids
    for params in (
        SamplingParams(temperature=0, allowed_token_ids=[end], min_tokens=2),
        GREEDY.clone(allowed_token_ids=[10], bad_words=[[10]]),
        GREEDY.clone(allowed_token_ids=[10], stop_token_ids=[10], min_tokens=2),
    ):
        with pytest.raises(RequestError, match=r"allowed_token_ids .* no token is left to sample"):
            llm.generate("the", params, use_tqdm=False)
    assert_idle(llm)


def test_what_was_forgotten_is_computed_again(llm: LLM) -> None:
    def num_cached() -> int | None:
        return llm.generate([5] * 20, GREEDY, use_tqdm=False)[0].num_cached_tokens

    assert (num_cached(), num_cached()) == (0, 16)
    assert llm.reset_prefix_cache() is True
    assert num_cached() == 0


def test_a_request_that_outgrows_the_pool_ends_and_the_others_go_on(checkpoint: Path) -> None:
    with make_llm(checkpoint, num_gpu_blocks_override=5) as llm:
        long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        outputs = llm.generate([[5] * 9, [6] * 3], [long, GREEDY], use_tqdm=False)
        assert len(tokens_of(outputs[0])) == 5 * 4 + 1 - 9
        assert outputs[0].outputs[0].finish_reason == "length"
        assert len(tokens_of(outputs[1])) == 8


def test_a_failing_step_ends_its_requests_and_the_next_call_works(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(llm.generate("the fox", GREEDY, use_tqdm=False)[0])
    runner = llm._open_parts().engine.runner
    for error in (RuntimeError("device fell over"), KeyboardInterrupt()):
        with monkeypatch.context() as patch:

            def fail(plan: object, error: BaseException = error) -> None:
                raise error

            patch.setattr(runner, "launch", fail)
            with pytest.raises(type(error)):
                llm.generate(["the fox", "a dog"], GREEDY, use_tqdm=False)
        assert_idle(llm)
        assert tokens_of(llm.generate("the fox", GREEDY, use_tqdm=False)[0]) == expected


def test_unknown_options_name_the_nearest(checkpoint: Path) -> None:
    with pytest.raises(TypeError, match="did you mean 'max_model_len'"):
        LLM(str(checkpoint), max_modle_len=10)
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 0}, "max_model_len must be an integer of at least 1"),
        ({"max_model_len": 100_000}, "max_model_len=100000 is more than the 512 positions"),
        *(
            ({name: value}, f"{name} must be at most {most}, got {value}; lower it")
            for name, most in (
                ("max_num_seqs", 2**16),
                ("max_num_batched_tokens", 2**31 - 1),
                ("max_model_len", 2**31 - 1),
                ("block_size", 2**31 - 1),
                ("num_gpu_blocks_override", 2**24),
                ("kv_cache_memory_bytes", 2**63 - 1),
            )
            for value in (most + 1, 10**30)
        ),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"device": "tpu"}, "device must be"),
        ({"device": "cuda:99"}, "is not there"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be in"),
        ({"tensor_parallel_size": 9}, "tensor_parallel_size must be from 1 to 8, got 9"),
        ({"distributed_executor": "ray"}, "distributed_executor must be one of mp, external"),
        ({"distributed_executor_backend": "ray"}, "must be one of uni, mp, external_launcher"),
        (
            {"distributed_executor_backend": "uni", "tensor_parallel_size": 2},
            "'uni' is one process, but tensor_parallel_size=2 needs as many; use 'mp'",
        ),
        ({"collective_backend": "mpi"}, "collective_backend must be one of auto, nccl, gloo"),
        *(
            ({name: seconds}, rf"{name} must be a number of seconds in \(0, 604800\]")
            for name in ("rank_timeout_s", "rank_start_timeout_s")
            for seconds in (0, -1, "9", True, float("nan"), float("inf"), 1e300)
        ),
        ({"dtype": torch.float64}, r"dtype must be one of auto, .*, got torch.float64"),
        ({"generation_config": "x" * 5000}, "generation_config must be one of"),
        ({"generation_config": "a\0b"}, "generation_config must be one of"),
        ({"step_log": "x" * 5000}, "step_log=.* cannot be written: File name too long"),
        ({"step_log": "x" * 5000 + "/log"}, "step_log=.* is in a folder that does not exist"),
        ({"attention_backend": "tritn"}, "triton"),
        ({"load_format": "pickle"}, "load_format must be one of"),
        ({"scheduling_policy": "random"}, "policy must be one of"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_bad_options_say_what_is_allowed(
    checkpoint: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_llm(checkpoint, **options)


def test_a_pool_too_small_for_one_sequence_is_refused(checkpoint: Path) -> None:
    with pytest.raises(CapacityError, match=r"lower max_model_len to .* or raise kv_cache_memory"):
        make_llm(checkpoint, num_gpu_blocks_override=None, kv_cache_memory_bytes=10_000)


def test_shutdown_is_idempotent_and_final(checkpoint: Path) -> None:
    llm = make_llm(checkpoint)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(RequestError, match="shut down"):
        llm.generate("the", GREEDY)


def test_without_a_tokenizer(checkpoint: Path) -> None:
    with make_llm(checkpoint, skip_tokenizer_init=True) as llm:
        (output,) = llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
        assert output.outputs[0].text == ""
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            llm.generate("the", GREEDY)
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            llm.chat([{"role": "user", "content": "hi"}], GREEDY)


def test_metrics_are_ordered_times(llm: LLM) -> None:
    (output,) = llm.generate("the fox", GREEDY, use_tqdm=False)
    m = output.metrics
    assert m is not None
    assert m.first_scheduled_time is not None
    assert m.first_token_time is not None
    assert m.last_token_time is not None
    assert m.finished_time is not None
    times = [m.arrival_time, m.first_scheduled_time, m.first_token_time, m.last_token_time]
    assert times == sorted(times)
    assert m.finished_time >= m.last_token_time


def test_nothing_global_is_changed(checkpoint: Path) -> None:
    dtype, device, threads = (
        torch.get_default_dtype(),
        torch.get_default_device(),
        threading.active_count(),
    )
    with make_llm(checkpoint, dtype="bfloat16") as llm:
        llm.generate("the fox", GREEDY, use_tqdm=False)
        assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == dtype
    assert torch.get_default_device() == device
    assert threading.active_count() == threads


def test_the_progress_bar_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    assert "2/2" in capsys.readouterr().err
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_dummy_weights_need_no_weight_files(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    options = {"load_format": "dummy", "skip_tokenizer_init": True}
    with make_llm(tmp_path, **options) as llm:
        first = tokens_of(llm.generate([1, 2], GREEDY, use_tqdm=False)[0])
    with make_llm(tmp_path, **options) as llm:
        assert tokens_of(llm.generate([1, 2], GREEDY, use_tqdm=False)[0]) == first


def test_config_errors_are_value_errors() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(RequestError, ValueError)
    assert issubclass(CapacityError, RuntimeError)


def test_dynamic_rotary_scaling_turns_prefix_caching_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0}
    spec = tiny_checkpoints.TinySpec(family="llama", rope=rope, max_position_embeddings=64)
    path = tiny_checkpoints.write_checkpoint(tmp_path, spec)
    with make_llm(path, skip_tokenizer_init=True, max_model_len=128) as llm:
        for _ in range(2):
            (output,) = llm.generate([3] * 70, GREEDY, use_tqdm=False)
            assert output.num_cached_tokens == 0
    assert "prefix caching is off" in caplog.text
    # Within the original length keys are the usual ones, and the cache works.
    with make_llm(path, skip_tokenizer_init=True, max_model_len=64) as llm:
        for expected in (0, 48):
            (output,) = llm.generate([3] * 50, GREEDY, use_tqdm=False)
            assert output.num_cached_tokens == expected


def test_a_scaled_model_may_run_beyond_the_length_it_declares(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    spec = tiny_checkpoints.TinySpec(family="qwen3", rope=rope, max_position_embeddings=32)
    path = tiny_checkpoints.write_checkpoint(tmp_path, spec)
    with make_llm(path, skip_tokenizer_init=True, max_model_len=128) as llm:
        assert len(tokens_of(llm.generate([3] * 100, GREEDY, use_tqdm=False)[0])) == 8
    with make_llm(path, skip_tokenizer_init=True, max_model_len=None) as llm:
        assert llm.max_model_len == 32


def test_arrays_are_prompts_and_their_scalars_are_numbers(llm: LLM) -> None:
    numpy = pytest.importorskip("numpy")
    ids = [5, 6, 7]
    expected = tokens_of(llm.generate(ids, GREEDY, use_tqdm=False)[0])
    forms: list[Any] = [
        numpy.array(ids),
        torch.tensor(ids),
        list(numpy.array(ids)),
        {"prompt_token_ids": numpy.array(ids)},
    ]
    for form in forms:
        assert tokens_of(llm.generate(form, GREEDY, use_tqdm=False)[0]) == expected
    params = SamplingParams(
        temperature=numpy.float32(0.0),
        max_tokens=numpy.int64(8),
        top_k=numpy.int32(3),
        stop_token_ids=numpy.array([330]),
        ignore_eos=True,
    )
    assert tokens_of(llm.generate(ids, params, use_tqdm=False)[0]) == expected
