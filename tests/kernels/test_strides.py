"""Every op refuses what is no tensor, and what its contract wants contiguous and is not.

A kernel would read other elements of the latter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from nv_kernels import (
    AttentionMetadata,
    FreshKV,
    KernelInputError,
    LayerKVCache,
    LogitAdjustments,
    StateColumns,
    add_rms_norm,
    advance_decode_state,
    linear,
    linear_parts,
    paged_attention,
    read_decode_state,
    rms_norm,
    rotary_embedding,
    rotate_and_store,
    sample_shard,
    sample_tokens,
    store_kv,
    token_logprobs,
)

if TYPE_CHECKING:
    from collections.abc import Callable

IDS = torch.zeros(2, dtype=torch.int64)
INT32 = torch.zeros(2, dtype=torch.int32)
HEADS = torch.zeros(2, 1, 8)
CACHE = torch.zeros(3, 4, 1, 8)
DRAW: dict[str, Any] = {"temperatures": torch.ones(2), "seeds": IDS, "positions": IDS}
COLUMNS = StateColumns(0, 1, 2, 3)
ROWS = torch.zeros(3, 6, dtype=torch.int32)


def draw_adjusted(**tables: Tensor) -> Tensor:
    adjustments = LogitAdjustments(INT32, **tables)
    return sample_tokens(torch.zeros(2, 64), **DRAW, adjustments=adjustments)


def attend(query: Tensor, **parts: Tensor) -> Tensor:
    metadata = AttentionMetadata.from_lists([2], [2], [[1]], block_size=4)
    cache = LayerKVCache(parts["kv_cache.key"], parts["kv_cache.value"])
    fresh = FreshKV(parts["fresh.key"], parts["fresh.value"])
    return paged_attention(query, cache, metadata, scale=1.0, fresh=fresh)


# For each op the tensors whose last dimension must be contiguous, and what else it takes.
OPS: list[tuple[Callable[..., object], dict[str, Tensor], dict[str, Any]]] = [
    (rms_norm, {"weight": torch.ones(8)}, {"x": HEADS, "eps": 0.0}),
    (add_rms_norm, {"weight": torch.ones(8)}, {"x": HEADS, "residual": HEADS, "eps": 0.0}),
    (
        linear,
        {"x": torch.zeros(2, 8), "weight": torch.zeros(3, 8), "bias": torch.zeros(3)},
        {},
    ),
    (linear_parts, {"x": torch.zeros(2, 8), "weight": torch.zeros(3, 8)}, {}),
    (
        rotary_embedding,
        {"query": HEADS, "key": HEADS, "positions": IDS, "cos_sin_cache": torch.zeros(4, 8)},
        {},
    ),
    (
        store_kv,
        {
            "key": HEADS,
            "value": HEADS,
            "key_cache": CACHE,
            "value_cache": CACHE,
            "slot_mapping": INT32,
        },
        {},
    ),
    (
        rotate_and_store,
        {
            "qkv": torch.zeros(2, 3, 8),
            "positions": IDS,
            "cos_sin_cache": torch.zeros(4, 8),
            "key_cache": CACHE,
            "value_cache": CACHE,
            "slot_mapping": INT32,
            "query_weight": torch.ones(8),
            "key_weight": torch.ones(8),
        },
        {},
    ),
    (
        attend,
        {
            "query": HEADS,
            "kv_cache.key": CACHE,
            "kv_cache.value": CACHE,
            "fresh.key": HEADS,
            "fresh.value": HEADS,
        },
        {},
    ),
    (sample_tokens, {"logits": torch.zeros(2, 64)}, DRAW),
    (sample_shard, {"logits": torch.zeros(2, 64)}, {**DRAW, "first_token": 0}),
    (
        draw_adjusted,
        {
            "allowed_mask": torch.full((2, 2), -1, dtype=torch.int32),
            "logit_bias": torch.zeros(2, 64),
            "token_counts": torch.zeros(2, 64, dtype=torch.int32),
            "penalties": torch.ones(2, 3),
        },
        {},
    ),
    (token_logprobs, {"logits": torch.zeros(2, 64)}, {"token_ids": IDS, "num_top": 3}),
    (
        read_decode_state,
        {"rows": ROWS, "batch": INT32},
        {"columns": COLUMNS, "width": 5, "block_size": 4},
    ),
    (
        advance_decode_state,
        {"rows": ROWS, "batch": INT32, "token_ids": IDS},
        {"columns": COLUMNS, "advances_length": True},
    ),
]
CASES = [
    pytest.param(op, tensors, others, name, id=f"{op.__name__}-{name}")
    for op, tensors, others in OPS
    for name in tensors
]


@pytest.mark.parametrize(("op", "tensors", "others", "name"), CASES)
def test_a_strided_last_dimension_is_refused(
    op: Callable[..., object], tensors: dict[str, Tensor], others: dict[str, Any], name: str
) -> None:
    taken = {key: tensor.clone() for key, tensor in tensors.items()}
    op(**taken, **others)
    taken[name] = torch.stack((taken[name],) * 2, dim=-1)[..., 0]
    assert taken[name].stride(-1) == 2
    with pytest.raises(KernelInputError, match=rf"{name} has stride 2 in its last dimension"):
        op(**taken, **others)


@pytest.mark.parametrize(("op", "tensors", "others", "name"), CASES)
def test_what_is_no_tensor_is_refused(
    op: Callable[..., object], tensors: dict[str, Tensor], others: dict[str, Any], name: str
) -> None:
    for value in ([0, 1], "x", 1.5, tensors[name].numpy()):
        with pytest.raises(KernelInputError, match=rf"{name} is .*, but must be a tensor"):
            op(**{**tensors, name: value}, **others)
