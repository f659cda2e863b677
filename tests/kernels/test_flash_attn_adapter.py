"""The hand-over to the flash-attn package, with a stand-in that follows its documentation.

The stand-in demands what the real functions demand (dtypes, block size, one table row and length
per sequence), computes what they document, and leaves rows of no sequence as fresh memory may be:
NaN.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_problems import ATOL, Problem
from flash_attn_stand_in import attend_one, check_call, gather, put_in_place
from kernel_oracles import Target, assert_close, make_batch
from nv_kernels.attention.flash_attn_backend import FlashAttention2


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
    assert k_cache.shape[1] % 256 == 0
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
    assert k.shape[1] % 256 == 0
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
    return put_in_place(monkeypatch, "flash_attn", flash_attn_with_kvcache, flash_attn_varlen_func)


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


@pytest.mark.parametrize("max_context_len", [0, 16])  # at least the longest of the batch
def test_nothing_to_attend_to(max_context_len: int, calls: list[str]) -> None:
    batch = make_batch(((0, 0),), 256, num_padding_tokens=2)
    target = Target("flash_attn", "cpu", torch.bfloat16)
    problem = Problem.make(batch, target, num_heads=4, num_kv_heads=2, head_dim=16)
    result = FlashAttention2().attend(
        problem.query,
        problem.kv_cache,
        replace(problem.metadata, max_context_len=max_context_len),
        scale=problem.scale,
    )
    assert result.shape == (2, 4, 16)
    assert not bool(result.any())
    assert calls == []
