"""store_kv against a loop over tokens, bit for bit, in caches of every layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_oracles import (
    LAYOUTS,
    Target,
    assert_same_bits,
    cache_of_heads_apart,
    empty_cache,
    random_tensor,
    targets,
)
from nv_kernels import KernelInputError, store_kv


def expected_cache(cache: Tensor, rows: Tensor, slots: list[int]) -> Tensor:
    expected = cache.clone()
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            expected[slot // cache.shape[1], slot % cache.shape[1]] = row
    return expected


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "block_size"),
    [(1, 8, 1), (3, 40, 7), (8, 128, 16), (5, 24, 256)],
)
def test_only_the_slots_change(
    target: Target, layout: str, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    num_blocks = 6
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    key_cache = empty_cache(*shape, layout, target)
    value_cache = empty_cache(*shape, "contiguous", target)
    slots = [num_blocks * block_size - 1, -1, 0, block_size, -1]
    key = random_tensor(1, len(slots), num_kv_heads, head_dim, target=target)
    value = random_tensor(2, len(slots), num_kv_heads, head_dim, target=target)
    expected = [
        expected_cache(key_cache, key, slots),
        expected_cache(value_cache, value, slots),
    ]
    slot_mapping = torch.tensor(slots, dtype=torch.int32, device=target.device)

    store_kv(key, value, key_cache, value_cache, slot_mapping, backend=target.backend)

    assert_same_bits(key_cache, expected[0])
    assert_same_bits(value_cache, expected[1])
    # What lies between the slots in memory (the other half of a stacked cache, say) is unchanged.
    storage_elements = key_cache.untyped_storage().nbytes() // key_cache.element_size()
    num_written = (len(slots) - slots.count(-1)) * num_kv_heads * head_dim
    whole = key_cache.as_strided((storage_elements,), (1,), storage_offset=0)
    assert int((~whole.isnan()).sum()) == num_written


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_slices_of_a_fused_projection(target: Target, index_dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, head_dim = 4, 2, 24
    qkv = random_tensor(3, 5, (num_heads + 2 * num_kv_heads) * head_dim, target=target)
    heads = qkv.view(5, -1, head_dim)
    key, value = heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
    assert not key.is_contiguous()
    before = qkv.clone()
    caches = [empty_cache(3, 4, num_kv_heads, head_dim, "contiguous", target) for _ in range(2)]
    slots = [11, 2, -1, 7, 0]
    expected = [
        expected_cache(cache, rows, slots) for cache, rows in zip(caches, (key, value), strict=True)
    ]
    slot_mapping = torch.tensor(slots, dtype=index_dtype, device=target.device)

    store_kv(key, value, caches[0], caches[1], slot_mapping, backend=target.backend)

    for cache, want in zip(caches, expected, strict=True):
        assert_same_bits(cache, want)
    assert_same_bits(qkv, before)


@pytest.mark.parametrize("target", targets())
def test_key_and_value_have_strides_of_their_own(target: Target) -> None:
    key = random_tensor(7, 2, 3, 16, target=target).transpose(0, 1)
    value = random_tensor(8, 3, 4, 20, target=target)[:, ::2, :16]
    caches = [empty_cache(2, 4, 2, 16, layout, target) for layout in ("head_major", "padded")]
    slots = [6, 0, 3]
    expected = [
        expected_cache(cache, rows, slots) for cache, rows in zip(caches, (key, value), strict=True)
    ]
    slot_mapping = torch.tensor(slots, dtype=torch.int32, device=target.device)
    store_kv(key, value, caches[0], caches[1], slot_mapping, backend=target.backend)
    for cache, want in zip(caches, expected, strict=True):
        assert_same_bits(cache, want)


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("slots", [[], [-1, -1]])
def test_nothing_to_store(target: Target, slots: list[int]) -> None:
    caches = [empty_cache(2, 4, 2, 8, "contiguous", target) for _ in range(2)]
    rows = random_tensor(4, len(slots), 2, 8, target=target)
    slot_mapping = torch.tensor(slots, dtype=torch.int32, device=target.device)
    store_kv(rows, rows, caches[0], caches[1], slot_mapping, backend=target.backend)
    assert all(bool(cache.isnan().all()) for cache in caches)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pool_of_more_elements_than_int32_counts() -> None:
    target = Target("triton", "cuda", torch.bfloat16)
    block_size, num_kv_heads, head_dim = 16, 8, 128
    num_blocks = 2**31 // (block_size * num_kv_heads * head_dim) + 2
    cache = torch.zeros(
        num_blocks, block_size, num_kv_heads, head_dim, dtype=target.dtype, device="cuda"
    )
    rows = random_tensor(5, 2, num_kv_heads, head_dim, target=target)
    slots = [num_blocks * block_size - 1, 3]
    slot_mapping = torch.tensor(slots, dtype=torch.int32, device="cuda")
    store_kv(rows, rows, cache, cache, slot_mapping, backend="triton")
    assert_same_bits(cache[-1, -1], rows[0])
    assert_same_bits(cache[0, 3], rows[1])
    assert int(cache.any(dim=-1).sum()) == 2 * num_kv_heads


@pytest.mark.parametrize("target", targets(dtypes=(torch.int8,)))
def test_heads_further_apart_than_int32_counts(target: Target) -> None:
    caches = [cache_of_heads_apart(4, 8, target) for _ in range(2)]
    rows = [random_tensor(seed, 2, 3, 8, target=target, scale=40.0) for seed in (1, 2)]
    num_blocks = caches[0].shape[0]
    slot_mapping = torch.tensor([5, num_blocks * 4 - 1], dtype=torch.int32, device=target.device)
    store_kv(rows[0], rows[1], caches[0], caches[1], slot_mapping, backend=target.backend)
    for cache, stored in zip(caches, rows, strict=True):
        assert_same_bits(cache[1, 1], stored[0])
        assert_same_bits(cache[-1, -1], stored[1])


def test_errors_name_the_argument() -> None:
    target = Target("torch", "cpu", torch.float32)
    cache = empty_cache(2, 4, 2, 8, "contiguous", target)
    rows = random_tensor(6, 3, 2, 8, target=target)
    slots = torch.zeros(3, dtype=torch.int32)
    cases: list[tuple[str, tuple[Tensor, ...]]] = [
        ("key has shape", (rows[:, :1], rows, cache, cache, slots)),
        ("key has shape", (rows[0, 0, 0], rows, cache, cache, slots)),
        ("value has shape", (rows, rows[:2], cache, cache, slots)),
        ("value_cache has shape", (rows, rows, cache, cache[:1], slots)),
        ("key has dtype", (rows.half(), rows, cache, cache, slots)),
        ("slot_mapping has dtype", (rows, rows, cache, cache, slots.float())),
        ("slot_mapping has shape", (rows, rows, cache, cache, slots[:2])),
        ("key has stride 2", (rows.repeat(1, 1, 2)[..., ::2], rows, cache, cache, slots)),
        ("slot_mapping is on meta", (rows, rows, cache, cache, slots.to("meta"))),
    ]
    for message, arguments in cases:
        with pytest.raises(KernelInputError, match=message):
            store_kv(*arguments)
    assert bool(cache.isnan().all())
