"""Options and arguments of vLLM that are understood here although nothing is behind them.

Code written for vLLM often names options at the values that they have anyway, or that only tune
what this engine does not have. Those are accepted; a value that asks for something which is not
built is refused with the reason, and a name that nobody knows is a `TypeError`. Nothing is ever
dropped in silence that would change an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from nv_core import ConfigError, RequestError
from nv_core.keywords import refuse_unknown_keywords
from nv_runtime.engine_config import EngineConfig

_VLLM_POLICIES = {"fcfs": "mixed"}
"""Names that vLLM has for policies of nv-core."""


class _Unbuilt(NamedTuple):
    """An option that is only understood at the values which ask for nothing.

    Attributes:
        harmless: Those values; None, "not set", always is one.
        advice: What to do instead.
    """

    harmless: tuple[object, ...]
    advice: str


_UNBUILT = {
    "additional_config": _Unbuilt(({},), "there are no plug-ins"),
    "allowed_local_media_path": _Unbuilt(("",), "only text models are served"),
    "allowed_media_domains": _Unbuilt((), "only text models are served"),
    "attention_config": _Unbuilt(({},), "use attention_backend"),
    "calculate_kv_scales": _Unbuilt((False,), "an fp8 KV cache has the checkpoint's scales, or 1"),
    "compilation_config": _Unbuilt(({}, 0), "use enforce_eager to switch CUDA graphs off"),
    "config_format": _Unbuilt(("auto", "hf"), "a checkpoint has a config.json, or is a GGUF file"),
    "convert": _Unbuilt(("auto", "none"), "only text generation is served"),
    "cpu_offload_gb": _Unbuilt((0,), "weights stay on the device"),
    "data_parallel_size": _Unbuilt((1,), "start one engine per device instead"),
    "enable_chunked_prefill": _Unbuilt((True,), "prompts are cut where the token budget ends"),
    "enable_expert_parallel": _Unbuilt((False,), "only dense models are served"),
    "enable_lora": _Unbuilt((False,), "merge the adapter into the checkpoint"),
    "enable_prompt_embeds": _Unbuilt((False,), "pass text or token ids"),
    "enable_return_routed_experts": _Unbuilt((False,), "only dense models are served"),
    "enable_sleep_mode": _Unbuilt((False,), "shut the engine down and make a new one"),
    "hf_overrides": _Unbuilt(({},), "change config.json instead"),
    "hf_token": _Unbuilt((False,), "log in with the Hub's own command first"),
    "kv_events_config": _Unbuilt((), "leave it out"),
    "kv_transfer_config": _Unbuilt((), "leave it out"),
    "logits_processors": _Unbuilt(([], ()), "use the fields of SamplingParams"),
    "logprobs_mode": _Unbuilt(("raw_logprobs",), "log-probabilities are those of the raw logits"),
    "long_prefill_token_threshold": _Unbuilt((0,), "write a scheduling_policy"),
    "max_long_partial_prefills": _Unbuilt((1,), "write a scheduling_policy"),
    "max_num_partial_prefills": _Unbuilt((1,), "write a scheduling_policy"),
    "mm_processor_kwargs": _Unbuilt(({},), "only text models are served"),
    "model_impl": _Unbuilt(("auto", "vllm"), "see the README for the models that are served"),
    "pipeline_parallel_size": _Unbuilt((1,), "use tensor_parallel_size"),
    "pooler_config": _Unbuilt((), "only text generation is served"),
    "profiler_config": _Unbuilt(({},), "use torch.profiler around the calls"),
    "quantization": _Unbuilt((), "use an unquantised checkpoint"),
    "runner": _Unbuilt(("auto", "generate"), "only text generation is served"),
    "speculative_config": _Unbuilt((), "leave it out"),
    "structured_outputs_config": _Unbuilt(({},), "leave it out"),
    "task": _Unbuilt(("auto", "generate"), "only text generation is served"),
    "tokenizer": _Unbuilt((), "the tokenizer is the checkpoint's; or use skip_tokenizer_init"),
    "tokenizer_mode": _Unbuilt(("auto",), "the tokenizer is read from tokenizer.json"),
    "tokenizer_revision": _Unbuilt((), "use revision"),
}

_WITHOUT_EFFECT = {
    "cuda_graph_sizes",
    "cudagraph_capture_sizes",
    "disable_cascade_attn",
    "disable_custom_all_reduce",
    "disable_log_requests",
    "limit_mm_per_prompt",
    "max_lora_rank",
    "max_loras",
    "max_parallel_loading_workers",
    "max_seq_len_to_capture",
    "prefix_caching_hash_algo",
    "served_model_name",
    "swap_space",
    "trust_remote_code",
    "use_tqdm_on_load",
}
"""Options that tune or limit what this engine has not; any value leaves every answer as it is."""


def engine_config_of(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """Makes the engine's configuration from keywords of ours or of vLLM's `LLM`.

    Args:
        model: See `EngineConfig`.
        options: Keywords. None stands for an option's default, as in vLLM.

    Raises:
        ConfigError: An option asks for what is not built, or is out of range.
        TypeError: An unknown keyword; the message names the nearest known one.
    """
    own = {field.name for field in fields(EngineConfig)}
    refuse_unknown_keywords("LLM", options, own | _UNBUILT.keys() | _WITHOUT_EFFECT)
    values = {name: value for name, value in options.items() if value is not None}
    # Either may be a path.
    if "tokenizer" in values and str(values["tokenizer"]) == str(model):
        del values["tokenizer"]
    for name, value in values.items():
        if name not in own and name in _UNBUILT:
            _refuse_unless_harmless(name, value)
    kept = {name: value for name, value in values.items() if name in own}
    policy = kept.get("scheduling_policy")
    if isinstance(policy, str):
        kept["scheduling_policy"] = _VLLM_POLICIES.get(policy, policy)
    return EngineConfig(model=model, **kept)


def refuse_unsupported(**arguments: object) -> None:
    """Refuses arguments of vLLM's methods that ask for what is not built.

    Args:
        **arguments: What the caller passed; None and {} ask for nothing.

    Raises:
        RequestError: One asks for something; the message names it.
    """
    for name, value in arguments.items():
        if value is not None and value != {}:
            raise RequestError(f"{name} is not supported, got {value!r}; leave it out")


def _refuse_unless_harmless(name: str, value: object) -> None:
    unbuilt = _UNBUILT[name]
    # `False == 0`, but an option that is a number is not switched off by a bool.
    is_bool = isinstance(value, bool)
    if any(value == other and isinstance(other, bool) == is_bool for other in unbuilt.harmless):
        return
    allowed = ", ".join(repr(other) for other in (*unbuilt.harmless, None))
    raise ConfigError(f"{name}={value!r} is not supported (only {allowed}); {unbuilt.advice}")
