"""What the metadata of a GGUF file says about the model, its sampling and its tokenizer.

Works on plain values (a mapping from key to value), not on files; `gguf_checkpoint.py` reads those.
Keys that change the computed numbers in a way this package does not know are refused by name.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nv_core.errors import ConfigError
from nv_models.config import ModelConfig
from nv_models.config_values import ConfigValues, shown
from nv_models.errors import UnsupportedModelError, WeightError
from nv_models.registry import find_gguf_architecture
from nv_models.rope import RopeConfig, yarn_attention_factor

if TYPE_CHECKING:
    from collections.abc import Mapping

_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTokenizerData:
    """A tokenizer as plain data, in the terms of the GGUF format.

    Args:
        model: Kind of tokenizer: "gpt2" (byte-level BPE) or "llama" (SentencePiece) in the
            supported families.
        pre: Name of the rules that split text before BPE ("qwen2", "llama-bpe", "smollm", ...), or
            None.
        tokens: Text of each token id, in the spelling of the kind (byte-level symbols for "gpt2").
        token_types: Type of each token id (1 normal, 2 unknown, 3 control, 4 user-defined,
            5 unused, 6 byte), or None when the file has no types.
        scores: Score of each token id ("llama"), or None.
        merges: BPE merges in order of preference, each "left right" ("gpt2"), or None.
        bos_token_id: Starts a sequence, or None.
        eos_token_id: Ends a sequence, or None.
        eot_token_id: Ends a turn, or None.
        eom_token_id: Ends a message that a tool answers, or None.
        unknown_token_id: Stands for text without a token, or None.
        padding_token_id: Fills up batches, or None.
        add_bos: Whether `bos_token_id` is put before a text; None when the file does not say.
        add_eos: Whether `eos_token_id` is put behind a text; None when the file does not say.
        add_space_prefix: Whether a space is put before a text; None when the file does not say.
        chat_template: Jinja template of a conversation, or None.
        source: What messages call the file.
    """

    model: str
    pre: str | None
    tokens: tuple[str, ...]
    token_types: tuple[int, ...] | None
    scores: tuple[float, ...] | None
    merges: tuple[str, ...] | None
    bos_token_id: int | None
    eos_token_id: int | None
    eot_token_id: int | None
    eom_token_id: int | None
    unknown_token_id: int | None
    padding_token_id: int | None
    add_bos: bool | None
    add_eos: bool | None
    add_space_prefix: bool | None
    chat_template: str | None
    source: str = "the GGUF file"


def read_gguf_tokenizer(metadata: Mapping[str, Any], *, source: str) -> GGUFTokenizerData:
    """Reads the tokenizer from GGUF metadata.

    Args:
        metadata: Values of all keys below "tokenizer.".
        source: What messages call the file.

    Raises:
        ConfigError: The file has no tokenizer, a value is of the wrong type, or a token id is none
            of the vocabulary.
    """
    values = ConfigValues(metadata, source)
    ggml = "tokenizer.ggml"
    model = values.text(f"{ggml}.model")
    tokens = values.optional_texts(f"{ggml}.tokens")
    if not tokens:
        raise ConfigError(
            f"{ggml}.tokens in {source} must be a list of at least one string, got "
            f"{'none' if tokens is None else 'an empty one'}"
        )

    def token_id(name: str) -> int | None:
        return values.optional_token_id(f"{ggml}.{name}_token_id", num_tokens=len(tokens))

    return GGUFTokenizerData(
        model=model,
        pre=values.optional_text(f"{ggml}.pre"),
        tokens=tokens,
        token_types=values.optional_integers(f"{ggml}.token_type"),
        scores=values.optional_numbers(f"{ggml}.scores"),
        merges=values.optional_texts(f"{ggml}.merges"),
        bos_token_id=token_id("bos"),
        eos_token_id=token_id("eos"),
        eot_token_id=token_id("eot"),
        eom_token_id=token_id("eom"),
        unknown_token_id=token_id("unknown"),
        padding_token_id=token_id("padding"),
        add_bos=values.optional_boolean(f"{ggml}.add_bos_token"),
        add_eos=values.optional_boolean(f"{ggml}.add_eos_token"),
        add_space_prefix=values.optional_boolean(f"{ggml}.add_space_prefix"),
        chat_template=values.optional_text("tokenizer.chat_template"),
        source=source,
    )


_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def read_gguf_generation_config(metadata: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Returns the recommended sampling of a GGUF file in the names of generation_config.json.

    Args:
        metadata: Values of the keys.
        source: What messages call the file.

    Raises:
        ConfigError: A value is no number.
    """
    values = ConfigValues(metadata, source)
    return {
        name: values.integer(key) if name == "top_k" else values.number(key)
        for key, name in _SAMPLING_KEYS.items()
        if metadata.get(key) is not None
    }


def read_gguf_config(
    metadata: Mapping[str, Any],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: torch.dtype,
    frequency_divisors: tuple[float, ...] | None,
    source: str,
) -> ModelConfig:
    """Reads the model from GGUF metadata.

    Biases and tied embeddings have no key of their own: they follow from which tensors exist.

    Args:
        metadata: Values of the keys; those below "tokenizer." may be left out, but for token ids.
        tensor_shapes: Shape of each tensor, by its GGUF name.
        dtype: What the config shall declare.
        frequency_divisors: Contents of the tensor "rope_freqs.weight", or None without it.
        source: What messages call the file.

    Raises:
        ConfigError: A key is missing or of the wrong type.
        UnsupportedModelError: The model needs something that this package does not compute.
        WeightError: There is no embedding, which the size of the vocabulary follows from, or
            tensors are fewer than the layers or of another size than the metadata says.
    """
    values = ConfigValues(metadata, source)
    prefix = values.text("general.architecture")
    try:
        architecture = find_gguf_architecture(prefix)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{error} (general.architecture in {source})") from None
    _refuse_unsupported_keys(metadata, prefix, source)
    if "token_embd.weight" not in tensor_shapes:
        raise WeightError(f"{source} has no tensor token_embd.weight; download it again")
    embedding_shape = tensor_shapes["token_embd.weight"]
    if len(embedding_shape) != 2:
        raise WeightError(
            f"token_embd.weight in {source} must have two dimensions, got {list(embedding_shape)}; "
            "download the file again"
        )
    vocab_size = embedding_shape[0]
    num_layers = values.integer(f"{prefix}.block_count")
    _check_layers_exist(num_layers, tensor_shapes, key=f"{prefix}.block_count", source=source)

    def per_layer(name: str, default: int | None = None) -> int:
        return _same_in_all_layers(metadata, f"{prefix}.{name}", default, source)

    num_heads = per_layer("attention.head_count")
    context_length = values.integer(f"{prefix}.context_length")
    hidden_size = values.integer(f"{prefix}.embedding_length")
    end_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    end_ids = [
        values.optional_token_id(f"tokenizer.ggml.{key}", num_tokens=vocab_size) for key in end_keys
    ]
    head_dim = _read_head_dim(values, prefix, hidden_size // max(num_heads, 1), source)
    _check_divisors(frequency_divisors, head_dim // 2, source)
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=per_layer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=per_layer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=context_length,
        rms_norm_eps=values.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        rope=_read_rope(values, prefix, context_length, frequency_divisors, source),
        tie_word_embeddings="output.weight" not in tensor_shapes,
        qk_norm=architecture.qk_norm,
        qkv_bias=architecture.always_has_qkv_bias or "blk.0.attn_q.bias" in tensor_shapes,
        o_proj_bias="blk.0.attn_output.bias" in tensor_shapes,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_shapes,
        dtype=dtype,
        eos_token_ids=tuple(dict.fromkeys(i for i in end_ids if i is not None)),
        bos_token_id=values.optional_token_id("tokenizer.ggml.bos_token_id", num_tokens=vocab_size),
    )


def _check_layers_exist(
    num_layers: int, tensor_shapes: Mapping[str, tuple[int, ...]], *, key: str, source: str
) -> None:
    """Compares the number of layers with the tensors, before anything of that size is made."""
    matches = (_LAYER.match(name) for name in tensor_shapes)
    found = len({match[1] for match in matches if match is not None})
    if num_layers > found:
        raise WeightError(
            f"{key} in {source} is {num_layers}, but the file has tensors of {found} layers only; "
            "it is damaged or incomplete: download it again"
        )


def _check_divisors(divisors: tuple[float, ...] | None, num_pairs: int, source: str) -> None:
    if divisors is None:
        return
    if len(divisors) != num_pairs or not all(math.isfinite(d) and d > 0 for d in divisors):
        raise WeightError(
            f"rope_freqs.weight in {source} must hold {num_pairs} positive numbers (one for two "
            f"elements of a head), got {shown(list(divisors))}; download the file again"
        )


def _refuse_unsupported_keys(metadata: Mapping[str, Any], prefix: str, source: str) -> None:
    features = {
        f"{prefix}.expert_count": "mixture of experts",
        f"{prefix}.attention.sliding_window": "sliding-window attention",
        f"{prefix}.attention.scale": "a scale of attention other than 1 / sqrt(head_dim)",
        f"{prefix}.attention.clamp_kqv": "clamping of queries, keys and values",
        f"{prefix}.attention.max_alibi_bias": "ALiBi",
        f"{prefix}.logit_scale": "scaling of logits",
        f"{prefix}.embedding_scale": "scaling of embeddings",
        f"{prefix}.residual_scale": "scaling of the residual stream",
    }
    for key, feature in features.items():
        if metadata.get(key):
            raise UnsupportedModelError(
                f"{feature} is not supported ({key} = {shown(metadata[key])} in {source})"
            )
    if metadata.get(f"{prefix}.attention.causal") is False:
        raise UnsupportedModelError(
            f"bidirectional attention is not supported ({prefix}.attention.causal is false in "
            f"{source})"
        )
    num_parts = ConfigValues(metadata, source).integer("split.count", 1)
    if num_parts > 1:
        raise UnsupportedModelError(
            f"{source} is one of {num_parts} parts of a split GGUF file: merge them "
            "first, with llama.cpp's `llama-gguf-split --merge`"
        )


def _same_in_all_layers(
    metadata: Mapping[str, Any], key: str, default: int | None, source: str
) -> int:
    values = ConfigValues(metadata, source)
    if not isinstance(metadata.get(key), list):
        return values.integer(key, default)
    per_layer = values.optional_integers(key) or ()
    if not per_layer:
        raise ConfigError(f"{key} in {source} must have a value for each layer, got an empty list")
    if len(set(per_layer)) > 1:
        raise UnsupportedModelError(
            f"layers that differ are not supported ({key} = {shown(list(per_layer))} in {source})"
        )
    return per_layer[0]


def _read_head_dim(values: ConfigValues, prefix: str, default: int, source: str) -> int:
    rotary_dim = values.integer(f"{prefix}.rope.dimension_count", 0)
    head_dim = values.integer(f"{prefix}.attention.key_length", rotary_dim or default)
    value_dim = values.integer(f"{prefix}.attention.value_length", head_dim)
    if value_dim != head_dim:
        raise UnsupportedModelError(
            f"values of another size than keys are not supported ({prefix}.attention.value_length "
            f"= {value_dim}, key_length = {head_dim} in {source})"
        )
    if rotary_dim not in (0, head_dim):
        raise UnsupportedModelError(
            f"partial rotary embedding is not supported ({prefix}.rope.dimension_count = "
            f"{rotary_dim} of {head_dim} in {source})"
        )
    return head_dim


def _read_rope(
    values: ConfigValues,
    prefix: str,
    context_length: int,
    frequency_divisors: tuple[float, ...] | None,
    source: str,
) -> RopeConfig:
    theta = values.number(f"{prefix}.rope.freq_base", 10000.0)
    scaling = f"{prefix}.rope.scaling"
    # A factor without a type is linear; the type "none" switches a factor off. Files from before
    # these keys had one key for linear scaling.
    kind = values.text(f"{scaling}.type", "linear")
    factor = values.number(f"{scaling}.factor", values.number(f"{prefix}.rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(theta=theta, frequency_divisors=frequency_divisors)
    if frequency_divisors is not None:
        raise UnsupportedModelError(
            f"rope_freqs.weight together with {scaling}.type = {kind!r} is not supported "
            f"(in {source})"
        )
    if kind == "linear":
        return RopeConfig(theta=theta, rope_type="linear", factor=factor)
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{scaling}.type {kind!r} in {source} is not supported; "
            "supported are none, linear and yarn"
        )
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if values.number(f"{scaling}.{name}", 1.0) != 1.0:
            raise UnsupportedModelError(
                f"{scaling}.{name} other than 1 in {source} is not supported"
            )
    if values.number(f"{scaling}.yarn_log_multiplier", 0.0):
        raise UnsupportedModelError(f"{scaling}.yarn_log_multiplier in {source} is not supported")
    return RopeConfig(
        theta=theta,
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=values.integer(
            f"{scaling}.original_context_length", context_length
        ),
        attention_factor=yarn_attention_factor(factor),
        beta_fast=values.number(f"{scaling}.yarn_beta_fast", 32.0),
        beta_slow=values.number(f"{scaling}.yarn_beta_slow", 1.0),
    )
