"""The hand-over to FlashAttention 3, with a stand-in that follows its documentation.

The module exists only where somebody built it for a Hopper GPU. The stand-in demands what the real
function demands (dtypes, one table row and length per sequence), computes what it documents, and
leaves rows of no sequence as fresh memory may be: NaN.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_problems import ATOL, Problem
from flash_attn_stand_in import attend_one, check_call, gather, put_in_place
from kernel_oracles import (
    Batch,
    Target,
    assert_close,
    assert_same_bits,
    make_batch,
)
from nv_kernels.attention.flash_attn_3_backend import FlashAttention3


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    """Takes, of the real one's thirty parameters, those that an adapter needs, by their names."""
    check_call(q, k_cache, v_cache, cache_seqlens, page_table)
    assert page_table.shape[0] == cache_seqlens.shape[0] > 0
    if cu_seqlens_q is None:
        assert q.dim() == 4
        assert q.shape[0] == page_table.shape[0]
        starts = list(range(0, q.shape[0] * q.shape[1] + 1, q.shape[1]))
        flat = q.flatten(0, 1)
    else:
        assert q.dim() == 3
        assert max_seqlen_q is not None
        check_call(q, k_cache, v_cache, cu_seqlens_q)
        starts, flat = cu_seqlens_q.tolist(), q
        assert len(starts) == page_table.shape[0] + 1
    result = torch.full_like(flat, float("nan"))
    for seq, length in enumerate(cache_seqlens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        assert max_seqlen_q is None or rows.stop - rows.start <= max_seqlen_q
        assert length <= page_table.shape[1] * k_cache.shape[1]
        result[rows] = attend_one(
            flat[rows],
            gather(k_cache, page_table[seq], length),
            gather(v_cache, page_table[seq], length),
            softmax_scale,
            causal=causal,
        )
    return result.view(q.shape)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Puts the stand-in where the module would be, and records its calls."""
    return put_in_place(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache)


def problem_of(batch: Batch, dtype: torch.dtype) -> Problem:
    target = Target("flash_attn_3", "cpu", dtype)
    return Problem.make(batch, target, num_heads=4, num_kv_heads=2, head_dim=16)


def attend(problem: Problem) -> Tensor:
    return FlashAttention3().attend(
        problem.query, problem.kv_cache, problem.metadata, scale=problem.scale
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [3, 16, 128])
@pytest.mark.parametrize("num_padding_seqs", [0, 2])
@pytest.mark.parametrize("num_padding_tokens", [0, 1, 2, 5])
@pytest.mark.parametrize(
    "lens", [((1, 5), (1, 131), (1, 1)), ((4, 4), (1, 150), (3, 140)), ((5, 3), (2, 0), (1, 4))]
)
def test_batches(
    dtype: torch.dtype,
    block_size: int,
    num_padding_seqs: int,
    num_padding_tokens: int,
    lens: tuple[tuple[int, int], ...],
    calls: list[str],
) -> None:
    batch = make_batch(
        lens + ((0, 0),) * num_padding_seqs, block_size, num_padding_tokens=num_padding_tokens
    )
    problem = problem_of(batch, dtype)
    tensors = (problem.query, problem.kv_cache.key, problem.kv_cache.value)
    before = [tensor.clone() for tensor in tensors]
    result = attend(problem)
    expected = problem.expected()
    assert_close(result, expected, rtol=0, atol=ATOL[dtype])
    for tensor, copy in zip(tensors, before, strict=True):
        assert_same_bits(tensor, copy)
    assert calls == ["flash_attn_with_kvcache"]


@pytest.mark.parametrize("max_context_len", [0, 16])  # at least the longest of the batch
def test_nothing_to_attend_to(max_context_len: int, calls: list[str]) -> None:
    problem = problem_of(make_batch(((0, 0),), 16, num_padding_tokens=2), torch.bfloat16)
    metadata = replace(problem.metadata, max_context_len=max_context_len)
    result = attend(replace(problem, metadata=metadata))
    assert result.shape == (2, 4, 16)
    assert not bool(result.any())
    assert calls == []
