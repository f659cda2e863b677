"""Norm, rotation and cache write of a fused projection on a CPU, in few operators.

The reference spends most of its time between operators. Here query and key heads are normalised and
rotated together, and what is the same for every layer of a step is worked out once: cosines, sines
and the places in the cache. For 8 rows of SmolLM2-135M on one core of an EPYC that takes 40 instead
of 80 µs, half of which are the checks of the op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from nv_kernels.cpu.cache_rows import is_dense, row_numbers, rows_in_memory
from nv_kernels.reference.rms_norm import rms_norm
from nv_kernels.reference.store_kv import as_stored

if TYPE_CHECKING:
    from torch import Tensor


_PLAN = "rotation on a CPU"


class RotationPlan(NamedTuple):
    """What the layers of a step have in common.

    Attributes:
        layout: Shape and strides of the caches that the rows are for.
        cos: Cosines of both halves of a head, [num_tokens, 1, head_dim], dtype of the projection.
        sin: Sines of both halves, those of the first half negative.
        stored: Tokens that have a slot, [num_stored] int64; None for all.
        key_rows: Where their key heads go, rows of the cache's memory, [num_stored * num_kv_heads].
        value_rows: The same for values.
    """

    layout: tuple[tuple[int, ...], ...]
    cos: Tensor
    sin: Tensor
    stored: Tensor | None
    key_rows: Tensor
    value_rows: Tensor


def plan_rotation(
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    dtype: torch.dtype,
    derived: dict[str, object],
) -> RotationPlan | None:
    """Works out what `rotate_and_store` needs for a projection of some dtype.

    What `derived` holds of it already is taken from there.

    Returns:
        None if the caches do not lie on a CPU, each in one run of memory.
    """
    layout = (tuple(key_cache.shape), key_cache.stride(), value_cache.stride())
    plan = cast("RotationPlan | None", derived.get(_PLAN))
    if plan is not None and plan.layout == layout:
        return plan
    if key_cache.device.type != "cpu" or not (is_dense(key_cache) and is_dense(value_cache)):
        return None
    # Like the reference, cosine and sine are rounded before they are used.
    table = cos_sin_cache.index_select(0, positions).to(dtype)
    cos, sin = table.unsqueeze(1).chunk(2, dim=-1)
    slots, stored = slot_mapping.long(), None
    if bool((slots < 0).any()):
        stored = (slots >= 0).nonzero()[:, 0]
        slots = slots[stored]
    blocks, offsets = slots // key_cache.shape[1], slots % key_cache.shape[1]
    plan = RotationPlan(
        layout=layout,
        cos=torch.cat((cos, cos), dim=-1),
        sin=torch.cat((-sin, sin), dim=-1),
        stored=stored,
        key_rows=row_numbers(key_cache, blocks, offsets).flatten(),
        value_rows=row_numbers(value_cache, blocks, offsets).flatten(),
    )
    derived[_PLAN] = plan
    return plan


def rotate_and_store(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: RotationPlan,
    *,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    k_scale: float,
    v_scale: float,
) -> Tensor:
    """Implements `nv_kernels.ops.rotate_and_store` with what `plan_rotation` worked out."""
    num_kv_heads, head_dim = key_cache.shape[2:]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    heads, value = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
    if query_weight is not None and key_weight is not None:
        weights = query_weight.expand(num_heads, -1), key_weight.expand(num_kv_heads, -1)
        heads = rms_norm(heads, torch.cat(weights), eps=eps)
    rotated = (heads * plan.cos).addcmul_(heads.roll(head_dim // 2, dims=-1), plan.sin)
    key = rotated[:, num_heads:]
    if plan.stored is not None:
        key, value = key[plan.stored], value[plan.stored]
    for rows, x, cache, scale in (
        (plan.key_rows, key, key_cache, k_scale),
        (plan.value_rows, value, value_cache, v_scale),
    ):
        stored, target = as_stored(x.reshape(-1, head_dim), cache, scale)
        rows_in_memory(target).index_copy_(0, rows, stored)
    return rotated[:, :num_heads].contiguous()
