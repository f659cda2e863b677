"""ModelShape: the numbers of a decoder that decide what a step costs and what memory holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from nv_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Widths and depths of a dense decoder.

    Attributes:
        name: What it is called.
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the gated MLP.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_dim: Elements of a head.
        vocab_size: Token ids.
        tie_word_embeddings: Whether the LM head is the embedding.
        dtype_bytes: Bytes of an element of weights and activations.
        kv_dtype_bytes: Bytes of an element of the KV cache; None for as many.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False
    dtype_bytes: int = 2
    kv_dtype_bytes: int | None = None

    def __post_init__(self) -> None:
        """Checks every size."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "kv_dtype_bytes" and value is None:
                continue
            if field.name not in ("name", "tie_word_embeddings") and (
                not isinstance(value, int) or value < 1
            ):
                raise ConfigError(f"{field.name} must be an integer of at least 1, got {value!r}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, name: str = "model") -> ModelShape:
        """Reads a `config.json` in the Hugging Face form.

        Args:
            config: Its content.
            name: What to call the model.

        Raises:
            ConfigError: A size is missing.
        """
        try:
            num_heads = config["num_attention_heads"]
            hidden_size = config["hidden_size"]
            return cls(
                name=name,
                num_layers=config["num_hidden_layers"],
                hidden_size=hidden_size,
                intermediate_size=config["intermediate_size"],
                num_heads=num_heads,
                num_kv_heads=config.get("num_key_value_heads") or num_heads,
                head_dim=config.get("head_dim") or hidden_size // num_heads,
                vocab_size=config["vocab_size"],
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            )
        except KeyError as error:
            raise ConfigError(f"the model's config has no {error.args[0]!r}") from error

    @classmethod
    def from_header(cls, fields: Mapping[str, Any] | None) -> ModelShape | None:
        """Reads what a step log's header holds; None if that is no shape.

        Raises:
            ConfigError: A size is missing or unknown.
        """
        if not fields or "num_layers" not in fields:
            return None
        try:
            return cls(**fields)
        except TypeError as error:
            raise ConfigError(f"the log's header holds no model: {error}") from error

    def check_ranks(self, tensor_parallel_size: int) -> None:
        """Checks that so many GPUs can share it, by the engine's rules.

        Query heads and the MLP's width must divide; key/value heads must divide, or be shared by
        as many neighbouring ranks each.

        Raises:
            ConfigError: A count does not divide; the message names every such count.
        """
        size = tensor_parallel_size
        if size < 1:
            raise ConfigError(f"tensor_parallel_size must be at least 1, got {size!r}")
        problems = [
            f"{name} = {count} is not a multiple of it"
            for name, count in (
                ("num_heads", self.num_heads),
                ("intermediate_size", self.intermediate_size),
            )
            if count % size
        ]
        if self.num_kv_heads % size and size % self.num_kv_heads:
            problems.append(
                f"num_kv_heads = {self.num_kv_heads} is neither a multiple nor a divisor of it"
            )
        if problems:
            raise ConfigError(
                f"tensor_parallel_size = {size} cannot share {self.name}: {'; '.join(problems)}"
            )

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields, as a step log's header holds them."""
        return asdict(self)

    @property
    def num_matmul_parameters(self) -> int:
        """Weights of all layers that every token is multiplied with; the LM head not counted."""
        query = self.num_heads * self.head_dim
        key = self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (query + 2 * key) + query * self.hidden_size
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_head_parameters(self) -> int:
        """Weights of the LM head, with which only sampled tokens are multiplied."""
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        """All weights, norms left out (they are less than a thousandth)."""
        embeddings = self.num_head_parameters * (1 if self.tie_word_embeddings else 2)
        return self.num_matmul_parameters + embeddings

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.num_parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token takes in all layers."""
        return self.kv_bytes_per_token_on(1)

    def kv_bytes_per_token_on(self, tensor_parallel_size: int) -> int:
        """The same on several GPUs together, each of which keeps one key/value head at least."""
        num_heads = max(self.num_kv_heads, tensor_parallel_size)
        elements = 2 * self.num_layers * num_heads * self.head_dim
        return elements * (self.kv_dtype_bytes or self.dtype_bytes)


def _qwen3(
    name: str, layers: int, hidden: int, intermediate: int, heads: int, *, tied: bool
) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=tied,
    )


def _llama3(
    name: str,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    *,
    head_dim: int = 128,
    tied: bool = False,
) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        vocab_size=128256,
        tie_word_embeddings=tied,
    )


MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _qwen3("qwen3-0.6b", 28, 1024, 3072, 16, tied=True),
        _qwen3("qwen3-1.7b", 28, 2048, 6144, 16, tied=True),
        _qwen3("qwen3-4b", 36, 2560, 9728, 32, tied=True),
        _qwen3("qwen3-8b", 36, 4096, 12288, 32, tied=False),
        _qwen3("qwen3-14b", 40, 5120, 17408, 40, tied=False),
        _qwen3("qwen3-32b", 64, 5120, 25600, 64, tied=False),
        _llama3("llama-3.2-1b", 16, 2048, 8192, 32, head_dim=64, tied=True),
        _llama3("llama-3.2-3b", 28, 3072, 8192, 24, tied=True),
        _llama3("llama-3-8b", 32, 4096, 14336, 32),
        _llama3("llama-3-70b", 80, 8192, 28672, 64),
    )
}
"""Shapes of published models by name, in bfloat16; sizes from their `config.json`."""


def find_model(name: str) -> ModelShape:
    """Returns the shape of that name.

    Raises:
        ConfigError: There is none.
    """
    if name.lower() not in MODELS:
        raise ConfigError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name.lower()]
