"""Attention problems for the kernel tests: a batch, its tensors, and the comparison with fp64."""

from __future__ import annotations

import dataclasses
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest
import torch

from kernel_oracles import (
    HAS_TRITON,
    Batch,
    Target,
    assert_close,
    assert_same_bits,
    attention_oracle,
    make_cache,
    random_tensor,
)
from nv_kernels import (
    AttentionMetadata,
    FreshKV,
    LayerKVCache,
    available_attention_backends,
    paged_attention,
)

if TYPE_CHECKING:
    from torch import Tensor

FP8 = torch.float8_e4m3fn

# Its conversion of the bound to an int fails with NumPy from 2.4 on; Triton 3.7 mended it.
NO_LOOPS_IN_INTERPRETER = HAS_TRITON and version("triton").startswith("3.6.")

OPTIONAL_BACKENDS = ("flash_attn", "flash_attn_3")

# Half types: the probabilities are rounded to the dtype before they meet the values, which moves
# a weighted mean of values under 5 by up to half a unit of eps * 5, and the result is rounded once
# more. fp32: a score sums 256 products, and the softmax turns its error into a relative one.
ATOL = {torch.float32: 2e-5, torch.float16: 5 * 2**-10, torch.bfloat16: 5 * 2**-7}


def metadata_of(batch: Batch, device: str) -> AttentionMetadata:
    """States the batch in tensors, in the words of AttentionMetadata's docstring."""
    width = max(len(table) for table in batch.block_tables) + 1  # at least one column of padding
    slots = [
        block * batch.block_size + offset
        for seq, (query_len, context_len) in enumerate(batch.lens)
        for block, offset in (
            batch.slot(seq, position)
            for position in range(max(context_len - query_len, 0), context_len)
        )
    ]
    slots += [-1] * (batch.num_tokens - len(slots))

    def int32(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return AttentionMetadata(
        cu_seqlens_q=int32(batch.query_starts),
        context_lens=int32([context_len for _, context_len in batch.lens]),
        block_table=int32([[*table, *[-1] * (width - len(table))] for table in batch.block_tables]),
        slot_mapping=int32(slots),
        max_query_len=max(query_len for query_len, _ in batch.lens),
        max_context_len=max(context_len for _, context_len in batch.lens),
    )


@dataclasses.dataclass(frozen=True)
class Problem:
    batch: Batch
    query: Tensor
    kv_cache: LayerKVCache
    metadata: AttentionMetadata
    scale: float

    @classmethod
    def make(
        cls,
        batch: Batch,
        target: Target,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        layouts: tuple[str, str] = ("contiguous", "contiguous"),
        seed: int = 0,
        scales: tuple[float, float] | None = None,
    ) -> Problem:
        """Makes the tensors; with scales, for keys and values, the cache is fp8."""
        cached = target if scales is None else dataclasses.replace(target, dtype=FP8)
        width = num_heads + 2 * num_kv_heads
        qkv = random_tensor(seed, batch.num_tokens, width, head_dim, target=target)
        key, value = (
            make_cache(batch, num_kv_heads, head_dim, layout, seed=seed + start, target=cached)
            for start, layout in zip((1000, 2000), layouts, strict=True)
        )
        return cls(
            batch=batch,
            query=qkv[:, :num_heads],
            kv_cache=LayerKVCache(key, value, *(scales or ())),
            metadata=metadata_of(batch, target.device),
            scale=head_dim**-0.5,
        )

    def fresh(self) -> FreshKV:
        """The query tokens' keys and values, side by side in a projection, NaN for padding."""
        slots = self.metadata.slot_mapping.long()
        shape = (len(slots), *self.kv_cache.key.shape[2:])
        width = torch.full((shape[0], 2, *shape[1:]), float("nan"), dtype=self.query.dtype)
        width = width.to(self.query.device)
        for half, cache in enumerate((self.kv_cache.key, self.kv_cache.value)):
            width[slots >= 0, half] = cache.flatten(0, 1)[slots[slots >= 0]]
        return FreshKV(width[:, 0], width[:, 1])

    def run(self, backend: str, fresh: FreshKV | None = None) -> Tensor:
        if backend == "triton" and self.query.device.type == "cpu" and NO_LOOPS_IN_INTERPRETER:
            pytest.skip("Triton 3.6's interpreter cannot run a loop whose bound was computed")
        _, block_size, num_kv_heads, head_dim = self.kv_cache.key.shape
        reason = available_attention_backends(
            device=self.query.device,
            dtype=self.query.dtype,
            cache_dtype=self.kv_cache.key.dtype,
            head_dim=head_dim,
            num_heads=self.query.shape[1],
            num_kv_heads=num_kv_heads,
            block_size=block_size,
        )[backend]
        if reason is not None:
            # Only the optional package may be missing or limited; ours must take every problem.
            assert backend in OPTIONAL_BACKENDS, reason
            pytest.skip(reason)
        try:
            return paged_attention(
                self.query,
                self.kv_cache,
                self.metadata,
                scale=self.scale,
                fresh=fresh,
                backend=backend,
            )
        except RuntimeError as error:
            # A build of the package for few head sizes says so only when it is called.
            if backend == "flash_attn" and "this build holds" in str(error):
                pytest.skip(f"flash_attn: {error}")
            raise

    def check(self, backend: str) -> None:
        tensors = (self.query, self.kv_cache.key, self.kv_cache.value)
        before = [tensor.clone() for tensor in tensors]
        actual = self.run(backend)
        assert actual.shape == self.query.shape
        assert actual.dtype == self.query.dtype
        assert actual.is_contiguous()
        atol = ATOL[self.query.dtype] * self.kv_cache.v_scale
        assert_close(actual, self.expected(), rtol=0, atol=atol)
        for tensor, copy in zip(tensors, before, strict=True):
            assert_same_bits(tensor, copy)

    def expected(self) -> Tensor:
        """The formula in fp64, on what the cache stands for."""
        key, value, k_scale, v_scale = self.kv_cache
        return attention_oracle(
            self.query, key.double() * k_scale, value.double() * v_scale, self.batch, self.scale
        )
