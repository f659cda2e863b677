"""AttentionMetadata: its parts must describe one batch, and from_lists must number the slots."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from nv_kernels import AttentionMetadata, KernelInputError


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def parts() -> dict[str, Any]:
    return {
        "cu_seqlens_q": int32(0, 2, 3),
        "context_lens": int32(2, 5),
        "block_table": int32(3, -1, 0, 1).view(2, 2),
        "slot_mapping": int32(12, 13, 4),
        "max_query_len": 2,
        "max_context_len": 5,
    }


def test_counts() -> None:
    metadata = AttentionMetadata(**parts())
    assert (metadata.num_seqs, metadata.num_tokens) == (2, 3)


def test_it_cannot_be_changed() -> None:
    metadata = AttentionMetadata(**parts())
    with pytest.raises(dataclasses.FrozenInstanceError):
        metadata.max_query_len = 3  # type: ignore[misc]


def test_another_batch_takes_nothing_that_was_worked_out_for_this_one() -> None:
    metadata = AttentionMetadata(**parts())
    metadata.derived["a plan"] = object()
    assert dataclasses.replace(metadata, block_table=int32(0, 1, 2, 3).view(2, 2)).derived == {}
    copied = copy.deepcopy(metadata)
    assert copied.derived == {}
    assert copied.block_table is not metadata.block_table
    assert torch.equal(copied.block_table, metadata.block_table)
    assert "a plan" in metadata.derived


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("cu_seqlens_q", int32(0, 2), r"context_lens has shape \[2\]"),
        ("cu_seqlens_q", int32(0, 2, 3).long(), "cu_seqlens_q has dtype torch.int64"),
        ("cu_seqlens_q", int32(0, 0, 2, 2, 3, 3)[::2], "cu_seqlens_q has strides"),
        ("context_lens", int32(2), r"context_lens has shape \[1\]"),
        ("context_lens", int32(2, 5).to("meta"), "context_lens is on meta"),
        ("block_table", int32(3, 0), r"block_table has shape \[2\]"),
        ("block_table", int32(3, -1, 0, 1).view(2, 2).T, "block_table has strides"),
        ("slot_mapping", int32(12, 13, 4).float(), "slot_mapping has dtype torch.float32"),
        *(
            (name, not_an_int, f"{name} is .*, but a length in tokens is an integer of 0 or more")
            for name in ("max_query_len", "max_context_len", "min_query_len")
            for not_an_int in (1.0, "2", None, True, int32(2))
        ),
        *(("is_settled", no_bool, "is_settled is") for no_bool in (1, None, "yes", int32(1))),
        *(
            (name, no_tensor, f"{name} is .*, but must be a tensor")
            for name in ("cu_seqlens_q", "context_lens", "block_table", "slot_mapping")
            for no_tensor in (None, [0, 2, 3])
        ),
        ("max_query_len", -1, "max_query_len is -1"),
        ("max_context_len", -2, "max_context_len is -2"),
        ("min_query_len", -3, "min_query_len is -3"),
    ],
)
def test_disagreeing_parts_are_refused(name: str, bad: object, message: str) -> None:
    with pytest.raises(KernelInputError, match=message):
        AttentionMetadata(**{**parts(), name: bad})


def test_from_lists() -> None:
    metadata = AttentionMetadata.from_lists(
        [2, 1, 3], [2, 5, 8], [[3], [7, 1], [4, 9]], block_size=4
    )
    assert metadata.cu_seqlens_q.tolist() == [0, 2, 3, 6]
    assert metadata.context_lens.tolist() == [2, 5, 8]
    assert metadata.block_table.tolist() == [[3, -1], [7, 1], [4, 9]]
    # 3 * 4 + 0, 3 * 4 + 1; position 4 is the first of block 1; positions 5 to 7 are in block 9.
    assert metadata.slot_mapping.tolist() == [12, 13, 4, 37, 38, 39]
    assert (metadata.max_query_len, metadata.max_context_len) == (3, 8)
    assert metadata.min_query_len == 1


def test_from_lists_takes_padding_for_no_query() -> None:
    metadata = AttentionMetadata.from_lists(
        [4, 2, 0], [4, 9, 0], [[0], [1, 2, 3], []], block_size=4
    )
    assert metadata.min_query_len == 2


def test_from_lists_of_nothing() -> None:
    metadata = AttentionMetadata.from_lists([], [], [], block_size=4)
    assert (metadata.num_seqs, metadata.num_tokens, metadata.min_query_len) == (0, 0, 0)
    assert metadata.cu_seqlens_q.tolist() == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], [1, 2], [[0], [1]]), "1, 2 and 2 entries"),
        (([3], [2], [[0]]), "query length 3, context length 2"),
        (([-1], [2], [[0]]), "query_lens has -1"),
        (([1], [9], [[0, 1]]), "2 blocks of 4 tokens"),
        *(
            (([1], [5], [[0, block]]), rf"block_tables\[0\] has {block!r}, .* from 0 to 536870911")
            for block in (-1, 2**29, 2**31, 1.0, True, None)
        ),
        *(
            (([1], [5], [[0, 1, block]]), rf"block_tables\[0\] has {block}, .* from -1 to")
            for block in (-2, 2**29, 2**31)
        ),
        (([1.0], [5], [[0, 1]]), r"query_lens has 1\.0"),
        (([1], ["5"], [[0, 1]]), "context_lens has '5'"),
        (([2**31], [2**31], [[0, 1]]), "query_lens has 2147483648"),
    ],
)
def test_from_lists_refuses(arguments: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(KernelInputError, match=message):
        AttentionMetadata.from_lists(*arguments, block_size=4)


@pytest.mark.parametrize("block_size", [0, -1, 4.0, None, True])
def test_from_lists_refuses_blocks_of_no_size(block_size: Any) -> None:  # noqa: ANN401
    with pytest.raises(KernelInputError, match="block_size has"):
        AttentionMetadata.from_lists([1], [2], [[0]], block_size=block_size)


def test_from_lists_takes_padded_tables_and_the_last_block_there_can_be() -> None:
    metadata = AttentionMetadata.from_lists([1], [5], [[2**29 - 1, 3, -1]], block_size=4)
    assert metadata.block_table.tolist() == [[2**29 - 1, 3, -1]]
    last = AttentionMetadata.from_lists([4], [4], [[2**29 - 1]], block_size=4)
    assert last.slot_mapping.tolist()[-1] == 2**31 - 1
