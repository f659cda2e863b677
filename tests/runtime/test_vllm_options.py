"""Options and arguments of vLLM: accepted where they ask for nothing, refused where they do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoints
from nv_core import ConfigError, RequestError, SamplingParams, Step
from nv_core.policies import Mixed
from nv_runtime import LLM, AsyncLLM, EngineConfig
from nv_runtime.vllm_options import _UNBUILT, _WITHOUT_EFFECT, engine_config_of
from tiny_engines import assert_idle, options, tokens_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

# Everything that vLLM's `LLM` takes by name, at its default value there.
DEFAULTS_OF_VLLM: dict[str, Any] = {
    "runner": "auto",
    "convert": "auto",
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "trust_remote_code": False,
    "allowed_local_media_path": "",
    "allowed_media_domains": None,
    "tensor_parallel_size": 1,
    "dtype": "auto",
    "quantization": None,
    "revision": None,
    "tokenizer_revision": None,
    "seed": 0,
    "gpu_memory_utilization": 0.9,
    "swap_space": 4,
    "cpu_offload_gb": 0,
    "enforce_eager": False,
    "enable_return_routed_experts": False,
    "disable_custom_all_reduce": False,
    "hf_token": None,
    "hf_overrides": None,
    "mm_processor_kwargs": None,
    "pooler_config": None,
    "structured_outputs_config": None,
    "profiler_config": None,
    "attention_config": None,
    "kv_cache_memory_bytes": None,
    "compilation_config": None,
    "logits_processors": None,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "max_model_len": None,
    "max_num_seqs": None,
    "max_num_batched_tokens": None,
    "enable_prefix_caching": None,
    "enable_chunked_prefill": None,
    "block_size": None,
    "kv_cache_dtype": "auto",
    "load_format": "auto",
    "generation_config": "auto",
    "speculative_config": None,
    "enable_lora": False,
    "max_loras": 1,
    "max_lora_rank": 16,
    "scheduling_policy": "fcfs",
    "async_scheduling": None,
    "disable_log_stats": True,
    "num_gpu_blocks_override": None,
}


def test_the_defaults_of_vllm_are_ours() -> None:
    assert engine_config_of("m", DEFAULTS_OF_VLLM) == EngineConfig(model="m")


def test_none_is_every_options_default() -> None:
    own = [field.name for field in fields(EngineConfig) if field.name != "model"]
    everything = dict.fromkeys([*own, *_UNBUILT, *_WITHOUT_EFFECT])
    assert engine_config_of("m", everything) == EngineConfig(model="m")


def test_a_length_of_minus_one_is_what_fits() -> None:
    assert EngineConfig(model="m", max_model_len=-1) == EngineConfig(
        model="m", max_model_len="auto"
    )
    with pytest.raises(ConfigError, match="max_model_len must be an integer of at least 1"):
        EngineConfig(model="m", max_model_len=-2)


@pytest.mark.parametrize("name", sorted(_UNBUILT))
def test_what_is_not_built_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}='something' is not supported .*; \w"):
        engine_config_of("m", {name: "something"})
    for harmless in _UNBUILT[name].harmless:
        assert engine_config_of("m", {name: harmless}) == EngineConfig(model="m")


def test_a_number_is_not_a_bool() -> None:
    with pytest.raises(ConfigError, match="enable_lora=0"):
        engine_config_of("m", {"enable_lora": 0})
    with pytest.raises(ConfigError, match="pipeline_parallel_size=True"):
        engine_config_of("m", {"pipeline_parallel_size": True})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpu_offload_gb", 0.0),
        ("pipeline_parallel_size", 1.0),
        ("tokenizer", "m"),
        ("tokenizer", Path("m")),
        ("attention_config", {}),
        ("compilation_config", {}),
        ("compilation_config", 0),
        ("structured_outputs_config", {}),
        ("profiler_config", {}),
        ("distributed_executor_backend", "uni"),
    ],
)
def test_what_asks_for_nothing_is_accepted(name: str, value: object) -> None:
    assert engine_config_of("m", {name: value}) == EngineConfig(model="m")


def test_another_tokenizer_than_the_checkpoints_is_refused() -> None:
    with pytest.raises(ConfigError, match="tokenizer='n' is not supported"):
        engine_config_of("m", {"tokenizer": "n"})


def test_unknown_options_name_the_nearest_of_all() -> None:
    with pytest.raises(TypeError, match=r"LLM\(\) .* did you mean 'trust_remote_code'"):
        engine_config_of("m", {"trust_remote_cod": True})
    with pytest.raises(TypeError, match="did you mean 'max_model_len'"):
        engine_config_of("m", {"max_modle_len": 1})


@pytest.mark.parametrize("make", [LLM, AsyncLLM])
def test_both_front_doors_know_them(make: type) -> None:
    with pytest.raises(ConfigError, match="enable_lora=True is not supported"):
        make("nowhere", enable_lora=True)


class Noting(Mixed):
    """Notes the priorities that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, int] = {}

    def schedule(self, step: Step) -> None:
        self.seen.update((seq.seq_id, seq.priority) for seq in step.waiting)
        super().schedule(step)


@pytest.fixture(scope="module")
def policy() -> Noting:
    return Noting()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, policy: Noting) -> Iterator[LLM]:
    path: Path = tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True)
    more = {"trust_remote_code": True, "swap_space": 4, "disable_log_stats": True}
    with LLM(str(path), **options(scheduling_policy=policy, **more)) as llm:
        yield llm
        assert_idle(llm._open_parts().engine)


def test_priorities_reach_the_policy(llm: LLM, policy: Noting) -> None:
    cases: list[tuple[Any, list[int]]] = [(None, [0, 0]), (3, [3, 3]), ([5, -1], [5, -1])]
    for priority, expected in cases:
        policy.seen.clear()
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=priority)
        assert list(policy.seen.values()) == expected
    policy.seen.clear()
    list(llm.stream(["a", "b"], GREEDY, priority=[1, 2]))
    assert list(policy.seen.values()) == [1, 2]
    with pytest.raises(RequestError, match="priority has 3 entries for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, priority=[1, 2, 3])
    with pytest.raises(RequestError, match=r"prompt 1: priority must be an integer.*'high'"):
        llm.generate(["a", "b"], GREEDY, priority=[1, "high"])  # type: ignore[list-item]


def test_the_progress_bar_may_be_the_callers(llm: LLM) -> None:
    made: list[dict[str, Any]] = []
    finished: list[int] = []

    class Bar:
        def __init__(self, **arguments: Any) -> None:  # noqa: ANN401 - tqdm's own arguments
            made.append(arguments)

        def update(self, count: int) -> None:
            finished.append(count)

        def set_postfix_str(self, text: str, *, refresh: bool) -> None:
            assert "toks/s" in text

        def close(self) -> None:
            finished.append(-1)

    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=Bar)
    assert made[0]["total"] == 3
    assert sum(finished) == 3 - 1
    assert finished[-1] == -1


@pytest.mark.parametrize("name", ["lora_request", "tokenization_kwargs"])
def test_arguments_that_ask_for_what_is_not_built(llm: LLM, name: str) -> None:
    (plain,) = llm.generate("a", GREEDY, use_tqdm=False)
    nothing: dict[str, Any] = {name: None}
    (same,) = llm.generate("a", GREEDY, use_tqdm=False, **nothing)
    assert tokens_of(same) == tokens_of(plain)
    asked: dict[str, Any] = {name: {"x": 1}}
    with pytest.raises(RequestError, match=f"{name} is not supported"):
        llm.generate("a", GREEDY, **asked)
    with pytest.raises(RequestError, match=f"{name} is not supported"):
        llm.chat([{"role": "user", "content": "a"}], GREEDY, **asked)


def test_content_format_is_found_out_by_itself(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "a"}]
    llm.chat(conversation, GREEDY, use_tqdm=False, chat_template_content_format="auto")
    with pytest.raises(RequestError, match="chat_template_content_format is not supported"):
        llm.chat(conversation, GREEDY, chat_template_content_format="openai")
