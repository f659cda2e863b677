"""DecodeStep: one token for each sequence of a batch, entirely on the device.

It reads the batch's rows, runs the model, samples and advances the rows. Nothing in it looks at a
value on the host, so it can be captured in a CUDA graph once and replayed for every step with the
same padded size (`nv_runtime.cuda_graphs`), or be called as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nv_kernels import AttentionMetadata, LayerKVCache
from nv_models import CausalLM
from nv_runtime.device_batch import FIRST_BLOCK, IS_ACTIVE, LENGTH, SEED, TEMPERATURE, TOKEN
from nv_runtime.sharded_sampling import sample_from_shard


@dataclass(frozen=True)
class DecodeOutput:
    """What a decode step leaves behind.

    Attributes:
        token_ids: Sampled tokens, [padded_size] int64; None if the caller samples.
        logits: This rank's part, [padded_size, tokens per rank]; None if the tokens are sampled
            already, so that a graph need not keep them.
    """

    token_ids: Tensor | None
    logits: Tensor | None


class DecodeStep:
    """The device's part of a decode step."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: tuple[LayerKVCache, ...],
        rows: Tensor,
        *,
        block_size: int,
    ) -> None:
        """Takes what every step reads and writes.

        Args:
            model: The model.
            kv_caches: One cache per layer; each step writes one slot per active row.
            rows: The rows of `DeviceBatch`; each step advances those that take part.
            block_size: Tokens per KV block.
        """
        self._model = model
        self._kv_caches = kv_caches
        self._rows = rows
        self._block_size = block_size

    @torch.inference_mode()
    def __call__(self, batch: Tensor, *, max_context_len: int, samples: bool) -> DecodeOutput:
        """Runs one step.

        Args:
            batch: Row numbers, [padded_size] int32; the padding row may stand behind the others.
            max_context_len: At least the longest context of the batch, this step's token included.
            samples: Whether to draw the next tokens by temperature alone and store them in the
                rows. If not, the caller samples from the logits and stores them.

        Returns:
            Tokens or logits. The rows' lengths are advanced in any case.
        """
        padded_size = batch.shape[0]
        num_blocks = -(-max_context_len // self._block_size)
        state = self._rows[:, : FIRST_BLOCK + num_blocks].index_select(0, batch)
        rows = batch.long()
        is_active = state[:, IS_ACTIVE]
        length = state[:, LENGTH]
        positions = length.long()
        block_table = state[:, FIRST_BLOCK:]
        block_ids = block_table.gather(1, (positions // self._block_size)[:, None])[:, 0]
        slots = block_ids * self._block_size + length % self._block_size
        metadata = AttentionMetadata(
            cu_seqlens_q=torch.arange(padded_size + 1, dtype=torch.int32, device=batch.device),
            context_lens=(length + 1) * is_active,
            block_table=block_table,
            slot_mapping=torch.where(is_active > 0, slots, -1),
            max_query_len=1,
            max_context_len=max_context_len,
        )
        hidden = self._model(state[:, TOKEN].long(), positions, self._kv_caches, metadata)
        logits = self._model.compute_logits_shard(hidden)
        self._rows[:, LENGTH].index_copy_(0, rows, length + is_active)
        if not samples:
            return DecodeOutput(None, logits)
        seeds = (state[:, SEED + 1].long() << 32) | (state[:, SEED].long() & 0xFFFFFFFF)
        temperatures = state[:, TEMPERATURE].contiguous().view(torch.float32)
        token_ids = sample_from_shard(self._model, logits, temperatures, seeds, positions + 1)
        # A padding row's logits mean nothing; its token must still be one.
        token_ids = token_ids * is_active
        self._rows[:, TOKEN].index_copy_(0, rows, token_ids.int())
        return DecodeOutput(token_ids, None)
