"""Runs a model step by step over a paged KV cache whose unused memory is NaN.

A stand-in for an engine: block tables are scattered on purpose (no two neighbouring blocks of a
sequence are neighbours in the pool), and everything that no token was stored into is NaN, so that
reading a slot too many shows in the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from nv_kernels import AttentionMetadata, LayerKVCache, select_attention_backend
from nv_models import SINGLE_RANK, load_model, open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from nv_kernels import AttentionBackend
    from nv_models import CausalLM, ModelConfig, TensorParallel


def make_backend(
    config: ModelConfig,
    name: str = "torch",
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    tensor_parallel: TensorParallel = SINGLE_RANK,
    block_size: int = 4,
) -> AttentionBackend:
    """Selects an attention backend for one rank of a model."""
    return select_attention_backend(
        name,
        device=torch.device(device),
        dtype=dtype,
        head_dim=config.head_dim,
        num_heads=config.num_heads // tensor_parallel.size,
        num_kv_heads=max(1, config.num_kv_heads // tensor_parallel.size),
        block_size=block_size,
    )


def load_paged_model(
    path: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    attention_backend: str = "torch",
    tensor_parallel: TensorParallel = SINGLE_RANK,
    block_size: int = 4,
    **options: Any,  # noqa: ANN401 - those of load_model
) -> CausalLM:
    """Opens and loads a checkpoint with an attention backend that fits it."""
    checkpoint = open_checkpoint(path)
    backend = make_backend(
        checkpoint.config,
        attention_backend,
        device=device,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        block_size=block_size,
    )
    return load_model(
        checkpoint,
        device=device,
        dtype=dtype,
        attention_backend=backend,
        tensor_parallel=tensor_parallel,
        **options,
    )


@dataclass
class PagedSequence:
    """One sequence: all of its tokens, and how many of them are in the cache."""

    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0


class PagedRunner:
    """Owns a KV pool of a model and computes steps over any mix of sequences."""

    def __init__(
        self,
        model: CausalLM,
        *,
        block_size: int = 4,
        num_blocks: int = 64,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.block_size = block_size
        head_dim = model.config.head_dim
        device = next(model.parameters()).device
        shape = (num_blocks, block_size, model.num_kv_heads, head_dim)

        def poisoned() -> Tensor:
            return torch.full(shape, torch.nan, dtype=cache_dtype or model.dtype, device=device)

        self.kv_caches = [
            LayerKVCache(poisoned(), poisoned(), *scales) for scales in model.kv_scales
        ]
        self.device = device
        # Odd ids first, then even ones: consecutive blocks of a sequence are never neighbours.
        self._free = [*range(1, num_blocks, 2), *range(0, num_blocks, 2)]

    def step(self, batch: Sequence[tuple[PagedSequence, int]]) -> list[Tensor]:
        """Computes the next tokens of each sequence.

        Args:
            batch: Each sequence with the number of its tokens to compute.

        Returns:
            For each sequence the logits of these tokens, [number, vocab_size] fp32 on the CPU.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        for sequence, number in batch:
            start = sequence.num_computed_tokens
            stop = start + number
            while len(sequence.block_table) * self.block_size < stop:
                sequence.block_table.append(self._free.pop(0))
            token_ids += sequence.token_ids[start:stop]
            positions += range(start, stop)
            sequence.num_computed_tokens = stop
        metadata = AttentionMetadata.from_lists(
            [number for _, number in batch],
            [sequence.num_computed_tokens for sequence, _ in batch],
            [sequence.block_table for sequence, _ in batch],
            block_size=self.block_size,
            device=self.device,
        )
        hidden = self.model(
            torch.tensor(token_ids, device=self.device),
            torch.tensor(positions, device=self.device),
            self.kv_caches,
            metadata,
        )
        logits = self.model.compute_logits(hidden).float().cpu()
        return list(torch.split(logits, [number for _, number in batch]))

    def prompt_logits(self, token_ids: Sequence[int], *, chunks: Sequence[int] = ()) -> Tensor:
        """Computes a fresh prompt in chunks (default: one); returns [num_tokens, vocab_size]."""
        sequence = PagedSequence(list(token_ids))
        sizes = list(chunks) or [len(sequence.token_ids)]
        return torch.cat([self.step([(sequence, size)])[0] for size in sizes])
