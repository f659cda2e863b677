"""config.json is read as transformers reads it, and refused by name where we compute less."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nv_core.errors import ConfigError, NvError
from nv_models import ModelConfig, RopeConfig, UnsupportedModelError
from nv_models.rope import ROPE_TYPES, inverse_frequencies
from tiny_checkpoints import FAMILIES, Family, TinySpec, make_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BASE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 7,
}


def changed(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON values
    """Returns BASE with some fields set; `...` removes one."""
    raw = {**BASE, **changes}
    return {name: value for name, value in raw.items() if value is not ...}


def as_architecture(name: str, **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON values
    return changed(architectures=[name], model_type=..., **changes)


def test_qwen3() -> None:
    assert ModelConfig.from_dict(BASE) == ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=1000000.0),
        tie_word_embeddings=False,
        qk_norm=True,
        qkv_bias=False,
        o_proj_bias=False,
        mlp_bias=False,
        dtype=torch.bfloat16,
        eos_token_ids=(7,),
        bos_token_id=None,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_read_back(family: Family, tmp_path: Path) -> None:
    spec = TinySpec(
        family=family,
        num_heads=8,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        eos_token_id=[5, 6],
        bos_token_id=1,
        dtype=torch.float16,
    )
    reference = make_config(spec)
    reference.architectures = [type(reference).__name__.replace("Config", "ForCausalLM")]
    reference.save_pretrained(tmp_path)
    config = ModelConfig.from_pretrained(tmp_path)
    assert config.architecture == reference.architectures[0]
    assert config.vocab_size == reference.vocab_size
    assert config.hidden_size == reference.hidden_size
    assert config.intermediate_size == reference.intermediate_size
    assert config.num_layers == reference.num_hidden_layers
    assert config.num_heads == reference.num_attention_heads
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.head_dim == reference.head_dim
    assert config.max_position_embeddings == reference.max_position_embeddings
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.rope == RopeConfig(theta=reference.rope_parameters["rope_theta"])
    assert config.tie_word_embeddings
    assert config.dtype == torch.float16
    assert config.eos_token_ids == (5, 6)
    assert config.bos_token_id == 1
    assert config.qk_norm == (family == "qwen3")
    assert config.qkv_bias == (family != "mistral")
    assert config.o_proj_bias == (family in ("qwen3", "llama"))
    assert config.mlp_bias == (family == "llama")


@pytest.mark.parametrize(
    ("raw", "field", "expected"),
    [
        (changed(torch_dtype=..., dtype="float16"), "dtype", torch.float16),
        (changed(dtype="float32"), "dtype", torch.float32),  # the new spelling wins
        (changed(torch_dtype="torch.float16"), "dtype", torch.float16),
        (changed(torch_dtype=...), "dtype", torch.float32),
        (changed(torch_dtype=None), "dtype", torch.float32),
        (changed(eos_token_id=[5, 6, 5]), "eos_token_ids", (5, 6)),
        (changed(eos_token_id=None), "eos_token_ids", ()),
        (changed(eos_token_id=...), "eos_token_ids", ()),
        (changed(bos_token_id=3), "bos_token_id", 3),
        (changed(tie_word_embeddings=True), "tie_word_embeddings", True),
        (changed(rms_norm_eps=...), "rms_norm_eps", 1e-6),
        (changed(hidden_act=...), "qk_norm", True),
        (changed(architectures=...), "architecture", "Qwen3ForCausalLM"),
        (changed(architectures=None, model_type="mistral", sliding_window=None), "qk_norm", False),
        # Defaults of absent fields are those of transformers' configuration classes.
        (changed(head_dim=...), "head_dim", 128),
        (as_architecture("LlamaForCausalLM", head_dim=...), "head_dim", 16),
        (as_architecture("LlamaForCausalLM", head_dim=None), "head_dim", 16),
        (as_architecture("Qwen2ForCausalLM", head_dim=...), "head_dim", 16),
        (as_architecture("Qwen2ForCausalLM"), "head_dim", 32),
        (as_architecture("LlamaForCausalLM", num_key_value_heads=...), "num_kv_heads", 4),
        (changed(num_key_value_heads=..., num_attention_heads=64), "num_kv_heads", 32),
        (changed(num_key_value_heads=None), "num_kv_heads", 4),
        # Biases: which flag counts differs by architecture.
        (changed(attention_bias=True), "qkv_bias", True),
        (changed(attention_bias=True), "o_proj_bias", True),
        (as_architecture("Qwen2ForCausalLM"), "qkv_bias", True),
        (as_architecture("Qwen2ForCausalLM", attention_bias=True), "o_proj_bias", False),
        (as_architecture("LlamaForCausalLM", mlp_bias=True), "mlp_bias", True),
        (changed(mlp_bias=True), "mlp_bias", False),
        # A window that is not in use.
        (changed(use_sliding_window=False, sliding_window=4096), "num_layers", 2),
        (changed(use_sliding_window=True, sliding_window=None), "num_layers", 2),
        (changed(use_sliding_window=True, max_window_layers=2), "num_layers", 2),
        (changed(use_sliding_window=True, layer_types=["full_attention"] * 2), "num_layers", 2),
        (changed(layer_types=["full_attention"] * 2), "num_layers", 2),
        (as_architecture("MistralForCausalLM", sliding_window=None), "num_layers", 2),
        (as_architecture("LlamaForCausalLM", sliding_window=128), "num_layers", 2),
        # Fields that change no number are not looked at.
        (changed(quantization_config=None, pretraining_tp=2, anything="else"), "num_layers", 2),
    ],
)
def test_accepted(raw: dict[str, Any], field: str, expected: object) -> None:
    assert getattr(ModelConfig.from_dict(raw), field) == expected


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (changed(architectures=["GPT2LMHeadModel"]), "'GPT2LMHeadModel' is not supported; supp"),
        (changed(architectures=["Qwen3MoeForCausalLM"]), r"Moe.*\(a mixture of experts\) is not"),
        (changed(architectures=["MixtralForCausalLM"]), "a mixture of experts"),
        (changed(architectures=["LlamaForSequenceClassification"]), "is not supported"),
        (changed(architectures=[], model_type="gemma3"), "model_type 'gemma3' is not supported"),
        (
            changed(quantization_config={"quant_method": "awq", "bits": 4}),
            r"quantised weights \(awq\) are not supported",
        ),
        (changed(num_experts=8), r"mixture-of-experts .*num_experts = 8"),
        (changed(num_local_experts=8), "mixture-of-experts"),
        (changed(hidden_act="gelu"), "hidden_act 'gelu' in config.json is not supported"),
        (changed(is_causal=False), "bidirectional attention"),
        (
            changed(use_sliding_window=True, sliding_window=1024, max_window_layers=1),
            r"sliding-window attention is not supported \(sliding_window = 1024 in config.json",
        ),
        (
            changed(layer_types=["full_attention", "sliding_attention"]),
            "layer_types sliding_attention in config.json are not supported",
        ),
        (changed(layer_types=["linear_attention"]), "linear_attention"),
        (as_architecture("MistralForCausalLM", sliding_window=4096), "sliding-window"),
        (as_architecture("MistralForCausalLM"), "4096, the default of an absent field"),
        (changed(torch_dtype="float8_e4m3fn"), "dtype 'float8_e4m3fn' is not supported"),
        (changed(rope_scaling={"type": "longrope"}), "rope_type 'longrope'"),
    ],
)
def test_unsupported_features_are_named(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        *(
            (changed(**{name: ...}), f"{name} is missing in config.json")
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "max_position_embeddings",
            )
        ),
        (changed(architectures=..., model_type=...), "architectures and model_type are both miss"),
        (changed(architectures="Qwen3ForCausalLM"), "architectures .* must be a list of names"),
        (changed(vocab_size="1000"), "vocab_size in config.json must be an integer, got '1000'"),
        (changed(vocab_size=True), "vocab_size in config.json must be an integer, got True"),
        (changed(vocab_size=0), "vocab_size must be at least 1, got 0"),
        (changed(rms_norm_eps="1e-6"), "rms_norm_eps in config.json must be a number"),
        (changed(rms_norm_eps=-1.0), "rms_norm_eps must be at least 0"),
        (changed(rms_norm_eps=math.inf), "rms_norm_eps must be at least 0 and finite, got inf"),
        (changed(rms_norm_eps=10**400), "rms_norm_eps in .* must be in the range of a float"),
        (changed(layer_types=5), "layer_types in config.json must be a list, got 5"),
        (
            changed(rope_scaling={"type": "yarn", "original_max_position_embeddings": 0}),
            "needs original_max_position_embeddings of at least 1, got 0",
        ),
        (
            changed(rope_scaling={"type": "yarn", "factor": 4.0, "beta_slow": -1.0}),
            "rope beta_slow must be positive, from 1e-15 to 1e.15, got -1.0",
        ),
        (changed(tie_word_embeddings="yes"), "tie_word_embeddings .* must be true or false"),
        (changed(eos_token_id="</s>"), "eos_token_id in config.json must be a token id, a list"),
        (changed(eos_token_id=[1, "2"]), "eos_token_id"),
        (changed(num_key_value_heads=3), r"num_heads \(4\) must be a multiple of num_kv_heads \(3"),
        (changed(head_dim=33), "head_dim must be even, got 33"),
        (
            as_architecture("LlamaForCausalLM", head_dim=..., hidden_size=66),
            r"hidden_size \(66\) .* must be a multiple of num_attention_heads \(4\)",
        ),
    ],
)
def test_wrong_values_are_named(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(raw)


ODD_VALUES: list[Any] = [
    *(None, True, False, "", "x", [], ["x"], [1], [None], [[1]], {}, {"a": 1}),
    *(-1, 0, 1, 7, 2**31, 10**400, -0.5, 0.5, 1e-320, 1e308, math.inf, math.nan),
]
PLAIN_FIELDS = (
    *BASE,
    *("dtype", "bos_token_id", "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act"),
    *("num_experts", "num_local_experts", "n_routed_experts", "is_causal", "layer_types"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "quantization_config"),
    *("rope_scaling", "rope_parameters", "partial_rotary_factor"),
    "original_max_position_embeddings",
)
ROPE_FIELDS = (
    *("rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings"),
    *("mscale", "mscale_all_dim", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    *("low_freq_factor", "high_freq_factor", "partial_rotary_factor", "full_attention"),
)
KV_SCHEME = {"num_bits": 8, "type": "float"}
QUANTIZATION_FIELDS = (
    *("quant_method", "config_groups", "quant_algo", "kv_cache_scheme", "kv_cache_quant_algo"),
)


def configs_with(value: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - JSON values
    """Yields configurations that open, but for one value somewhere."""
    for name in ("Qwen3ForCausalLM", "MistralForCausalLM"):
        for field in PLAIN_FIELDS:
            yield {**BASE, "architectures": [name], "sliding_window": None, field: value}
    for rope_type in ROPE_TYPES:
        scaling = {"rope_type": rope_type, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        for field in ROPE_FIELDS:
            yield changed(rope_scaling={**scaling, field: value})
        for field in ("max_position_embeddings", "original_max_position_embeddings"):
            yield changed(**{"rope_scaling": scaling, field: value})
    for method in ("compressed-tensors", "modelopt"):
        quantization = {"quant_method": method, "kv_cache_scheme": KV_SCHEME}
        for field in QUANTIZATION_FIELDS:
            yield changed(quantization_config={**quantization, field: value})
        for field in (*KV_SCHEME, "strategy", "symmetric"):
            scheme = {**KV_SCHEME, field: value}
            yield changed(quantization_config={**quantization, "kv_cache_scheme": scheme})


@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: repr(value)[:12])
def test_any_value_in_any_field_is_refused_by_name_or_can_be_computed_with(value: Any) -> None:  # noqa: ANN401
    num_read = 0
    for raw in configs_with(value):
        try:
            config = ModelConfig.from_dict(raw)
        except NvError:
            continue
        num_read += 1
        assert config.longest_model_len > 0
        assert hash(config) == hash(config)
        if config.head_dim < 4096:
            frequencies = inverse_frequencies(config.rope, config.head_dim)
            assert bool(frequencies.isfinite().all()), raw
    assert num_read > 0


def test_from_pretrained_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"config\.json is missing in .*a Hugging Face checkpoint"
    ):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON \(.*recursion"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object, got list"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert ModelConfig.from_pretrained(str(tmp_path)) == ModelConfig.from_dict(BASE)


def test_configs_are_values() -> None:
    config = ModelConfig.from_dict(BASE)
    assert hash(config) == hash(ModelConfig.from_dict(BASE))
    with pytest.raises(AttributeError):
        config.vocab_size = 5  # type: ignore[misc]
