"""MixedStep: the forward pass of any plan, from its packed numbers to the rows to sample.

Like `nv_runtime.decode_step` it looks at no value on the host, so a short one can be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nv_kernels import LayerKVCache
from nv_models import CausalLM
from nv_runtime.input_builder import StepLayout


class MixedStep:
    """The device's part of a step with prompts in it."""

    def __init__(self, model: CausalLM, kv_caches: tuple[LayerKVCache, ...]) -> None:
        """Takes what every step reads and writes.

        Args:
            model: The model.
            kv_caches: One cache per layer; written.
        """
        self._model = model
        self._kv_caches = kv_caches

    @torch.inference_mode()
    def __call__(
        self,
        packed: Tensor,
        layout: StepLayout,
        *,
        num_samples: int,
        max_query_len: int,
        max_context_len: int,
    ) -> tuple[Tensor, Tensor]:
        """Runs one step.

        Args:
            packed: The step's numbers, [sum(layout.sizes)] int32.
            layout: How they are packed.
            num_samples: How many rows to sample.
            max_query_len: At least the longest query, in tokens.
            max_context_len: At least the longest context, in tokens.

        Returns:
            Hidden states of all tokens, [num_tokens, hidden_size], and the rows to sample,
            [num_samples] int64. Not yet their logits, of which a graph would keep a batch full for
            itself.
        """
        step = layout.unpack(
            packed,
            num_samples=num_samples,
            max_query_len=max_query_len,
            max_context_len=max_context_len,
        )
        hidden: Tensor = self._model(step.token_ids, step.positions, self._kv_caches, step.metadata)
        return hidden, step.sample_rows
