"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.checks import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    check_last_dim_contiguous,
    check_tensor,
)
from nv_kernels.dispatch import choose_implementation
from nv_kernels.errors import KernelInputError
from nv_kernels.reference.rotary_embedding import rotary_embedding as rotary_embedding_reference

if TYPE_CHECKING:
    from torch import Tensor


def rotary_embedding(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Rotates pairs of dimensions of each head by angles that grow with the token's position.

    Dimension i is paired with dimension i + rotary_dim / 2 ("half rotation", the convention of
    transformers); dimensions from rotary_dim on pass unchanged. The PyTorch implementation rounds
    cosine and sine to the dtype of `query` first, as transformers does; the Triton kernel rounds
    only the result.

    Args:
        query: [num_tokens, num_heads, head_dim], fp32, fp16 or bf16; not changed. Any strides but
            a contiguous last dimension, so a slice of a fused projection will do.
        key: [num_tokens, num_kv_heads, head_dim], dtype of `query`, strides of its own; not
            changed.
        positions: Position of each token, [num_tokens] int32 or int64, from 0 to
            max_position - 1. The values are not checked.
        cos_sin_cache: For each position the rotary_dim / 2 cosines, then as many sines,
            [max_position, rotary_dim] fp32 with contiguous rows; rotary_dim <= head_dim.
        backend: "auto", "torch" or "triton".

    Returns:
        The rotated query and key, new contiguous tensors.

    Raises:
        KernelInputError: A shape, dtype, device or stride disagrees.

    Source: "RoFormer" (arXiv:2104.09864).
    """
    check_tensor(
        "query", query, "[num_tokens, num_heads, head_dim]", [None] * 3, dtypes=FLOAT_DTYPES
    )
    num_tokens, _, head_dim = query.shape
    dtypes, device = (query.dtype,), query.device
    key_layout = "[num_tokens, num_kv_heads, head_dim]"
    key_sizes = [num_tokens, None, head_dim]
    check_tensor("key", key, key_layout, key_sizes, dtypes=dtypes, device=device)
    check_tensor(
        "positions", positions, "[num_tokens]", [num_tokens], dtypes=INDEX_DTYPES, device=device
    )
    check_tensor(
        "cos_sin_cache",
        cos_sin_cache,
        "[max_position, rotary_dim]",
        [None, None],
        dtypes=(torch.float32,),
        device=device,
    )
    rotary_dim = cos_sin_cache.shape[1]
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise KernelInputError(
            f"cos_sin_cache has a rotary_dim of {rotary_dim}, but it must be even and from 2 to "
            f"the head_dim of {head_dim}. Build the cache with half as many frequencies as "
            "dimensions to rotate."
        )
    check_last_dim_contiguous("query", query)
    check_last_dim_contiguous("key", key)
    check_last_dim_contiguous("positions", positions)
    check_last_dim_contiguous("cos_sin_cache", cos_sin_cache)
    if choose_implementation(backend, device) == "triton":
        from nv_kernels.triton.rotary_embedding import rotary_embedding as rotary_embedding_triton

        return rotary_embedding_triton(query, key, positions, cos_sin_cache)
    return rotary_embedding_reference(query, key, positions, cos_sin_cache)
