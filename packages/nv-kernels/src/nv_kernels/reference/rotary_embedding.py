"""Rotary position embedding in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def rotary_embedding(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor
) -> tuple[Tensor, Tensor]:
    """Implements `nv_kernels.ops.rotary_embedding.rotary_embedding`.

    Like transformers, cosine and sine are rounded to the dtype of the query before they are used.
    """
    rows = cos_sin_cache.index_select(0, positions).to(query.dtype).unsqueeze(1)
    cos, sin = rows.chunk(2, dim=-1)  # each [num_tokens, 1, rotary_dim / 2]
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    return rotated.contiguous()
