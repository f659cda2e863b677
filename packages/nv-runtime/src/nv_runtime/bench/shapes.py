"""Models by name with random weights: speed needs the shapes, and nothing has to be downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}


def _qwen3(
    hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool
) -> dict[str, Any]:
    return {
        **_QWEN3,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-tiny": {
        **_qwen3(64, 128, 2, 4, tied=True),
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 16384,
        "eos_token_id": 1,
    },
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
}
"""Name -> config.json of the published model; `qwen3-tiny` is none, and for trying things out."""


@contextmanager
def materialised(model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Turns the name of a shape into a checkpoint that exists as long as the context is open.

    Args:
        model: Name of a shape, or any other model, which is left alone.

    Yields:
        The model for `LLM(...)`, and options that it needs: random weights and no tokenizer for a
        shape, none otherwise.
    """
    if model not in SHAPES:
        yield model, {}
        return
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[model]))
        yield folder, {"load_format": "dummy", "skip_tokenizer_init": True}
