"""From a fused projection to rotated queries and a written cache, in one step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from nv_kernels.checks import (
    INDEX_DTYPES,
    check_bool,
    check_eps,
    check_last_dim_contiguous,
    check_tensor,
)
from nv_kernels.cpu.rotate_and_store import plan_rotation
from nv_kernels.cpu.rotate_and_store import rotate_and_store as rotate_and_store_cpu
from nv_kernels.dispatch import choose_implementation
from nv_kernels.errors import KernelInputError
from nv_kernels.kv_quantisation import CACHE_DTYPES, check_scales, stored_dtypes
from nv_kernels.reference.rotate_and_store import rotate_and_store as rotate_and_store_reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    derived: dict[str, object] | None = None,
    is_settled: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Normalises and rotates query and key heads, and stores keys and values in the cache.

    The same as `rms_norm` on query and key (where weights are given), `rotary_embedding`, and
    `store_kv`, in this order, with one read and one write of each element.

    Args:
        qkv: Query, then key, then value heads of each token, [num_tokens, num_heads + 2 *
            num_kv_heads, head_dim], fp32, fp16 or bf16; not changed. Any strides but a contiguous
            last dimension.
        positions: Position of each token, [num_tokens] int32 or int64, each below max_position.
            The values are not checked.
        cos_sin_cache: For each position head_dim / 2 cosines, then as many sines,
            [max_position, head_dim] fp32 with contiguous rows.
        key_cache: One layer's keys, [num_blocks, block_size, num_kv_heads, head_dim], head_dim
            even, dtype of `qkv` or float8_e4m3fn, any strides but a contiguous last dimension.
            Changed in place, at the slots and nowhere else.
        value_cache: One layer's values, same shape and dtype, strides of its own; changed too.
        slot_mapping: Target slot of each token, [num_tokens] int32 or int64; -1 means "do not
            store". No slot may appear twice. The values are not checked.
        query_weight: Weight of the query heads' norm, [head_dim], dtype of `qkv`; None for none.
            On Hopper it is read while the kernel launched before may still run, so that kernel must
            not be what writes it.
        key_weight: Weight of the key heads' norm, read alike; given exactly if `query_weight` is.
        eps: Added to the mean square; used with weights only.
        k_scale: For an fp8 cache, see `store_kv`. Keys are rounded to the dtype of `qkv` first, as
            the three ops do it.
        v_scale: The same for values.
        derived: Where what all layers of a step have in common is kept, such as
            `AttentionMetadata.derived`: calls that share one must share `positions`,
            `cos_sin_cache`, `slot_mapping` and the dtype. None keeps nothing.
        is_settled: Whether the kernel that is launched directly before writes none of `positions`,
            `cos_sin_cache` and `slot_mapping`, as `AttentionMetadata.is_settled` says it of its own
            tensors. They may then be read before that kernel has ended.
        backend: "auto", "torch" or "triton". On a CPU, "auto" is faster than "torch".

    Returns:
        The normalised and rotated queries, a new contiguous tensor,
        [num_tokens, num_heads, head_dim].

    Raises:
        KernelInputError: A shape, dtype, device or stride disagrees, or a scale, `eps` or flag is
            not allowed.

    Source: see the three ops that it joins.
    """
    cache_layout = "[num_blocks, block_size, num_kv_heads, head_dim]"
    check_tensor("key_cache", key_cache, cache_layout, [None] * 4, dtypes=CACHE_DTYPES)
    dtypes, device = (key_cache.dtype,), key_cache.device
    check_tensor(
        "value_cache", value_cache, cache_layout, key_cache.shape, dtypes=dtypes, device=device
    )
    check_scales(key_cache.dtype, k_scale, v_scale)
    num_kv_heads, head_dim = key_cache.shape[2:]
    if head_dim % 2 or head_dim == 0:
        raise KernelInputError(
            f"key_cache has head_dim {head_dim}, but it must be even, and at least 2: dimensions "
            "are rotated in pairs. Pad the heads with zeros."
        )
    layout = "[num_tokens, num_heads + 2 * num_kv_heads, head_dim]"
    check_tensor(
        "qkv",
        qkv,
        layout,
        [None, None, head_dim],
        dtypes=stored_dtypes(key_cache.dtype),
        device=device,
    )
    num_tokens, num_all_heads = qkv.shape[:2]
    if num_all_heads <= 2 * num_kv_heads:
        raise KernelInputError(
            f"qkv has {num_all_heads} heads, but must have more than 2 * num_kv_heads = "
            f"{2 * num_kv_heads}: query, key and value heads. Pass the whole projection."
        )
    for name, indices in (("positions", positions), ("slot_mapping", slot_mapping)):
        check_tensor(
            name, indices, "[num_tokens]", [num_tokens], dtypes=INDEX_DTYPES, device=device
        )
        check_last_dim_contiguous(name, indices)
    check_tensor(
        "cos_sin_cache",
        cos_sin_cache,
        "[max_position, head_dim]",
        [None, head_dim],
        dtypes=(torch.float32,),
        device=device,
    )
    if (query_weight is None) != (key_weight is None):
        raise KernelInputError(
            "query_weight and key_weight must be given together: both heads are normalised, or none"
        )
    for name, weight in (("query_weight", query_weight), ("key_weight", key_weight)):
        if weight is not None:
            check_tensor(name, weight, "[head_dim]", [head_dim], dtypes=(qkv.dtype,), device=device)
            check_last_dim_contiguous(name, weight)
    for name, tensor in (
        ("qkv", qkv),
        ("cos_sin_cache", cos_sin_cache),
        ("key_cache", key_cache),
        ("value_cache", value_cache),
    ):
        check_last_dim_contiguous(name, tensor)
    check_eps(eps)
    check_bool("is_settled", is_settled)
    if derived is not None and not isinstance(derived, dict):
        raise KernelInputError(
            f"derived is {derived!r}, but must be a dict or None. Pass AttentionMetadata.derived."
        )
    if backend == "auto" and device.type == "cpu":
        plan = plan_rotation(
            positions,
            cos_sin_cache,
            key_cache,
            value_cache,
            slot_mapping,
            dtype=qkv.dtype,
            derived={} if derived is None else derived,
        )
        if plan is not None:
            return rotate_and_store_cpu(
                qkv,
                key_cache,
                value_cache,
                plan,
                query_weight=query_weight,
                key_weight=key_weight,
                eps=eps,
                k_scale=k_scale,
                v_scale=v_scale,
            )
    run: Callable[..., Tensor] = rotate_and_store_reference
    if choose_implementation(backend, device) == "triton":
        from nv_kernels.triton.rotate_and_store import rotate_and_store as rotate_and_store_triton

        run = partial(rotate_and_store_triton, is_settled=is_settled)
    return run(
        qkv,
        positions,
        cos_sin_cache,
        key_cache,
        value_cache,
        slot_mapping,
        query_weight=query_weight,
        key_weight=key_weight,
        eps=eps,
        k_scale=k_scale,
        v_scale=v_scale,
    )
