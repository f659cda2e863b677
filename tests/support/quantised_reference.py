"""transformers with a KV cache rounded to fp8, in fp64: the oracle of engines with such a cache."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

Scales = tuple[tuple[float, float], ...]


def fake_quantised(x: Tensor, scale: float) -> Tensor:
    """What an fp8 cache gives back for x: the nearest e4m3 of x / scale, times scale."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def make_cache(model: Any, scales: Scales) -> dict[str, Any]:  # noqa: ANN401 - transformers' class
    """Makes transformers' cache as an argument of its models; it rounds whatever enters it."""
    from transformers import DynamicCache

    class QuantisedCache(DynamicCache):
        def update(
            self,
            key_states: Tensor,
            value_states: Tensor,
            layer_idx: int,
            *args: Any,  # noqa: ANN401
            **kwargs: Any,  # noqa: ANN401
        ) -> tuple[Tensor, Tensor]:
            k_scale, v_scale = scales[layer_idx]
            keys, values = super().update(
                fake_quantised(key_states, k_scale),
                fake_quantised(value_states, v_scale),
                layer_idx,
                *args,
                **kwargs,
            )
            return keys, values

    # Newer releases renamed the argument and warn about the old name.
    named = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    return {named: QuantisedCache(config=model.config)}


@torch.no_grad()
def quantised_logits(
    model: Any,  # noqa: ANN401 - transformers' class
    token_ids: Sequence[int],
    scales: Scales,
) -> Tensor:
    """Logits of a prompt, [num_tokens, vocab_size] fp64; the model must be in fp64."""
    step = torch.tensor([list(token_ids)])
    logits: Tensor = model(input_ids=step, use_cache=True, **make_cache(model, scales)).logits[0]
    return logits


@torch.no_grad()
def quantised_greedy(
    model: Any,  # noqa: ANN401 - transformers' class
    token_ids: Sequence[int],
    num_tokens: int,
    scales: Scales,
) -> tuple[list[int], float]:
    """The greedy continuation, and how far ahead the chosen token was where that was least."""
    cache, output, margin = make_cache(model, scales), [], float("inf")
    step = torch.tensor([list(token_ids)])
    for _ in range(num_tokens):
        logits = model(input_ids=step, use_cache=True, **cache).logits[0, -1]
        best = logits.topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        output.append(int(best.indices[0]))
        step = torch.tensor([output[-1:]])
    return output, margin


def store_scales(path: Path, scales: Scales, name: str = "attn.{kind}_scale") -> None:
    """Adds scales to a checkpoint of one file, under names as calibration tools choose them."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for layer, pair in enumerate(scales):
        for kind, scale in zip("kv", pair, strict=True):
            place = f"model.layers.{layer}.self_attn.{name.format(kind=kind)}"
            tensors[place] = torch.tensor(scale)
    save_file(tensors, file)
