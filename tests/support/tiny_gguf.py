"""Writes GGUF files from tiny checkpoints, by the `gguf` package's writer and name tables.

Names come from the package's tables and values from transformers' weights, so nothing that
nv-models assumes about the format is used to test it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize

from tiny_checkpoints import load_reference

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_ARCHITECTURES = {
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
}


def write_gguf(
    path: Path,
    checkpoint: Path,
    *,
    quantization: str = "F32",
    tokenizer: bool = False,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Converts a checkpoint of `tiny_checkpoints` into a GGUF file.

    Args:
        path: The file to write.
        checkpoint: The directory to convert.
        quantization: Stored type of the matrices, for example "F16" or "Q8_0"; vectors stay F32.
        tokenizer: Also write the checkpoint's tokenizer, which must then be there.
        metadata: Strings, booleans, integers and floats to add, by full key.

    Returns:
        `path`.
    """
    model = load_reference(checkpoint)
    config = model.config
    architecture = _ARCHITECTURES[config.model_type]
    writer: Any = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = model.model.layers[0].self_attn.head_dim
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if architecture is gguf.MODEL_ARCH.LLAMA:
        writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config.vocab_size)
    _add_rope_scaling(writer, model)
    for name, token_id in (("bos", config.bos_token_id), ("eos", config.eos_token_id)):
        if token_id is not None:
            getattr(writer, f"add_{name}_token_id")(token_id)
    if tokenizer:
        _add_tokenizer(writer, checkpoint, config.vocab_size)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, _value_type(value))
    names: Any = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        projection = name.split(".")[-2]
        if architecture is gguf.MODEL_ARCH.LLAMA and projection in heads:
            values = _interleave_halves(values, heads[projection])
        stem, _, kind = name.rpartition(".")
        _add_tensor(writer, f"{names.get_name(stem)}.{kind}", values.numpy(), quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load_rounded_reference(checkpoint: Path, quantization: str) -> Any:  # noqa: ANN401
    """Loads transformers' model with the matrices as they come back out of a GGUF file."""
    model = load_reference(checkpoint)
    kind = gguf.GGMLQuantizationType[quantization]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                rounded = dequantize(quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(rounded.copy()))
    return model


def _interleave_halves(values: Tensor, num_heads: int) -> Tensor:
    """Puts rows i and i + head_dim / 2 of each head next to each other, as llama.cpp wants them."""
    halves = values.view(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)


def _add_tensor(writer: Any, name: str, values: Any, quantization: str) -> None:  # noqa: ANN401
    if values.ndim == 1:
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
        return
    kind = gguf.GGMLQuantizationType[quantization]
    writer.add_tensor(name, quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)


def _add_rope_scaling(writer: Any, model: Any) -> None:  # noqa: ANN401 - untyped classes
    rope = model.config.rope_parameters
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif rope["rope_type"] == "llama3":
        scaled = model.model.rotary_emb.inv_freq
        steps = torch.arange(0, 2 * len(scaled), 2) / (2 * len(scaled))
        divisors = 1.0 / rope["rope_theta"] ** steps / scaled
        writer.add_tensor("rope_freqs.weight", divisors.numpy().astype(np.float32))


def _add_tokenizer(writer: Any, checkpoint: Path, vocab_size: int) -> None:  # noqa: ANN401
    raw = json.loads((checkpoint / "tokenizer.json").read_text())
    special = {token["id"]: token["content"] for token in raw["added_tokens"]}
    tokens = {token_id: token for token, token_id in raw["model"]["vocab"].items()} | special
    # Ids that the model has and the tokenizer does not: llama.cpp's converter names them so.
    names = [tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    types = [
        gguf.TokenType.CONTROL
        if i in special
        else gguf.TokenType.NORMAL
        if i in tokens
        else gguf.TokenType.UNUSED
        for i in range(vocab_size)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in raw["model"]["merges"]])
    writer.add_add_bos_token(value=False)
    writer.add_chat_template((checkpoint / "chat_template.jinja").read_text())


def _value_type(value: object) -> gguf.GGUFValueType:
    if isinstance(value, bool):
        return gguf.GGUFValueType.BOOL
    if isinstance(value, int):
        return gguf.GGUFValueType.UINT32
    if isinstance(value, float):
        return gguf.GGUFValueType.FLOAT32
    if isinstance(value, list):
        return gguf.GGUFValueType.ARRAY
    return gguf.GGUFValueType.STRING
