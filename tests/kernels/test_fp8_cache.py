"""The fp8 KV cache: what is stored, bit for bit, and attention over it against fp64.

Attention is compared with the formula on what the cache stands for, so that its error does not hide
behind that of the rounding. Unused slots are NaN, which Triton's interpreter reads as 480: either
shows in a result.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_problems import ATOL, FP8, Problem, metadata_of
from kernel_oracles import (
    HAS_CUDA,
    LAYOUTS,
    Batch,
    Target,
    assert_close,
    assert_same_bits,
    empty_cache,
    make_batch,
    random_tensor,
    targets,
)
from nv_kernels import (
    FreshKV,
    KernelInputError,
    LayerKVCache,
    available_attention_backends,
    paged_attention,
    rotate_and_store,
    select_attention_backend,
    store_kv,
)
from nv_kernels.attention import triton_backend
from nv_kernels.kv_quantisation import check_scales

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SCALES = (0.75, 1.25)
MIXED = ((7, 7), (1, 20), (4, 19), (1, 1), (9, 70), (1, 300))

# All non-negative e4m3, from the definition: the code of each is its place in the list.
E4M3 = [mantissa * 2.0**-9 for mantissa in range(8)] + [
    (8 + mantissa) * 2.0 ** (exponent - 10) for exponent in range(1, 16) for mantissa in range(8)
][:-1]


def attention_targets() -> list[object]:
    """All targets of other tests, and bf16 in the interpreter: its products are fp16 here."""
    interpreted = [
        pytest.param(
            Target("triton", "cpu", torch.bfloat16), marks=param.marks, id="triton-cpu-bf16"
        )
        for param in targets(dtypes=(torch.float16,))
        if isinstance(target := param.values[0], Target)
        and (target.backend, target.device) == ("triton", "cpu")
    ]
    return [*targets(), *interpreted]


def empty_fp8_cache(target: Target, layout: str, *shape: int) -> Tensor:
    num_blocks, block_size, num_kv_heads, head_dim = shape
    fp8 = dataclasses.replace(target, dtype=FP8)
    return empty_cache(num_blocks, block_size, num_kv_heads, head_dim, layout, fp8)


def nearest_code(x: float) -> int:
    """Rounds to the nearest e4m3, ties to even, in plain Python; NaN and infinities too."""
    sign = 0x80 if str(x).startswith("-") else 0
    magnitude = min(abs(x), 448.0)
    above = min(bisect_left(E4M3, magnitude), len(E4M3) - 1)
    below = max(above - 1, 0)
    up, down = E4M3[above] - magnitude, magnitude - E4M3[below]
    if up == down:
        return sign | (above if above % 2 == 0 else below)
    return sign | (above if up < down else below)


def awkward_numbers() -> Tensor:
    """Numbers of all sizes, and every e4m3, every midpoint between two, and their neighbours."""
    values = torch.tensor(E4M3)
    midpoints = (values[1:] + values[:-1]) / 2
    far = torch.tensor([1e9])
    generator = torch.Generator().manual_seed(1)
    random = torch.randn(4000, generator=generator)
    sizes = torch.exp(5 * torch.randn(4000, generator=generator))
    special = torch.tensor([0.0, torch.inf, 1e-45, 1e-38, 448.1, 463.9, 464.0, 465.0, 1e6, 1e37])
    near = (torch.nextafter(midpoints, far), torch.nextafter(midpoints, -far))
    positive = torch.cat((values, midpoints, *near, special))
    return torch.cat((random * sizes, positive, -positive)).flip(0)


def test_the_list_of_e4m3_is_pytorchs() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(FP8)
    assert codes.float().tolist() == E4M3


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 8.0), (0.3, 1.7)])
def test_what_is_stored_is_the_nearest(target: Target, scales: tuple[float, float]) -> None:
    numbers = awkward_numbers()
    num_kv_heads, head_dim = 4, 64
    num_tokens = len(numbers) // (num_kv_heads * head_dim)
    numbers = numbers[: num_tokens * num_kv_heads * head_dim]
    rows = numbers.view(num_tokens, num_kv_heads, head_dim).to(target.device, target.dtype)
    key_cache, value_cache = (
        empty_fp8_cache(target, layout, num_tokens // 16 + 1, 16, num_kv_heads, head_dim)
        for layout in ("head_major", "padded")
    )
    slots = torch.arange(num_tokens, dtype=torch.int32, device=target.device)
    slots[5] = -1
    store_kv(
        rows,
        -rows,
        key_cache,
        value_cache,
        slots,
        k_scale=scales[0],
        v_scale=scales[1],
        backend=target.backend,
    )
    for cache, sign, scale in ((key_cache, 1, scales[0]), (value_cache, -1, scales[1])):
        stored = cache.view(torch.uint8).flatten(0, 1)[:num_tokens].cpu()
        scaled = rows.cpu().float() * sign * torch.tensor(1 / scale, dtype=torch.float32)
        expected = torch.tensor([nearest_code(x) for x in scaled.flatten().tolist()])
        expected = expected.view(stored.shape).to(torch.uint8)
        kept = torch.arange(num_tokens) != 5
        assert torch.equal(stored[kept], expected[kept])
        assert bool(cache.flatten(0, 1)[5].isnan().all())


@pytest.mark.parametrize("target", targets())
def test_nan_stays_nan(target: Target) -> None:
    rows = random_tensor(1, 3, 2, 8, target=target)
    rows[1, 0, 3] = torch.nan
    rows[2, 1, 0] = -torch.nan
    cache = empty_fp8_cache(target, "contiguous", 1, 4, 2, 8)
    slots = torch.arange(3, dtype=torch.int32, device=target.device)
    store_kv(rows, rows, cache, cache.clone(), slots, k_scale=0.5, backend=target.backend)
    assert torch.equal(cache[0, :3].isnan(), rows.isnan())


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("is_auto", [False, True])
def test_rotate_and_store_is_its_three_ops(
    target: Target, *, has_norm: bool, is_auto: bool
) -> None:
    """Bit for bit the same as rotating into a cache of the dtype, and storing from there."""
    num_heads, num_kv_heads, head_dim, num_tokens = 4, 2, 80, 6
    width = num_heads + 2 * num_kv_heads
    qkv = random_tensor(1, num_tokens, width, head_dim, target=target, scale=30.0)
    weights = [random_tensor(seed, head_dim, target=target) for seed in (2, 3)]
    angles = torch.randn(9, head_dim // 2, generator=torch.Generator().manual_seed(4))
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(target.device)
    positions = torch.tensor([0, 3, 8, 1, 1, 5], device=target.device)
    slots = torch.tensor([4, 0, -1, 11, 7, 2], dtype=torch.int32, device=target.device)
    shape = (4, 3, num_kv_heads, head_dim)
    plain = [empty_cache(*shape, "contiguous", target) for _ in range(2)]
    quantised, expected = (
        [empty_fp8_cache(target, layout, *shape) for layout in ("contiguous", "head_major")]
        for _ in range(2)
    )

    def run(caches: list[Tensor], scales: tuple[float, float] = (1.0, 1.0)) -> Tensor:
        return rotate_and_store(
            qkv,
            positions,
            table,
            caches[0],
            caches[1],
            slots,
            query_weight=weights[0] if has_norm else None,
            key_weight=weights[1] if has_norm else None,
            eps=1e-5,
            k_scale=scales[0],
            v_scale=scales[1],
            backend="auto" if is_auto else target.backend,
        )

    query, plain_query = run(quantised, SCALES), run(plain)
    key, value = (cache.flatten(0, 1)[slots.long()] for cache in plain)
    store_kv(key, value, expected[0], expected[1], slots, k_scale=SCALES[0], v_scale=SCALES[1])
    if target.device == "cuda" and target.dtype == torch.float32:
        # Compiled for another cache, a rotation may join other multiplications with additions. That
        # can take a key across the middle between two fp8 values, which are up to 1/8 apart.
        assert_close(query, plain_query, rtol=1e-5, atol=1e-4)
        for cache, want in zip(quantised, expected, strict=True):
            values, wanted = cache.float(), want.float()
            written = ~wanted.isnan()
            assert torch.equal(~values.isnan(), written)
            assert_close(values[written], wanted[written], rtol=1 / 8, atol=1e-2)
        return
    assert_same_bits(query, plain_query)
    for cache, want in zip(quantised, expected, strict=True):
        assert_same_bits(cache, want)


@pytest.mark.parametrize("target", attention_targets())
@pytest.mark.parametrize("block_size", [16, 256])
def test_kinds_of_batches(target: Target, block_size: int) -> None:
    batch = make_batch((*MIXED, (0, 0)), block_size, num_padding_tokens=2)
    problem = Problem.make(batch, target, num_heads=6, num_kv_heads=2, head_dim=64, scales=SCALES)
    problem.check(target.backend)
    assert not bool(problem.run(target.backend)[batch.query_starts[-1] :].any())


@pytest.mark.parametrize("target", attention_targets())
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_head_dims(target: Target, head_dim: int) -> None:
    for lens in (((1, 37), (1, 2)), ((6, 6), (1, 37), (4, 21))):
        problem = Problem.make(
            make_batch(lens, 16),
            target,
            num_heads=4,
            num_kv_heads=2,
            head_dim=head_dim,
            scales=SCALES,
        )
        problem.check(target.backend)


@pytest.mark.parametrize("target", attention_targets())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_groups_and_odd_blocks(target: Target, layout: str) -> None:
    for (num_heads, num_kv_heads), block_size in (((17, 1), 48), ((6, 3), 7)):
        problem = Problem.make(
            make_batch(((5, 5), (1, 33), (3, 70)), block_size),
            target,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=16,
            layouts=(layout, LAYOUTS[LAYOUTS.index(layout) - 1]),
            scales=(1.0, 1.0),
        )
        problem.check(target.backend)


@pytest.mark.parametrize("target", attention_targets())
@pytest.mark.parametrize("size", [2.0**-100, 2.0**20, 2.0**100])
def test_queries_of_any_size(target: Target, size: float) -> None:
    """Those of bf16 go beyond fp16, in which the kernels multiply."""
    if target.dtype == torch.float16:
        size = {2.0**-100: 2.0**-9, 2.0**20: 2.0**4, 2.0**100: 2.0**13}[size]
    batch = make_batch(((1, 40), (9, 40), (1, 600)), 16)
    problem = Problem.make(batch, target, num_heads=4, num_kv_heads=2, head_dim=32, scales=SCALES)
    loud = dataclasses.replace(problem, query=problem.query * size, scale=problem.scale / size)
    loud.check(target.backend)


@pytest.mark.parametrize("target", attention_targets())
def test_a_token_of_zeros_sees_the_mean(target: Target) -> None:
    batch = make_batch(((1, 40), (3, 40)), 16)
    problem = Problem.make(batch, target, num_heads=4, num_kv_heads=2, head_dim=32, scales=SCALES)
    dataclasses.replace(problem, query=problem.query * 0).check(target.backend)


@pytest.mark.parametrize("target", attention_targets())
def test_neighbours_change_no_bit(target: Target) -> None:
    lens = ((1, 17), (1, 600), (1, 64), (1, 257))
    batch = make_batch(lens, 16)
    problem = Problem.make(batch, target, num_heads=6, num_kv_heads=2, head_dim=64, scales=SCALES)
    together = problem.run(target.backend)
    for seq in range(len(lens)):
        rows = slice(batch.query_starts[seq], batch.query_starts[seq + 1])
        alone = Batch(lens[seq : seq + 1], 16, batch.block_tables[seq : seq + 1], batch.num_blocks)
        result = dataclasses.replace(
            problem,
            batch=alone,
            query=problem.query[rows],
            metadata=metadata_of(alone, target.device),
        ).run(target.backend)
        assert_same_bits(result, together[rows])


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("num_seqs", [1, 40, 150, 220])
def test_full_size_on_the_gpu(num_seqs: int) -> None:
    """The direct and the split kernel at a model's shape, in every choice of configuration."""
    target = Target("triton", "cuda", torch.bfloat16)
    lens = tuple((1, 1 + 431 * seq % 1500) for seq in range(num_seqs - 1))
    for block_size, head_dim in ((64, 128), (16, 128), (256, 128), (64, 64), (64, 256)):
        batch = make_batch((*lens, (1, 5000)), block_size)
        problem = Problem.make(
            batch, target, num_heads=16, num_kv_heads=8, head_dim=head_dim, scales=SCALES
        )
        problem.check("triton")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_captured_graph_keeps_the_scales() -> None:
    torch.use_deterministic_algorithms(mode=False)  # filling fresh memory would hide in the capture
    target = Target("triton", "cuda", torch.bfloat16)
    batch = make_batch(((1, 9), (1, 300), (1, 1), (1, 77)), 64)
    problem = Problem.make(batch, target, num_heads=8, num_kv_heads=2, head_dim=64, scales=SCALES)
    problem.check("triton")  # also compiles, which must not happen while capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = problem.run("triton")
    output.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert_close(output, problem.expected(), rtol=0, atol=SCALES[1] * ATOL[target.dtype])


CPU_SHAPE: dict[str, Any] = {
    "device": torch.device("cpu"),
    "dtype": torch.float32,
    "head_dim": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
    "block_size": 4,
}


def test_backends_say_whether_they_read_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = available_attention_backends(**CPU_SHAPE, cache_dtype=FP8)
    assert reasons["torch"] is None
    assert select_attention_backend(**CPU_SHAPE, cache_dtype=FP8).name == "torch"
    monkeypatch.setattr(triton_backend, "triton_unavailable_reason", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    on_ampere = {**CPU_SHAPE, "device": torch.device("cuda")}
    reason = available_attention_backends(**on_ampere, cache_dtype=FP8)["triton"]
    assert "from compute capability 8.9 on, and this device has (8, 0)" in str(reason)
    assert available_attention_backends(**on_ampere)["triton"] is None


@pytest.mark.parametrize("cache_dtype", [torch.float8_e5m2, torch.float16, torch.int8])
def test_other_caches_are_refused(cache_dtype: torch.dtype) -> None:
    with pytest.raises(KernelInputError, match=r"cache_dtype is torch.*float32.*float8_e4m3fn"):
        select_attention_backend(**CPU_SHAPE, cache_dtype=cache_dtype)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-39, 1e39])
def test_scales_are_checked_before_anything_runs(scale: float) -> None:
    cache = torch.zeros(2, 4, 1, 16, dtype=FP8)
    rows, slots = torch.zeros(1, 1, 16), torch.zeros(1, dtype=torch.int32)
    batch = make_batch(((1, 1),), 4)
    with pytest.raises(KernelInputError, match=r"k_scale is .*must be positive"):
        store_kv(rows, rows, cache, cache, slots, k_scale=scale)
    with pytest.raises(KernelInputError, match=r"v_scale is .*must be positive"):
        paged_attention(
            rows, LayerKVCache(cache, cache, 1.0, scale), metadata_of(batch, "cpu"), scale=1.0
        )


@pytest.mark.parametrize("scale", ["1.0", None])
def test_scales_are_numbers(scale: Any) -> None:  # noqa: ANN401 - what no caller should pass
    for cache_dtype in (FP8, torch.float32):
        with pytest.raises(KernelInputError, match=r"k_scale is .*, but must be a number"):
            check_scales(cache_dtype, scale, 2.0)
        with pytest.raises(KernelInputError, match=r"v_scale is .*, but must be a number"):
            check_scales(cache_dtype, 1.0, scale)


@pytest.mark.parametrize("target", attention_targets())
def test_fresh_keys_are_not_read(target: Target) -> None:
    """Later steps see rounded ones, and so must this one."""
    batch = make_batch(((7, 7), (1, 1), (40, 40)), 16)
    problem = Problem.make(batch, target, num_heads=4, num_kv_heads=2, head_dim=32, scales=SCALES)
    shape = (batch.num_tokens, 2, 32)
    fresh = torch.full(shape, torch.nan, dtype=target.dtype, device=target.device)
    result = problem.run(target.backend, fresh=FreshKV(fresh, fresh))
    assert_same_bits(result, problem.run(target.backend))


def test_values_lie_in_pairs() -> None:
    batch = make_batch(((1, 1),), 4)
    query, metadata = torch.zeros(1, 1, 8), metadata_of(batch, "cpu")
    wide = torch.zeros(2, 4, 1, 17, dtype=FP8)
    even = torch.zeros(2, 4, 1, 18, dtype=FP8)
    keys = wide[..., :8]  # keys need not
    paged_attention(query, LayerKVCache(keys, even[..., 2:10]), metadata, scale=1.0)
    for values in (wide[..., :8], even[..., 1:9]):
        with pytest.raises(KernelInputError, match=r"kv_cache.value is fp8 .* must be even"):
            paged_attention(query, LayerKVCache(keys, values), metadata, scale=1.0)


def test_a_plain_cache_has_no_scales() -> None:
    cache = torch.zeros(2, 4, 1, 16)
    rows, slots = torch.zeros(1, 1, 16), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(KernelInputError, match=r"v_scale is 2.0, but only a cache of"):
        store_kv(rows, rows, cache, cache, slots, v_scale=2.0)
    with pytest.raises(KernelInputError, match=r"key has dtype torch.float8_e4m3fn"):
        store_kv(rows.to(FP8), rows.to(FP8), cache.to(FP8), cache.to(FP8), slots)
