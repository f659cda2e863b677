"""DecodeStep: one token for each sequence of a batch, entirely on the device.

It reads the batch's rows, runs the model, samples and advances the rows. Nothing in it looks at a
value on the host, so it can be captured in a CUDA graph once and replayed for every step with the
same padded size (`nv_runtime.cuda_graphs`), or be called as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nv_kernels import AttentionMetadata, LayerKVCache, read_decode_state
from nv_models import CausalLM
from nv_runtime.device_batch import COLUMNS, FIRST_BLOCK
from nv_runtime.sampler import SampledTokens, Sampler
from nv_runtime.sampling_needs import SamplingNeeds


class DecodeStep:
    """The device's part of a decode step."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: tuple[LayerKVCache, ...],
        rows: Tensor,
        sampler: Sampler,
        *,
        block_size: int,
    ) -> None:
        """Takes what every step reads and writes.

        Args:
            model: The model.
            kv_caches: One cache per layer; each step writes one slot per active row.
            rows: The rows of `DeviceBatch`; each step advances those that take part.
            sampler: Samples the tokens; for the same rows.
            block_size: Tokens per KV block.
        """
        self._sampler = sampler
        self._model = model
        self._kv_caches = kv_caches
        self._rows = rows
        self._block_size = block_size

    @torch.inference_mode()
    def __call__(
        self, batch: Tensor, *, max_context_len: int, needs: SamplingNeeds
    ) -> SampledTokens:
        """Runs one step.

        Args:
            batch: Row numbers, [padded_size] int32; the padding row may stand behind the others.
            max_context_len: At least the longest context of the batch, this step's token included.
            needs: What sampling the next tokens needs.

        Returns:
            The next tokens, [padded_size]. They stand in the rows, whose lengths are advanced.
        """
        num_blocks = -(-max_context_len // self._block_size)
        inputs = read_decode_state(
            self._rows,
            batch,
            columns=COLUMNS,
            # Rows of an even width, so that seeds can be read as 64 bits where they are.
            width=FIRST_BLOCK + num_blocks + num_blocks % 2,
            block_size=self._block_size,
        )
        metadata = AttentionMetadata(
            cu_seqlens_q=inputs.cu_seqlens_q,
            context_lens=inputs.context_lens,
            block_table=inputs.state[:, FIRST_BLOCK : FIRST_BLOCK + num_blocks],
            slot_mapping=inputs.slot_mapping,
            max_query_len=1,
            max_context_len=max_context_len,
            is_settled=True,  # a model starts with other kernels: embedding, norm, projection
        )
        hidden = self._model(inputs.token_ids, inputs.positions, self._kv_caches, metadata)
        shard = self._model.compute_logits_shard(hidden)
        return self._sampler(
            shard, batch, inputs.state, inputs.next_positions, needs, advances_length=True
        )
