"""Reading and advancing rows of state that stay on the device from decode step to decode step.

With these two ops a decode step needs no tensor from the host: the first makes all of the step's
inputs of the rows that take part, the second puts the sampled tokens back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nv_kernels.checks import check_last_dim_contiguous, check_tensor
from nv_kernels.dispatch import choose_implementation
from nv_kernels.errors import KernelInputError

if TYPE_CHECKING:
    from collections.abc import Sequence


class StateColumns(NamedTuple):
    """Where a row of state keeps what these ops read; the other columns are the caller's."""

    token: int
    """The last token, whose keys and values are not in the cache yet."""
    length: int
    """Tokens in the cache, and so the position of the last token."""
    is_active: int
    """1; or 0 for a row that only pads batches, and has length 0."""
    first_block: int
    """First column of the block table, which reaches to the end of the row."""


class DecodeState(NamedTuple):
    """Inputs of one decode step."""

    state: Tensor
    """The rows that take part, [num_seqs, width] int32, contiguous."""
    token_ids: Tensor
    """[num_seqs] int64."""
    positions: Tensor
    """Of the tokens, [num_seqs] int64."""
    next_positions: Tensor
    """Of the tokens to be sampled, [num_seqs] int64."""
    context_lens: Tensor
    """Tokens in the cache once these are stored, [num_seqs] int32; 0 for padding."""
    slot_mapping: Tensor
    """Slot of each token, [num_seqs] int32; -1 for padding."""
    cu_seqlens_q: Tensor
    """0, 1, 2, ..., [num_seqs + 1] int32."""


def read_decode_state(
    rows: Tensor,
    batch: Tensor,
    *,
    columns: StateColumns,
    width: int,
    block_size: int,
    backend: str = "auto",
) -> DecodeState:
    """Makes the inputs of a decode step from the rows that take part in it.

    Args:
        rows: State, [num_rows, row_width] int32, contiguous last dimension; not changed. Every
            active row's table must hold the block of its token, in the columns that are copied.
            The values are not checked.
        batch: Numbers of the rows, [num_seqs] int32, contiguous; a padding row may stand in it
            several times.
        columns: Where what stands in a row.
        width: How many columns to copy; more than `columns.first_block`.
        block_size: Tokens per block.
        backend: "auto", "torch" or "triton".

    Returns:
        New tensors; the block table is `state[:, columns.first_block:]`.

    Raises:
        KernelInputError: A shape, dtype, device or stride disagrees, or a column lies outside.
    """
    _check(rows, batch, columns)
    if not columns.first_block < width <= rows.shape[1]:
        raise KernelInputError(
            f"width is {width}, but must be above first_block = {columns.first_block} and at most "
            f"the width of the rows, {rows.shape[1]}. Pass first_block + the blocks to look at."
        )
    if block_size < 1:
        raise KernelInputError(
            f"block_size is {block_size}, but must be at least 1. Pass that of the KV cache."
        )
    if choose_implementation(backend, rows.device) == "triton":
        from nv_kernels.triton import decode_state as implementation
    else:
        from nv_kernels.reference import decode_state as implementation  # type: ignore[no-redef]
    return DecodeState(
        *implementation.read_decode_state(
            rows, batch, columns=columns, width=width, block_size=block_size
        )
    )


def advance_decode_state(
    rows: Tensor,
    batch: Tensor,
    token_ids: Tensor,
    *,
    columns: StateColumns,
    advances_length: bool,
    backend: str = "auto",
) -> Tensor:
    """Puts new tokens into the rows that they were sampled for.

    Args:
        rows: As in `read_decode_state`; each active row of the batch gets its token and, if
            `advances_length`, a length of one more. A padding row gets token 0.
        batch: As in `read_decode_state`; no active row may stand in it twice.
        token_ids: The tokens, [num_seqs] int64, contiguous; not changed.
        columns: As in `read_decode_state`.
        advances_length: Whether the rows' last tokens have been stored in the cache.
        backend: "auto", "torch" or "triton".

    Returns:
        The tokens, those of padding 0, a new tensor.

    Raises:
        KernelInputError: A shape, dtype, device or stride disagrees, or a column lies outside.
    """
    _check(rows, batch, columns)
    sizes: Sequence[int] = batch.shape
    check_tensor(
        "token_ids", token_ids, "[num_seqs]", sizes, dtypes=(torch.int64,), device=rows.device
    )
    check_last_dim_contiguous("token_ids", token_ids)
    if choose_implementation(backend, rows.device) == "triton":
        from nv_kernels.triton import decode_state as implementation
    else:
        from nv_kernels.reference import decode_state as implementation  # type: ignore[no-redef]
    return implementation.advance_decode_state(
        rows, batch, token_ids, columns=columns, advances_length=advances_length
    )


def _check(rows: Tensor, batch: Tensor, columns: StateColumns) -> None:
    int32 = (torch.int32,)
    check_tensor("rows", rows, "[num_rows, row_width]", [None, None], dtypes=int32)
    check_last_dim_contiguous("rows", rows)
    check_tensor("batch", batch, "[num_seqs]", [None], dtypes=int32, device=rows.device)
    check_last_dim_contiguous("batch", batch)
    for name, column in zip(columns._fields, columns, strict=True):
        if not 0 <= column < rows.shape[1]:
            raise KernelInputError(
                f"columns.{name} is {column}, but rows has columns 0 to {rows.shape[1] - 1}. "
                "Pass the column's number."
            )
