"""ModelConfig: the shape and the numbers of one decoder, read from config.json and checked.

Reading is strict: what this package does not compute (sliding windows, quantised weights, experts,
other activations) is refused by name here, before any weight is read, and never ignored. Fields
that do not change the computed numbers are not looked at.

GGUF files bring their own metadata: see `gguf_metadata.py`, which makes the same `ModelConfig`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nv_core.errors import ConfigError
from nv_models.config_values import MAX_INTEGER, ConfigValues
from nv_models.errors import UnsupportedModelError
from nv_models.registry import (
    Architecture,
    find_architecture,
    find_architecture_of_model_type,
)
from nv_models.rope import RopeConfig, read_rope_config

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""The dtypes that weights and activations may have, by the name that config.json uses."""

_KV_CACHE_FIELDS = {
    "compressed-tensors": ("kv_cache_scheme",),
    "modelopt": ("kv_cache_quant_algo", "kv_cache_scheme"),
}
"""Fields of a quantization_config that say how the KV cache is quantised, by its quant_method."""

_FP8_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
"""The kv_cache_scheme that is built."""

_DEFAULT_SCHEME = {**_FP8_SCHEME, "type": "int"}
"""What absent fields of a kv_cache_scheme stand for."""

# Far above any model. A damaged file says millions, and each layer costs memory and time even
# before its weights do.
_MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer; nothing in it changes after it is made.

    Args:
        architecture: Name as in `architectures` of config.json.
        vocab_size: Number of token ids, and of logits.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the MLP between its projections.
        num_layers: Number of decoder layers.
        num_heads: Number of query heads.
        num_kv_heads: Number of key/value heads; divides `num_heads`.
        head_dim: Size of a head, even; need not be `hidden_size / num_heads`.
        max_position_embeddings: Sequence length in tokens that the model declares.
        rms_norm_eps: Added to the mean square in every RMSNorm.
        rope: Rotary settings.
        tie_word_embeddings: Whether the LM head is the embedding matrix.
        qk_norm: Whether queries and keys are normalised per head before rotation.
        qkv_bias: Whether the q, k and v projections have biases.
        o_proj_bias: Whether the attention's output projection has one.
        mlp_bias: Whether the three MLP projections have biases.
        dtype: Dtype that the checkpoint declares; float32 when it declares none.
        eos_token_ids: Ids that end a sequence according to this file (generation_config and the
            tokenizer may name more).
        bos_token_id: Id that starts a sequence, or None.

    Raises:
        ConfigError: A value is out of range or contradicts another one.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_proj_bias: bool = False
    mlp_bias: bool = False
    dtype: torch.dtype = torch.float32
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
            most = _MAX_LAYERS if name == "num_layers" else MAX_INTEGER
            if value > most:
                raise ConfigError(f"{name} must be at most {most}, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads}): each key/value head serves a whole group of query heads"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim must be even, got {self.head_dim}: rotary embedding turns pairs"
            )
        if not 0 <= self.rms_norm_eps < math.inf:
            raise ConfigError(
                f"rms_norm_eps must be at least 0 and finite, got {self.rms_norm_eps}"
            )
        if self.dtype not in DTYPES.values():
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")

    @property
    def num_layer_weights(self) -> int:
        """Elements of all weights of one decoder layer."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        attention = hidden * (query + 2 * key) + query * hidden
        attention += (query + 2 * key) * self.qkv_bias + hidden * self.o_proj_bias
        attention += 2 * self.head_dim * self.qk_norm
        mlp = 3 * hidden * inner + (2 * inner + hidden) * self.mlp_bias
        return attention + mlp + 2 * hidden

    @property
    def longest_model_len(self) -> int:
        """Most tokens of a sequence that can be asked for: as declared, stretched by the scaling.

        Without an explicit wish, `max_position_embeddings` is the length to go by.
        """
        return self.rope.longest_len(self.max_position_embeddings)

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> ModelConfig:
        """Reads `config.json` in a checkpoint directory.

        Raises:
            ConfigError: The file is absent, is not JSON, or a value is wrong.
            UnsupportedModelError: The model needs something that this package does not compute.
        """
        return cls.from_dict(read_json_object(Path(directory) / "config.json"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, source: str = "config.json") -> ModelConfig:
        """Reads the contents of a config.json.

        A missing field takes the default that transformers gives it for the same architecture, or
        is an error where a default would be a guess; missing token ids are none.

        Args:
            raw: The parsed file.
            source: What messages call it.

        Raises:
            ConfigError: A field is missing, of the wrong type, or out of range.
            UnsupportedModelError: The model needs something that this package does not compute.
        """
        architecture = _read_architecture(raw, source)
        values = ConfigValues(raw, source)
        num_layers = values.integer("num_hidden_layers", at_most=_MAX_LAYERS)
        _refuse_unsupported_features(raw, architecture, num_layers, source)
        hidden_size = values.integer("hidden_size")
        num_heads = values.integer("num_attention_heads")
        max_position_embeddings = values.integer("max_position_embeddings")
        biased = architecture.reads_attention_bias and values.boolean(
            "attention_bias", default=False
        )
        return cls(
            architecture=architecture.name,
            vocab_size=values.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=values.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_read_num_kv_heads(raw, architecture, num_heads, source),
            head_dim=_read_head_dim(raw, architecture, hidden_size, num_heads, source),
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=values.number("rms_norm_eps", 1e-6),
            rope=read_rope_config(
                raw, max_position_embeddings=max_position_embeddings, source=source
            ),
            tie_word_embeddings=values.boolean("tie_word_embeddings", default=False),
            qk_norm=architecture.qk_norm,
            qkv_bias=architecture.always_has_qkv_bias or biased,
            o_proj_bias=biased,
            mlp_bias=architecture.reads_mlp_bias and values.boolean("mlp_bias", default=False),
            dtype=_read_dtype(values),
            eos_token_ids=values.token_ids("eos_token_id"),
            bos_token_id=next(iter(values.token_ids("bos_token_id")), None),
        )


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file whose top level is an object.

    Raises:
        ConfigError: The file is absent, is not JSON, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path.name} is missing in {path.parent}: give the directory of a Hugging Face "
            "checkpoint, or a .gguf file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _read_architecture(raw: Mapping[str, Any], source: str) -> Architecture:
    names = raw.get("architectures")
    if names:
        if not isinstance(names, list) or not isinstance(names[0], str):
            raise ConfigError(f"architectures in {source} must be a list of names, got {names!r}")
        return find_architecture(names[0])
    if raw.get("model_type") is None:
        raise ConfigError(
            f"architectures and model_type are both missing in {source}; "
            "it does not say which model this is"
        )
    return find_architecture_of_model_type(ConfigValues(raw, source).text("model_type"))


def _refuse_unsupported_features(
    raw: Mapping[str, Any], architecture: Architecture, num_layers: int, source: str
) -> None:
    values = ConfigValues(raw, source)
    quantization = values.mapping("quantization_config")
    if quantization and _quantises_only_the_kv_cache(quantization):
        _refuse_unsupported_kv_scheme(quantization, source)
    elif quantization:
        method = quantization.get("quant_method", "unknown method")
        raise UnsupportedModelError(
            f"quantised weights ({method}) are not supported: {source} has a quantization_config. "
            "Use an unquantised checkpoint, or a GGUF file"
        )
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(name):
            raise UnsupportedModelError(
                f"mixture-of-experts models are not supported ({name} = {raw[name]} in {source})"
            )
    activation = values.text("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(
            f"hidden_act {activation!r} in {source} is not supported; only 'silu' is"
        )
    if raw.get("is_causal") is False:
        raise UnsupportedModelError(
            f"bidirectional attention is not supported (is_causal is false in {source})"
        )
    _refuse_sliding_window(raw, architecture, num_layers, source)


def _quantises_only_the_kv_cache(quantization: Mapping[str, Any]) -> bool:
    """Whether the weights are plain, and scales for an fp8 cache came with them."""
    if quantization.get("config_groups") or quantization.get("quant_algo"):
        return False
    method = quantization.get("quant_method")
    fields = _KV_CACHE_FIELDS.get(method, ()) if isinstance(method, str) else ()
    return any(quantization.get(field) for field in fields)


def _refuse_unsupported_kv_scheme(quantization: Mapping[str, Any], source: str) -> None:
    """Refuses scales that are not for float8_e4m3fn, one for all keys of a layer."""
    values = ConfigValues(quantization, f"quantization_config of {source}")
    algorithm = values.text("kv_cache_quant_algo", "FP8")
    problems = [] if algorithm == "FP8" else [f"kv_cache_quant_algo {algorithm!r} is not 'FP8'"]
    scheme = values.mapping("kv_cache_scheme")
    if scheme:
        given = {name: value for name, value in scheme.items() if value is not None}
        actual = {**_DEFAULT_SCHEME, **given}
        problems += [
            f"{name} {actual[name]!r} of kv_cache_scheme is not {wanted!r}"
            for name, wanted in _FP8_SCHEME.items()
            if actual[name] != wanted
        ]
    if problems:
        raise UnsupportedModelError(
            f"this quantised KV cache is not supported, only 8-bit floats with a scale per tensor: "
            f"{'; '.join(problems)} in {source}. Its weights are plain: without its "
            "quantization_config the model is served with kv_cache_dtype='auto'"
        )


def _refuse_sliding_window(
    raw: Mapping[str, Any], architecture: Architecture, num_layers: int, source: str
) -> None:
    values = ConfigValues(raw, source)
    layer_types = values.array("layer_types")
    others = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    if others:
        raise UnsupportedModelError(
            f"layer_types {', '.join(others)} in {source} are not supported; "
            "only 'full_attention' is"
        )
    # transformers' default for a missing field; a null switches the window off.
    window = raw.get("sliding_window", 4096)
    if architecture.sliding_window == "never" or window is None:
        return
    if architecture.sliding_window == "when_switched_on":
        first_layer = values.integer("max_window_layers", 28)
        all_full = bool(layer_types) or first_layer >= num_layers
        if all_full or not values.boolean("use_sliding_window", default=False):
            return
    absent = "" if "sliding_window" in raw else ", the default of an absent field"
    raise UnsupportedModelError(
        f"sliding-window attention is not supported (sliding_window = {window}{absent} in "
        f"{source}; set it to null only for a model that was trained without a window)"
    )


def _read_num_kv_heads(
    raw: Mapping[str, Any], architecture: Architecture, num_heads: int, source: str
) -> int:
    if raw.get("num_key_value_heads", 0) is None:  # present and null
        return num_heads
    default = architecture.default_num_kv_heads or num_heads
    return ConfigValues(raw, source).integer("num_key_value_heads", default)


def _read_head_dim(
    raw: Mapping[str, Any],
    architecture: Architecture,
    hidden_size: int,
    num_heads: int,
    source: str,
) -> int:
    if raw.get("head_dim") is not None:
        return ConfigValues(raw, source).integer("head_dim")
    if architecture.default_head_dim is not None:
        return architecture.default_head_dim
    if num_heads < 1 or hidden_size % num_heads:
        raise ConfigError(
            f"hidden_size ({hidden_size}) in {source} must be a multiple of num_attention_heads "
            f"({num_heads}) when head_dim is not given"
        )
    return hidden_size // num_heads


def _read_dtype(values: ConfigValues) -> torch.dtype:
    name = values.text("dtype", values.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(
            f"dtype {name!r} is not supported; supported are {', '.join(DTYPES)}"
        )
    return DTYPES[name]
