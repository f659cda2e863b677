"""Tiny random checkpoints that transformers writes and reads, so that it can be the oracle.

Every family that nv-models supports, in the variants that break engines: tied and untied
embeddings, grouped-query ratios, `head_dim` that is not `hidden_size / num_heads`, a vocabulary
of odd size, attention biases, shards. Weights are drawn wide enough that logits of neighbouring
tokens differ clearly (greedy tokens then agree across implementations that round differently), and
norms and biases are random too, so that leaving one out shows.

`write_checkpoint` needs a second of imports and a few milliseconds per checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import signature
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Family = Literal["qwen3", "qwen2", "llama", "mistral"]

FAMILIES: tuple[Family, ...] = ("qwen3", "qwen2", "llama", "mistral")

# With a tokenizer, the vocabulary must hold the 256 byte symbols and the special tokens.
TOKENIZER_VOCAB_SIZE = 331
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# What the byte-level BPE is trained on: a few words, digits, and text of more than one byte a sign.
_TRAINING_TEXT = (
    "the quick brown fox jumps over the lazy dog and the other animals of the forest",
    "she sells sea shells on the sea shore while the waves roll in and out again",
    "user: what is the capital of France? assistant: the capital of France is Paris.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 100 1000 2024",
    "Grüße aus Köln, déjà vu à la carte, こんにちは世界, 你好,世界 🙂🙃",
)


@dataclass(frozen=True, kw_only=True)
class TinySpec:
    """One tiny model. The defaults are a Qwen3-like shape with an odd vocabulary."""

    family: Family = "qwen3"
    vocab_size: int = 131
    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | None = 24
    """None leaves it out, which means `hidden_size / num_heads` (not for Qwen3: there 128)."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Read by Qwen3 and Llama; Qwen2 always has q/k/v biases, Mistral none."""
    mlp_bias: bool = False
    """Read by Llama only."""
    max_position_embeddings: int = 512
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default"})
    """`rope_parameters` in the new spelling; `rope_theta` is added when absent."""
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0


def write_checkpoint(
    path: Path,
    spec: TinySpec | None = None,
    *,
    tokenizer: bool = False,
    max_shard_bytes: int | None = None,
    generation_config: dict[str, Any] | None = None,
) -> Path:
    """Writes config.json, safetensors and, when asked, a working tokenizer into `path`.

    Args:
        path: Folder to create or fill.
        spec: The model; None means `TinySpec()`, or with `tokenizer` the same with a vocabulary
            that holds the tokenizer's tokens and the end-of-sequence ids of its special tokens.
        tokenizer: Also write tokenizer.json, tokenizer_config.json and the chat template. The
            spec's `vocab_size` must then be at least `TOKENIZER_VOCAB_SIZE`.
        max_shard_bytes: Split the weights into shards with an index; None writes one file.
        generation_config: Written as generation_config.json; None writes none.

    Returns:
        `path`, for `write_checkpoint(...)` as an expression.
    """
    if spec is None:
        spec = (
            TinySpec(vocab_size=TOKENIZER_VOCAB_SIZE, bos_token_id=0, eos_token_id=2)
            if tokenizer
            else TinySpec()
        )
    if tokenizer and spec.vocab_size < TOKENIZER_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size must be at least {TOKENIZER_VOCAB_SIZE} with a tokenizer, "
            f"got {spec.vocab_size}"
        )
    model = make_model(spec)
    shard_size: int | str = max_shard_bytes if max_shard_bytes is not None else "50GB"
    model.save_pretrained(path, max_shard_size=shard_size)
    # transformers writes one of its own making; a checkpoint has one only when we say so.
    (path / "generation_config.json").unlink(missing_ok=True)
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    if tokenizer:
        write_tokenizer(path)
    return path


def make_model(spec: TinySpec) -> Any:  # noqa: ANN401 - transformers' classes are made at run time
    """Builds the transformers model of `spec` in eval mode with seeded random weights."""
    config = make_config(spec)
    model = _auto_model().from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.2 * noise)
            elif name.endswith(".bias"):
                parameter.copy_(0.3 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
    return model.to(spec.dtype).eval()


def make_config(spec: TinySpec) -> Any:  # noqa: ANN401 - one of four transformers classes
    """Builds the transformers configuration of `spec`."""
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    rope = {"rope_theta": 10000.0, **spec.rope}
    options: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "rope_parameters": rope,
        "eos_token_id": spec.eos_token_id,
        "bos_token_id": spec.bos_token_id,
        "dtype": spec.dtype,
    }
    if spec.head_dim is not None:
        options["head_dim"] = spec.head_dim
    if spec.family == "qwen3":
        return Qwen3Config(attention_bias=spec.attention_bias, **options)
    if spec.family == "qwen2":
        return Qwen2Config(**options)
    if spec.family == "llama":
        return LlamaConfig(attention_bias=spec.attention_bias, mlp_bias=spec.mlp_bias, **options)
    return MistralConfig(sliding_window=None, **options)


def write_tokenizer(path: Path) -> None:
    """Writes a byte-level BPE tokenizer with a chat template, as Hub repositories hold it.

    Ids 0, 1, 2 are `SPECIAL_TOKENS`; "<|im_end|>" (2) ends a turn and a sequence. Every string
    round-trips, because all 256 bytes are in the alphabet.
    """
    path.mkdir(parents=True, exist_ok=True)
    _tokenizer().save_pretrained(path)


@lru_cache(maxsize=1)
def _tokenizer() -> Any:  # noqa: ANN401 - untyped third-party class
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCAB_SIZE - 1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_TRAINING_TEXT, trainer)
    tokenizer_class: Any = PreTrainedTokenizerFast
    return tokenizer_class(
        tokenizer_object=backend,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def load_reference(path: Path, **options: Any) -> Any:  # noqa: ANN401 - transformers' class
    """Loads the transformers model of a checkpoint in fp32 with its plainest attention."""
    return (
        _auto_model()
        .from_pretrained(path, dtype=torch.float32, attn_implementation="eager", **options)
        .eval()
    )


def load_gguf_reference(path: Path) -> Any:  # noqa: ANN401 - transformers' class
    """Loads the transformers model of a GGUF file in fp32, by transformers' own GGUF reader.

    `from_pretrained(..., gguf_file=...)` does the same, but wants another package installed.
    """
    from transformers import AutoConfig
    from transformers import modeling_gguf_pytorch_utils as gguf_utils

    reader: Any = gguf_utils
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = _auto_model().from_config(config, dtype=torch.float32, attn_implementation="eager")
    # Only the names of the model's tensors are needed. With its children too, the reader would
    # build its table of names anew for each of the hundreds of them, which takes seconds.
    names = SimpleNamespace(config=config, state_dict=model.state_dict, named_children=list)
    stored = reader.load_gguf_checkpoint(path, return_tensors=True, model_to_load=names)
    missing, unexpected = model.load_state_dict(stored["tensors"], strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{path}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.eval()


def _auto_model() -> Any:  # noqa: ANN401 - a class without annotations
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


@torch.no_grad()
def reference_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:  # noqa: ANN401
    """Returns transformers' logits of one prompt run in one go, [num_tokens, vocab_size]."""
    logits: torch.Tensor = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits
    return logits[0].float()


@torch.no_grad()
def reference_greedy(
    model: Any,  # noqa: ANN401 - transformers' class
    token_ids: Sequence[int],
    num_tokens: int,
    *,
    eos_token_ids: Sequence[int] = (),
) -> list[int]:
    """Returns the greedy continuation, ending after `num_tokens` or with the first end token.

    A plain loop over transformers' forward with its own KV cache: nothing of `generate`'s
    defaults (sampling, repetition penalties, lengths) can come in between.
    """
    from transformers import DynamicCache

    # Newer releases renamed the argument and warn about the old name.
    named = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    cache = {named: DynamicCache(config=model.config)}
    output: list[int] = []
    step = torch.tensor([list(token_ids)])
    while len(output) < num_tokens:
        logits = model(input_ids=step, use_cache=True, **cache).logits
        token = int(logits[0, -1].argmax())
        output.append(token)
        if token in eos_token_ids:
            break
        step = torch.tensor([[token]])
    return output
