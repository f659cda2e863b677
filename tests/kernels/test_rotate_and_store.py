"""rotate_and_store against the fp64 oracles of the three ops that it joins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_oracles import (
    BAD_EPS,
    Target,
    assert_close,
    assert_same_bits,
    cache_of_heads_apart,
    empty_cache,
    random_tensor,
    rms_norm_oracle,
    rotary_oracle,
    targets,
)
from nv_kernels import KernelInputError, rms_norm, rotate_and_store

pytestmark = pytest.mark.usefixtures("poisoned_memory")

BLOCK_SIZE = 5
NUM_BLOCKS = 4
# Up to four roundings to the dtype follow one another: norm, weight, cosine and sine, result.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4 * 2**-10, torch.bfloat16: 4 * 2**-7}


def cos_sin(head_dim: int, target: Target) -> Tensor:
    angles = torch.arange(64)[:, None] / 100.0 ** (torch.arange(head_dim // 2) / head_dim * 2)
    return torch.cat((angles.cos(), angles.sin()), dim=1).float().to(target.device)


def expected(
    heads: Tensor, weight: Tensor | None, positions: Tensor, table: Tensor, eps: float
) -> Tensor:
    normed = heads.double().cpu() if weight is None else rms_norm_oracle(heads, weight, eps)
    return rotary_oracle(normed, positions, table)


# "auto" has a faster way of its own on a CPU.
@pytest.mark.parametrize("target", targets(cpu_backends=("torch", "auto")))
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(2, 1, 8), (4, 4, 16), (3, 1, 80), (16, 8, 128)]
)
def test_queries_and_cache(
    target: Target,
    has_norm: bool,  # noqa: FBT001 - a parameter
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    wide = random_tensor(1, 6, (num_heads + 2 * num_kv_heads) * head_dim + 3, target=target)
    qkv = wide[:, 3:].view(6, -1, head_dim)
    before = wide.clone()
    weights: list[Tensor | None] = [None, None]
    if has_norm:
        weights = [random_tensor(seed, head_dim, target=target) for seed in (2, 3)]
    positions = torch.tensor([0, 63, 5, 17, 17, 2], device=target.device)
    slots = [0, 19, -1, 7, 6, 13]
    shape = (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)
    key_cache = empty_cache(*shape, "head_major", target)
    value_cache = empty_cache(*shape, "contiguous", target)
    table = cos_sin(head_dim, target)

    query = rotate_and_store(
        qkv,
        positions,
        table,
        key_cache,
        value_cache,
        torch.tensor(slots, dtype=torch.int32, device=target.device),
        query_weight=weights[0],
        key_weight=weights[1],
        eps=1e-5,
        backend=target.backend,
    )

    tolerance = TOLERANCE[target.dtype]
    first_value = num_heads + num_kv_heads
    assert query.is_contiguous()
    assert_same_bits(wide, before)
    want = expected(qkv[:, :num_heads], weights[0], positions, table, 1e-5)
    assert_close(query, want, rtol=tolerance, atol=4 * tolerance)
    want = expected(qkv[:, num_heads:first_value], weights[1], positions, table, 1e-5)
    for token, slot in enumerate(slots):
        if slot >= 0:
            place = (slot // BLOCK_SIZE, slot % BLOCK_SIZE)
            assert_close(key_cache[place], want[token], rtol=tolerance, atol=4 * tolerance)
            assert_same_bits(value_cache[place], qkv[token, first_value:])
    num_written = (len(slots) - 1) * num_kv_heads * head_dim
    assert int((~key_cache.isnan()).sum()) == num_written
    assert int((~value_cache.isnan()).sum()) == num_written


@pytest.mark.parametrize("target", targets())
def test_settled_indices_change_no_bit(target: Target) -> None:
    """They may be read early then; what the kernel directly before writes may not."""
    num_rounds = 1 if target.device == "cpu" else 50
    positions = torch.tensor([0, 63, 5, 17], dtype=torch.int32, device=target.device)
    slots = torch.tensor([0, 19, -1, 7], dtype=torch.int32, device=target.device)
    table = cos_sin(16, target)
    weight = torch.ones(16, dtype=target.dtype, device=target.device)
    for seed in range(num_rounds):
        raw = random_tensor(seed, 4, 8, 16, target=target)
        results = []
        for is_settled in (True, False):
            key_cache, value_cache = (
                empty_cache(NUM_BLOCKS, BLOCK_SIZE, 2, 16, "head_major", target).zero_()
                for _ in range(2)
            )
            qkv = rms_norm(raw, weight, eps=1e-6, backend=target.backend)
            query = rotate_and_store(
                qkv,
                positions,
                table,
                key_cache,
                value_cache,
                slots,
                query_weight=weight,
                key_weight=weight,
                eps=1e-6,
                is_settled=is_settled,
                backend=target.backend,
            )
            results.append([query, key_cache, value_cache])
        for settled, unsettled in zip(*results, strict=True):
            assert_same_bits(settled, unsettled)


@pytest.mark.parametrize("layout", ["head_major", "contiguous"])
@pytest.mark.parametrize("slots", [[0, 19, 4, 7], [-1, 19, 4, -1], [-1] * 4])
def test_layers_of_a_step_share_what_they_have_in_common(layout: str, slots: list[int]) -> None:
    target = Target("auto", "cpu", torch.float32)
    derived: dict[str, object] = {}
    positions = torch.tensor([1, 63, 5, 17])
    table = cos_sin(16, target)
    # The last two have caches of another shape and of another layout.
    others = [NUM_BLOCKS, NUM_BLOCKS, NUM_BLOCKS, 7, NUM_BLOCKS]
    for layer, num_blocks in enumerate(others):
        qkv = random_tensor(layer, 4, 7, 16, target=target)
        weights = [random_tensor(10 + layer + i, 16, target=target) for i in (0, 1)]
        results = []
        ways: list[dict[str, Any]] = [{"derived": derived}, {"backend": "torch"}]
        for way in ways:
            shape = (num_blocks, BLOCK_SIZE, 2, 16)
            kind = {"head_major": "contiguous", "contiguous": "head_major"}[layout]
            kind = kind if layer == len(others) - 1 else layout
            keys, values = (empty_cache(*shape, kind, target) for _ in range(2))
            query = rotate_and_store(
                qkv,
                positions,
                table,
                keys,
                values,
                torch.tensor(slots),
                query_weight=weights[0],
                key_weight=weights[1],
                eps=1e-5,
                **way,
            )
            results.append((query, keys, values))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=2e-6, atol=2e-6)
    assert len(derived) == 1


def test_caches_that_are_not_one_run_of_memory_are_written_all_the_same() -> None:
    given = arguments()
    given["qkv"] = torch.randn(2, 4, 8)
    given["cos_sin_cache"] = torch.ones(4, 8)
    given["slot_mapping"] = torch.tensor([3, 1])
    wide = torch.zeros(2, 4, 2, 1, 8)
    apart = {"key_cache": wide[0, ::2], "value_cache": wide[1, ::2]}
    query = rotate_and_store(**{**given, **apart}, derived={})
    expected_query = rotate_and_store(**given)
    torch.testing.assert_close(query, expected_query)
    for name, cache in apart.items():
        torch.testing.assert_close(cache, given[name])
    assert int((wide != 0).any(dim=-1).sum()) == 4


@pytest.mark.parametrize(
    "target", targets(dtypes=(torch.float8_e4m3fn,), cpu_backends=("torch", "auto"))
)
def test_heads_further_apart_than_int32_counts(target: Target) -> None:
    torch.use_deterministic_algorithms(mode=False)  # gigabytes would be filled
    far = [cache_of_heads_apart(BLOCK_SIZE, 8, target) for _ in range(2)]
    near = [empty_cache(2, BLOCK_SIZE, 3, 8, "contiguous", target) for _ in range(2)]
    wide = Target(target.backend, target.device, torch.float32)
    qkv = random_tensor(1, 2, 8, 8, target=wide)
    positions = torch.tensor([3, 9], device=target.device)
    for (key_cache, value_cache), num_blocks in ((far, far[0].shape[0]), (near, 2)):
        rotate_and_store(
            qkv,
            positions,
            cos_sin(8, wide),
            key_cache,
            value_cache,
            torch.tensor([3, num_blocks * BLOCK_SIZE - 1], device=target.device),
            backend=target.backend,
        )
    for here, there in zip(near, far, strict=True):
        assert_same_bits(there[0, 3], here[0, 3])
        assert_same_bits(there[-1, -1], here[-1, -1])


def arguments() -> dict[str, Any]:
    return {
        "qkv": torch.zeros(2, 4, 8),
        "positions": torch.zeros(2, dtype=torch.int64),
        "cos_sin_cache": torch.zeros(4, 8),
        "key_cache": torch.zeros(2, 2, 1, 8),
        "value_cache": torch.zeros(2, 2, 1, 8),
        "slot_mapping": torch.zeros(2, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("qkv", torch.zeros(2, 2, 8), "qkv has 2 heads"),
        ("qkv", torch.zeros(2, 4, 10), "qkv has shape"),
        ("qkv", torch.zeros(2, 4, 8).half(), "qkv has dtype"),
        ("positions", torch.zeros(3, dtype=torch.int64), "positions has shape"),
        ("slot_mapping", torch.zeros(2), "slot_mapping has dtype"),
        ("cos_sin_cache", torch.zeros(4, 6), "cos_sin_cache has shape"),
        ("value_cache", torch.zeros(2, 2, 2, 8), "value_cache has shape"),
        ("query_weight", torch.ones(8), "must be given together"),
    ],
)
def test_wrong_arguments_are_named(name: str, value: Tensor, message: str) -> None:
    with pytest.raises(KernelInputError, match=message):
        rotate_and_store(**{**arguments(), name: value})


BAD_CHOICES: dict[str, tuple[Any, ...]] = {
    "derived": ([], (), "x", 1),
    "is_settled": (None, 0, "no", torch.ones(1)),
    "eps": BAD_EPS,
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, bad) for name, all_bad in BAD_CHOICES.items() for bad in all_bad]
)
def test_choices_that_are_none_are_named(name: str, value: Any) -> None:  # noqa: ANN401
    with pytest.raises(KernelInputError, match=f"{name} is .*, but must be a"):
        rotate_and_store(**arguments(), **{name: value})


def test_heads_without_dimensions_are_named() -> None:
    given = arguments()
    for name in ("qkv", "cos_sin_cache", "key_cache", "value_cache"):
        given[name] = given[name][..., :0]
    with pytest.raises(KernelInputError, match="head_dim 0, but it must be even, and at least 2"):
        rotate_and_store(**given)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_heads_of_an_odd_size_are_named(backend: str) -> None:
    odd = {
        "qkv": torch.zeros(2, 4, 5),
        "cos_sin_cache": torch.zeros(4, 5),
        "key_cache": torch.zeros(2, 2, 1, 5),
        "value_cache": torch.zeros(2, 2, 1, 5),
    }
    with pytest.raises(KernelInputError, match="head_dim 5, but it must be even"):
        rotate_and_store(**{**arguments(), **odd}, backend=backend)


def test_no_tokens() -> None:
    given = arguments()
    for name in ("qkv", "positions", "slot_mapping"):
        given[name] = given[name][:0]
    assert rotate_and_store(**given).shape == (0, 2, 8)
