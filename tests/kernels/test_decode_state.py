"""Reading and advancing rows of state, against a loop over rows in plain Python."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_oracles import Target, targets
from nv_kernels import (
    KernelInputError,
    StateColumns,
    advance_decode_state,
    read_decode_state,
)

COLUMNS = StateColumns(token=2, length=0, is_active=4, first_block=6)
TARGETS = targets(dtypes=(torch.float32,))


def random_rows(rng: random.Random, num_rows: int, num_blocks: int, block_size: int) -> Tensor:
    """Rows of random content, of which the last is padding; tables hold the token's block."""
    rows = torch.tensor(
        [[rng.randrange(-(2**31), 2**31) for _ in range(6 + num_blocks)] for _ in range(num_rows)],
        dtype=torch.int32,
    )
    for row in rows:
        length = rng.randrange(num_blocks * block_size)
        row[COLUMNS.length], row[COLUMNS.is_active] = length, 1
        row[6 + length // block_size] = rng.randrange(1000)
    rows[-1, [COLUMNS.length, COLUMNS.is_active, COLUMNS.first_block]] = 0
    return rows


def random_batch(rng: random.Random, num_rows: int, num_seqs: int) -> list[int]:
    """Each active row at most once, then padding."""
    active = rng.sample(range(num_rows - 1), min(num_seqs, num_rows - 1))
    return active + [num_rows - 1] * (num_seqs - len(active))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("num_rows", "num_seqs", "num_blocks", "block_size"),
    [(2, 1, 1, 1), (9, 12, 3, 16), (40, 33, 131, 7), (5, 0, 2, 64), (300, 257, 260, 256)],
)
@pytest.mark.parametrize("seed", range(3))
def test_reading(
    target: Target, num_rows: int, num_seqs: int, num_blocks: int, block_size: int, seed: int
) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng, num_rows, num_blocks, block_size)
    batch = random_batch(rng, num_rows, num_seqs)
    # Every row must have its block within the columns that are copied.
    width = 6 + (num_blocks if seed else max(1, num_blocks - 1))
    for row in rows[:-1]:
        row[COLUMNS.length] = min(int(row[COLUMNS.length]), (width - 6) * block_size - 1)
        row[6 + int(row[COLUMNS.length]) // block_size] = rng.randrange(1000)
    on_device = rows.to(target.device)

    inputs = read_decode_state(
        on_device,
        torch.tensor(batch, dtype=torch.int32, device=target.device),
        columns=COLUMNS,
        width=width,
        block_size=block_size,
        backend=target.backend,
    )

    assert torch.equal(on_device.cpu(), rows)
    taken = [rows[row].tolist() for row in batch]
    lengths = [row[COLUMNS.length] for row in taken]
    active = [row[COLUMNS.is_active] for row in taken]
    slots = [
        row[6 + length // block_size] * block_size + length % block_size if is_active else -1
        for row, length, is_active in zip(taken, lengths, active, strict=True)
    ]
    assert inputs.state.tolist() == [row[:width] for row in taken]
    assert inputs.token_ids.tolist() == [row[COLUMNS.token] for row in taken]
    assert inputs.positions.tolist() == lengths
    assert inputs.next_positions.tolist() == [length + 1 for length in lengths]
    assert inputs.context_lens.tolist() == [
        (length + 1) * is_active for length, is_active in zip(lengths, active, strict=True)
    ]
    assert inputs.slot_mapping.tolist() == slots
    assert inputs.cu_seqlens_q.tolist() == list(range(num_seqs + 1))
    dtypes = [torch.int32, *[torch.int64] * 3, *[torch.int32] * 3]
    assert [tensor.dtype for tensor in inputs] == dtypes
    assert all(tensor.is_contiguous() for tensor in inputs)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("advances_length", [False, True])
@pytest.mark.parametrize(("num_rows", "num_seqs"), [(2, 1), (9, 12), (70, 65), (5, 0)])
def test_advancing(target: Target, num_rows: int, num_seqs: int, *, advances_length: bool) -> None:
    rng = random.Random(num_seqs)
    rows = random_rows(rng, num_rows, 5, 16)
    batch = random_batch(rng, num_rows, num_seqs)
    tokens = [rng.randrange(2**20) for _ in batch]
    expected = rows.clone()
    for row, token in zip(batch, tokens, strict=True):
        is_active = int(rows[row, COLUMNS.is_active])
        expected[row, COLUMNS.token] = token * is_active
        expected[row, COLUMNS.length] = rows[row, COLUMNS.length] + is_active * advances_length
    # Rows of a wider arena: what lies between them must stay.
    arena = torch.full((num_rows, rows.shape[1] + 3), -7, dtype=torch.int32, device=target.device)
    on_device = arena[:, : rows.shape[1]]
    on_device.copy_(rows)
    token_ids = torch.tensor(tokens, dtype=torch.int64, device=target.device)

    stored = advance_decode_state(
        on_device,
        torch.tensor(batch, dtype=torch.int32, device=target.device),
        token_ids,
        columns=COLUMNS,
        advances_length=advances_length,
        backend=target.backend,
    )

    assert torch.equal(on_device.cpu(), expected)
    assert bool((arena[:, rows.shape[1] :] == -7).all())
    assert token_ids.tolist() == tokens
    assert stored.tolist() == [
        token * int(rows[row, COLUMNS.is_active]) for row, token in zip(batch, tokens, strict=True)
    ]


def test_errors_name_the_argument() -> None:
    rows = torch.zeros(3, 9, dtype=torch.int32)
    batch = torch.zeros(2, dtype=torch.int32)
    whole: dict[str, Any] = {"columns": COLUMNS, "width": 8, "block_size": 4}
    reads: list[tuple[str, tuple[Tensor, Tensor], dict[str, Any]]] = [
        ("rows has dtype", (rows.long(), batch), {}),
        ("rows has stride 2", (torch.zeros(3, 18, dtype=torch.int32)[:, ::2], batch), {}),
        ("batch has dtype", (rows, batch.long()), {}),
        ("batch has shape", (rows, batch[None]), {}),
        ("batch is on meta", (rows, batch.to("meta")), {}),
        ("width is 6", (rows, batch), {"width": 6}),
        ("width is 10", (rows, batch), {"width": 10}),
        ("block_size is 0", (rows, batch), {"block_size": 0}),
        (r"columns.is_active is 9", (rows, batch), {"columns": COLUMNS._replace(is_active=9)}),
        (r"columns.token is -1", (rows, batch), {"columns": COLUMNS._replace(token=-1)}),
    ]
    for message, arguments, changes in reads:
        with pytest.raises(KernelInputError, match=message):
            read_decode_state(*arguments, **{**whole, **changes})
    tokens = torch.zeros(2, dtype=torch.int64)
    for message, token_ids in (
        ("token_ids has dtype", tokens.int()),
        ("token_ids has shape", tokens[:1]),
        ("token_ids is on meta", tokens.to("meta")),
        ("token_ids has stride 2", torch.zeros(4, dtype=torch.int64)[::2]),
    ):
        with pytest.raises(KernelInputError, match=message):
            advance_decode_state(rows, batch, token_ids, columns=COLUMNS, advances_length=True)
