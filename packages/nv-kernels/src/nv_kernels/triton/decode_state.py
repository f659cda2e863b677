"""Reading and advancing rows of state as two Triton kernels.

Between two decode steps these few numbers are all there is to do; as a dozen small kernels of
PyTorch's they take longer than a layer of a small model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from nv_kernels.triton.device import device_of
from nv_kernels.triton.launch import launch_options, wait_for_previous

if TYPE_CHECKING:
    from torch import Tensor

    from nv_kernels.ops.decode_state import StateColumns

_COLUMNS_PER_LOAD = 128
_ROWS_PER_PROGRAM = 32


def read_decode_state(
    rows: Tensor, batch: Tensor, *, columns: StateColumns, width: int, block_size: int
) -> tuple[Tensor, ...]:
    """Implements `nv_kernels.ops.decode_state.read_decode_state`."""
    num_seqs = batch.shape[0]

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=rows.device)

    state = empty(num_seqs, width)
    wide = empty(3, num_seqs, dtype=torch.int64)
    narrow = empty(2, num_seqs)
    cu_seqlens_q = empty(num_seqs + 1)
    with device_of(rows):
        # One program more than there are sequences: cu_seqlens_q has one number more.
        _read_state_kernel[(num_seqs + 1,)](
            rows,
            batch,
            state,
            *wide.unbind(),
            *narrow.unbind(),
            cu_seqlens_q,
            num_seqs,
            rows.stride(0),
            width,
            **columns._asdict(),
            block_size=block_size,
            block_columns=_COLUMNS_PER_LOAD,
            num_warps=1,
            **launch_options(rows),
        )
    return (state, *wide.unbind(), *narrow.unbind(), cu_seqlens_q)


def advance_decode_state(
    rows: Tensor, batch: Tensor, token_ids: Tensor, *, columns: StateColumns, advances_length: bool
) -> Tensor:
    """Implements `nv_kernels.ops.decode_state.advance_decode_state`."""
    output = torch.empty_like(token_ids)
    num_seqs = batch.shape[0]
    if num_seqs == 0:
        return output
    with device_of(rows):
        _advance_state_kernel[(triton.cdiv(num_seqs, _ROWS_PER_PROGRAM),)](
            rows,
            batch,
            token_ids,
            output,
            num_seqs,
            rows.stride(0),
            token=columns.token,
            length=columns.length,
            is_active=columns.is_active,
            advances_length=advances_length,
            block_rows=_ROWS_PER_PROGRAM,
            num_warps=1,
            **launch_options(rows),
        )
    return output


@triton.jit(do_not_specialize=["num_seqs", "row_stride", "width"])  # type: ignore[untyped-decorator]
def _read_state_kernel(
    rows_ptr: tl.tensor,
    batch_ptr: tl.tensor,
    state_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    next_positions_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    cu_seqlens_q_ptr: tl.tensor,
    num_seqs: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    token: tl.constexpr,
    length: tl.constexpr,
    is_active: tl.constexpr,
    first_block: tl.constexpr,
    block_size: tl.constexpr,
    block_columns: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """Reads one row."""
    wait_for_previous(overlaps)
    index = tl.program_id(0)
    tl.store(cu_seqlens_q_ptr + index, index)
    if index == num_seqs:
        return
    row_ptr = rows_ptr + tl.load(batch_ptr + index).to(tl.int64) * row_stride
    active = tl.load(row_ptr + is_active)
    position = tl.load(row_ptr + length)
    block = tl.load(row_ptr + first_block + position // block_size)
    slot = block * block_size + position % block_size
    tl.store(token_ids_ptr + index, tl.load(row_ptr + token).to(tl.int64))
    tl.store(positions_ptr + index, position.to(tl.int64))
    tl.store(next_positions_ptr + index, position.to(tl.int64) + 1)
    tl.store(context_lens_ptr + index, (position + 1) * active)
    tl.store(slot_mapping_ptr + index, tl.where(active > 0, slot, -1))
    for start in range(0, width, block_columns):
        column = start + tl.arange(0, block_columns)
        inside = column < width
        values = tl.load(row_ptr + column, mask=inside)
        tl.store(state_ptr + index.to(tl.int64) * width + column, values, mask=inside)


@triton.jit(do_not_specialize=["num_seqs", "row_stride"])  # type: ignore[untyped-decorator]
def _advance_state_kernel(
    rows_ptr: tl.tensor,
    batch_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    output_ptr: tl.tensor,
    num_seqs: tl.tensor,
    row_stride: tl.tensor,
    token: tl.constexpr,
    length: tl.constexpr,
    is_active: tl.constexpr,
    advances_length: tl.constexpr,
    block_rows: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """Advances block_rows rows; a padding row perhaps several times, with the same values."""
    wait_for_previous(overlaps)
    index = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    inside = index < num_seqs
    number = tl.load(batch_ptr + index, mask=inside, other=0)
    row_ptr = rows_ptr + number.to(tl.int64) * row_stride
    active = tl.load(row_ptr + is_active, mask=inside, other=0)
    new_token = tl.load(token_ids_ptr + index, mask=inside, other=0) * active
    tl.store(output_ptr + index, new_token, mask=inside)
    tl.store(row_ptr + token, new_token.to(tl.int32), mask=inside)
    if advances_length:
        old_length = tl.load(row_ptr + length, mask=inside, other=0)
        tl.store(row_ptr + length, old_length + active, mask=inside)
