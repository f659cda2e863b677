"""The hand-over to the flash-attn package, with a stand-in that follows its documentation.

The package needs a GPU; `test_attention.py` runs it where it exists. The stand-in demands what the
real functions demand (dtypes, block size, one table row and length per sequence), computes what
they document, and leaves rows of no sequence as fresh memory may be: NaN.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING

import pytest
import torch

from attention_problems import ATOL, Problem
from kernel_oracles import Target, assert_close, make_batch
from nv_kernels.attention.flash_attn_backend import FlashAttention2

if TYPE_CHECKING:
    from collections.abc import Callable

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


def check_call(query: Tensor, key: Tensor, value: Tensor, *indices: Tensor) -> None:
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.dtype == key.dtype == value.dtype
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert key.dim() == 4
    assert key.shape[1] % 256 == 0
    assert all(index.dtype == torch.int32 for index in indices)
    assert all(index.is_contiguous() for index in indices if index.dim() == 1)
    assert all(index.stride(-1) == 1 for index in indices)


def gather(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    return cache[blocks.clamp(min=0).long()].flatten(0, 1)[:length]


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    check_call(q, k_cache, v_cache, cache_seqlens, block_table)
    assert q.dim() == 4
    assert q.shape[0] == block_table.shape[0] == cache_seqlens.shape[0] > 0
    rows = [
        attend_one(
            q[seq],
            gather(k_cache, block_table[seq], length),
            gather(v_cache, block_table[seq], length),
            softmax_scale,
            causal=causal,
        )
        for seq, length in enumerate(cache_seqlens.tolist())
    ]
    return torch.stack(rows)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    block_table: Tensor,
) -> Tensor:
    check_call(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table)
    assert cu_seqlens_q.shape == cu_seqlens_k.shape
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert starts_k[0] == 0
    result = torch.full_like(q, float("nan"))
    for seq in range(len(starts_q) - 1):
        rows = slice(starts_q[seq], starts_q[seq + 1])
        length = starts_k[seq + 1] - starts_k[seq]
        assert rows.stop - rows.start <= max_seqlen_q
        assert length <= max_seqlen_k
        result[rows] = attend_one(
            q[rows],
            gather(k, block_table[seq], length),
            gather(v, block_table[seq], length),
            softmax_scale,
            causal=causal,
        )
    return result


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Puts the stand-in where the package would be, and records which function was called."""
    names: list[str] = []

    def recorded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: object, **kwargs: object) -> Tensor:
            names.append(function.__name__)
            return function(*args, **kwargs)

        return call

    package = types.ModuleType("flash_attn")
    for function in (flash_attn_with_kvcache, flash_attn_varlen_func):
        setattr(package, function.__name__, recorded(function))
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    return names


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_padding_seqs", [0, 2])
@pytest.mark.parametrize("num_padding_tokens", [0, 1, 2, 5])
@pytest.mark.parametrize(
    ("lens", "function"),
    [
        (((1, 5), (1, 257), (1, 1)), "flash_attn_with_kvcache"),
        (((4, 4), (1, 300), (3, 270)), "flash_attn_varlen_func"),
    ],
)
def test_batches(
    dtype: torch.dtype,
    num_padding_seqs: int,
    num_padding_tokens: int,
    lens: tuple[tuple[int, int], ...],
    function: str,
    calls: list[str],
) -> None:
    batch = make_batch(
        lens + ((0, 0),) * num_padding_seqs, 256, num_padding_tokens=num_padding_tokens
    )
    target = Target("flash_attn", "cpu", dtype)
    problem = Problem.make(batch, target, num_heads=4, num_kv_heads=2, head_dim=16)
    result = FlashAttention2().attend(
        problem.query, problem.kv_cache, problem.metadata, scale=problem.scale
    )
    expected = problem.expected()
    assert_close(result, expected, rtol=0, atol=ATOL[dtype])
    assert calls == [function]


def test_nothing_to_attend_to(calls: list[str]) -> None:
    batch = make_batch(((0, 0),), 256, num_padding_tokens=2)
    target = Target("flash_attn", "cpu", torch.bfloat16)
    problem = Problem.make(batch, target, num_heads=4, num_kv_heads=2, head_dim=16)
    result = FlashAttention2().attend(
        problem.query, problem.kv_cache, problem.metadata, scale=problem.scale
    )
    assert result.shape == (2, 4, 16)
    assert not bool(result.any())
    assert calls == []
