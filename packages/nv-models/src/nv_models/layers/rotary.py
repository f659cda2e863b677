"""Rotary embedding on the device: one table of cosines and sines for the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from nv_models.rope import cos_sin_table, dynamic_inverse_frequencies, inverse_frequencies

if TYPE_CHECKING:
    from nv_kernels import AttentionMetadata
    from nv_models.rope import RopeConfig


class StepRotary(NamedTuple):
    """What every layer of one step rotates with."""

    rows: Tensor
    """Row of the table for each token, [num_tokens] int32 or int64."""
    cos_sin: Tensor
    """Cosines, then sines, [num_rows, head_dim] fp32."""


class RotaryEmbedding(nn.Module):
    """Holds the cosines and sines of every position, or computes them anew for each step.

    The second only where frequencies depend on the length of the sequence (`dynamic` scaling
    beyond its original length): see `nv_models.rope.dynamic_inverse_frequencies`.

    Args:
        rope: The rotary settings.
        head_dim: Size of a head.
        num_positions: Longest sequence in tokens.
        device: Device of the table.
    """

    cos_sin: Tensor

    def __init__(
        self, rope: RopeConfig, *, head_dim: int, num_positions: int, device: torch.device
    ) -> None:
        super().__init__()
        self.rope = rope
        self.head_dim = head_dim
        self.depends_on_length = rope.depends_on_length(num_positions)
        # Computed on the CPU, so that the numbers are the same whatever the device is.
        num_rows = 0 if self.depends_on_length else num_positions
        table = cos_sin_table(
            inverse_frequencies(rope, head_dim),
            torch.arange(num_rows, device="cpu"),
            attention_factor=rope.attention_factor,
        )
        self.register_buffer("cos_sin", table.to(device), persistent=False)

    def forward(self, positions: Tensor, metadata: AttentionMetadata) -> StepRotary:
        """Prepares one step.

        Args:
            positions: Position of each token in its sequence, [num_tokens] int64.
            metadata: The step's batch.

        Returns:
            What every layer of this step rotates with.
        """
        if not self.depends_on_length:
            return StepRotary(positions, self.cos_sin)
        ends = metadata.cu_seqlens_q[1:]
        rows = torch.arange(positions.shape[0], dtype=ends.dtype, device=positions.device)
        sequence = torch.searchsorted(ends, rows, right=True)
        # Rows beyond the last sequence (padding of a captured graph) take any length: 1.
        context_lens = metadata.context_lens
        lengths = torch.cat((context_lens, context_lens.new_ones(1)))[sequence]
        frequencies = dynamic_inverse_frequencies(self.rope, self.head_dim, lengths)
        table = cos_sin_table(frequencies, positions, attention_factor=self.rope.attention_factor)
        return StepRotary(rows, table)
