"""What the stand-ins for the flash-attn packages share: the formula, and how they are put in place.

The packages need a GPU; `test_attention.py` runs them where they exist.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest
    from torch import Tensor


def attend_one(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool
) -> Tensor:
    """Attends with [num_queries, num_heads, head_dim] from the end of one sequence, in fp64."""
    group = query.shape[1] // keys.shape[1]
    wide_keys = keys.double().repeat_interleave(group, dim=1)
    wide_values = values.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), wide_keys) * scale
    if causal:
        visible = torch.ones_like(scores[0], dtype=torch.bool)
        scores.masked_fill_(~visible.tril(len(keys) - len(query)), float("-inf"))
    weights = scores.softmax(dim=-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, wide_values).to(query.dtype)


def gather(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    return cache[blocks.clamp(min=0).long()].flatten(0, 1)[:length]


def check_call(query: Tensor, key: Tensor, value: Tensor, *indices: Tensor) -> None:
    """Demands of dtypes and strides what both packages demand."""
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.dtype == key.dtype == value.dtype
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert key.dim() == 4
    assert all(index.dtype == torch.int32 for index in indices)
    assert all(index.is_contiguous() for index in indices if index.dim() == 1)
    assert all(index.stride(-1) == 1 for index in indices)


def put_in_place(
    monkeypatch: pytest.MonkeyPatch, module: str, *functions: Callable[..., Tensor]
) -> list[str]:
    """Makes functions importable from a module; returns a list that their calls will grow."""
    names: list[str] = []

    def recorded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: object, **kwargs: object) -> Tensor:
            names.append(function.__name__)
            return function(*args, **kwargs)

        return call

    package = types.ModuleType(module)
    for function in functions:
        setattr(package, function.__name__, recorded(function))
    monkeypatch.setitem(sys.modules, module, package)
    return names
