"""The architectures this package computes, and what tells them apart.

All of them are one decoder (`decoder.py`): what differs is data. To add one of the same kind, add
an entry here, and a family to `tests/support/tiny_checkpoints.py`, whose models the tests compare
with transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nv_models.errors import UnsupportedModelError

SlidingWindowRule = Literal["never", "when_switched_on", "when_set"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What one architecture adds to the common decoder, and how its config.json is read.

    The defaults are those that transformers' configuration class of this architecture fills in for
    a missing field.
    """

    name: str
    """As in `architectures` of config.json."""
    model_type: str
    """As in `model_type` of config.json."""
    gguf_name: str
    """As in `general.architecture` of a GGUF file."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head before they are rotated."""
    always_has_qkv_bias: bool = False
    """Whether q, k and v have biases whatever config.json says."""
    reads_attention_bias: bool = False
    """Whether `attention_bias` gives q, k, v and o biases."""
    reads_mlp_bias: bool = False
    """Whether `mlp_bias` gives the MLP biases."""
    default_head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    default_num_kv_heads: int | None = None
    """None: num_attention_heads."""
    sliding_window: SlidingWindowRule = "never"
    """When `sliding_window` takes effect: never, with `use_sliding_window`, or whenever set."""
    gguf_interleaves_qk: bool = False
    """Whether GGUF files hold q and k with the two halves of each head interleaved."""


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        name="Qwen3ForCausalLM",
        model_type="qwen3",
        gguf_name="qwen3",
        qk_norm=True,
        reads_attention_bias=True,
        default_head_dim=128,
        default_num_kv_heads=32,
        sliding_window="when_switched_on",
    ),
    Architecture(
        name="Qwen2ForCausalLM",
        model_type="qwen2",
        gguf_name="qwen2",
        always_has_qkv_bias=True,
        default_num_kv_heads=32,
        sliding_window="when_switched_on",
    ),
    Architecture(
        name="LlamaForCausalLM",
        model_type="llama",
        gguf_name="llama",
        reads_attention_bias=True,
        reads_mlp_bias=True,
        gguf_interleaves_qk=True,
    ),
    # GGUF files of Mistral models say "llama", which computes the same.
    Architecture(
        name="MistralForCausalLM",
        model_type="mistral",
        gguf_name="llama",
        default_num_kv_heads=8,
        sliding_window="when_set",
        gguf_interleaves_qk=True,
    ),
)


def find_architecture(name: str) -> Architecture:
    """Returns the architecture of a name as in `architectures` of config.json.

    Raises:
        UnsupportedModelError: No such architecture here.
    """
    for architecture in ARCHITECTURES:
        if architecture.name == name:
            return architecture
    raise _unsupported("architecture", name, [a.name for a in ARCHITECTURES])


def find_architecture_of_model_type(model_type: str) -> Architecture:
    """Returns the architecture of a `model_type`, for a config.json without `architectures`.

    Raises:
        UnsupportedModelError: No such architecture here.
    """
    for architecture in ARCHITECTURES:
        if architecture.model_type == model_type:
            return architecture
    raise _unsupported("model_type", model_type, [a.model_type for a in ARCHITECTURES])


def find_gguf_architecture(gguf_name: str) -> Architecture:
    """Returns the architecture of a `general.architecture` in GGUF metadata.

    Raises:
        UnsupportedModelError: No such architecture here.
    """
    for architecture in ARCHITECTURES:
        if architecture.gguf_name == gguf_name:
            return architecture
    names = list(dict.fromkeys(a.gguf_name for a in ARCHITECTURES))
    raise _unsupported("GGUF architecture", gguf_name, names)


def _unsupported(kind: str, name: str, supported: list[str]) -> UnsupportedModelError:
    experts = "moe" in name.lower() or "mixtral" in name.lower()
    reason = " (a mixture of experts)" if experts else ""
    return UnsupportedModelError(
        f"{kind} {name!r}{reason} is not supported; supported are {', '.join(supported)}"
    )
