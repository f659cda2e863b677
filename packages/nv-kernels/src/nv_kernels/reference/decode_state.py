"""Reading and advancing rows of state, in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from nv_kernels.ops.decode_state import StateColumns


def read_decode_state(
    rows: Tensor, batch: Tensor, *, columns: StateColumns, width: int, block_size: int
) -> tuple[Tensor, ...]:
    """Implements `nv_kernels.ops.decode_state.read_decode_state`."""
    state = rows[:, :width].index_select(0, batch)
    is_active = state[:, columns.is_active]
    length = state[:, columns.length]
    positions = length.long()
    block_table = state[:, columns.first_block :]
    block_ids = block_table.gather(1, (positions // block_size)[:, None])[:, 0]
    slots = block_ids * block_size + length % block_size
    return (
        state,
        state[:, columns.token].long(),
        positions,
        positions + 1,
        (length + 1) * is_active,
        torch.where(is_active > 0, slots, -1),
        torch.arange(len(batch) + 1, dtype=torch.int32, device=batch.device),
    )


def advance_decode_state(
    rows: Tensor, batch: Tensor, token_ids: Tensor, *, columns: StateColumns, advances_length: bool
) -> Tensor:
    """Implements `nv_kernels.ops.decode_state.advance_decode_state`."""
    numbers = batch.long()
    is_active = rows[:, columns.is_active][numbers]
    token_ids = token_ids * is_active
    rows[:, columns.token].index_copy_(0, numbers, token_ids.int())
    if advances_length:
        length = rows[:, columns.length]
        length.index_copy_(0, numbers, length[numbers] + is_active)
    return token_ids
