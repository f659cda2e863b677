"""What attention must know about one step's batch, and the cache of one layer.

Knows how tokens map to sequences, blocks and slots; does not know who chose the batch. Both types
are passed as arguments to every op that needs them. Read `ops/attention.py` next.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nv_kernels.checks import check_bool, check_is_tensor, check_tensor
from nv_kernels.errors import KernelInputError

if TYPE_CHECKING:
    from collections.abc import Sequence


_MAX_INT32 = 2**31 - 1


class LayerKVCache(NamedTuple):
    """The paged keys and values of one layer.

    Both tensors are [num_blocks, block_size, num_kv_heads, head_dim] with any strides, as long as
    the last dimension is contiguous; two views of one allocation are fine. Their dtype is that of
    queries, or float8_e4m3fn (see `kv_quantisation.py`); values of the latter need even strides.
    """

    key: Tensor
    value: Tensor
    k_scale: float = 1.0
    """What a cached key is to be multiplied by; 1.0 unless the cache is fp8."""
    v_scale: float = 1.0
    """What a cached value is to be multiplied by; 1.0 unless the cache is fp8."""


class FreshKV(NamedTuple):
    """A step's own keys and values of one layer, as they also stand in the cache.

    Both tensors are [num_tokens, num_kv_heads, head_dim], dtype of the query, with any strides but
    a contiguous last dimension.
    """

    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """One step's batch: which query tokens and which cached tokens belong to which sequence.

    The tokens of all sequences stand one after the other in the token dimension. A sequence is a
    pair (query length, context length); a whole prompt (equal lengths), a later chunk of a prompt
    (a query shorter than its context) and a decode step (a query of 1) are values of that pair.

    Padding, as captured graphs need it, is allowed in two places: sequences with query length 0
    (their context length must be 0 too), which must follow the real ones, and tokens after the
    last sequence (their slot should be -1).

    All tensors are int32 and on one device. Their contents are trusted, not checked, and must stay
    as they are once an op has got them: what it works out from them is kept in `derived`.
    """

    cu_seqlens_q: Tensor
    """[num_seqs + 1]; the query tokens of sequence i are rows `[i]` to `[i + 1]`, starting at 0."""
    context_lens: Tensor
    """[num_seqs] tokens of each sequence in the cache, those of this step included."""
    block_table: Tensor
    """[num_seqs, max_num_blocks] block ids in the order of their tokens; -1 pads a row."""
    slot_mapping: Tensor
    """[num_tokens] `block_id * block_size + offset` of each token; -1 means "do not store"."""
    max_query_len: int
    """At least the longest query length of the batch, in tokens."""
    max_context_len: int
    """At least the longest context length of the batch, in tokens."""
    min_query_len: int = 0
    """At most the shortest query length of the sequences that have any, in tokens; 0 if unknown. A
    backend may save itself the search for decode steps if this is over 1."""
    is_settled: bool = False
    """Whether the kernel that is launched directly before an op writes none of these tensors, in
    all ops that get this metadata. Kernels may then read them before that one has ended."""
    derived: dict[str, object] = field(default_factory=dict, init=False, repr=False)
    """What a backend works out once for all layers of the step, by a key of its own. A copy with
    other tensors (`dataclasses.replace`, `copy.deepcopy`) begins with none."""

    def __post_init__(self) -> None:
        """Checks that the parts describe the same batch.

        Raises:
            KernelInputError: A shape, dtype or device disagrees, a limit is no length, or
                `is_settled` no bool.
        """
        check_is_tensor("cu_seqlens_q", self.cu_seqlens_q)
        device = self.cu_seqlens_q.device
        int32 = (torch.int32,)
        check_tensor("cu_seqlens_q", self.cu_seqlens_q, "[num_seqs + 1]", [None], dtypes=int32)
        num_seqs = self.cu_seqlens_q.shape[0] - 1
        for name, tensor, layout, sizes in (
            ("context_lens", self.context_lens, "[num_seqs]", [num_seqs]),
            ("block_table", self.block_table, "[num_seqs, max_num_blocks]", [num_seqs, None]),
            ("slot_mapping", self.slot_mapping, "[num_tokens]", [None]),
        ):
            check_tensor(name, tensor, layout, sizes, dtypes=int32, device=device)
        for name, tensor in (
            ("cu_seqlens_q", self.cu_seqlens_q),
            ("context_lens", self.context_lens),
            ("slot_mapping", self.slot_mapping),
        ):
            if not tensor.is_contiguous():
                raise KernelInputError(
                    f"{name} has strides {list(tensor.stride())}, but must be contiguous. "
                    "Call .contiguous() on it."
                )
        if self.block_table.shape[1] > 1 and self.block_table.stride(1) != 1:
            raise KernelInputError(
                f"block_table has strides {list(self.block_table.stride())}, but each row must be "
                "contiguous. Call .contiguous() on it."
            )
        for name, limit in (
            ("max_query_len", self.max_query_len),
            ("max_context_len", self.max_context_len),
            ("min_query_len", self.min_query_len),
        ):
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
                raise KernelInputError(
                    f"{name} is {limit!r}, but a length in tokens is an integer of 0 or more. "
                    "Pass the true length of the batch."
                )
        check_bool("is_settled", self.is_settled)

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionMetadata:
        """Copies the tensors, and nothing that was worked out from them."""
        values = {f.name: deepcopy(getattr(self, f.name), memo) for f in fields(self) if f.init}
        return AttentionMetadata(**values)

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch, padding included."""
        return self.context_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Query tokens in the batch, padding included."""
        return self.slot_mapping.shape[0]

    @classmethod
    def from_lists(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionMetadata:
        """Builds the metadata of a batch from plain numbers, slots included.

        Meant for tests, benchmarks and first steps; an engine fills the tensors itself.

        Args:
            query_lens: Query tokens of each sequence in this step.
            context_lens: Tokens of each sequence in the cache, those of this step included.
            block_tables: Block ids of each sequence, enough for its context; -1 may pad them.
            block_size: Tokens per block.
            device: Where the tensors are made.

        Returns:
            The metadata; every query token has a slot.

        Raises:
            KernelInputError: The lists differ in length, hold what is no length or block id, a
                query is longer than its context, or a block table is too short for its context.
        """
        _check_integers("block_size", [block_size], least=1)
        if not len(query_lens) == len(context_lens) == len(block_tables):
            raise KernelInputError(
                f"query_lens, context_lens and block_tables have {len(query_lens)}, "
                f"{len(context_lens)} and {len(block_tables)} entries, but must have one per "
                "sequence. Pass lists of equal length."
            )
        _check_integers("query_lens", query_lens)
        _check_integers("context_lens", context_lens)
        # Every slot of a block must have a number.
        last_block = (_MAX_INT32 + 1) // block_size - 1
        slots: list[int] = []
        for seq, (query_len, context_len, blocks) in enumerate(
            zip(query_lens, context_lens, block_tables, strict=True)
        ):
            if not 0 <= query_len <= context_len <= len(blocks) * block_size:
                raise KernelInputError(
                    f"sequence {seq} has query length {query_len}, context length {context_len} "
                    f"and {len(blocks)} blocks of {block_size} tokens, but the query must fit in "
                    "the context and the context in the blocks. Correct the lengths or add blocks."
                )
            num_used = -(-context_len // block_size)
            name = f"block_tables[{seq}]"
            _check_integers(name, blocks[:num_used], most=last_block)
            _check_integers(name, blocks[num_used:], least=-1, most=last_block)
            slots += [
                blocks[position // block_size] * block_size + position % block_size
                for position in range(context_len - query_len, context_len)
            ]
        width = max((len(blocks) for blocks in block_tables), default=0)
        table = [list(blocks) + [-1] * (width - len(blocks)) for blocks in block_tables]

        def int32(values: Sequence[object]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return cls(
            cu_seqlens_q=int32([0, *accumulate(query_lens)]),
            context_lens=int32(context_lens),
            block_table=int32(table).reshape(len(table), width),
            slot_mapping=int32(slots),
            max_query_len=max(query_lens, default=0),
            max_context_len=max(context_lens, default=0),
            min_query_len=min((query_len for query_len in query_lens if query_len), default=0),
        )


def _check_integers(
    name: str, values: Sequence[int], *, least: int = 0, most: int = _MAX_INT32
) -> None:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise KernelInputError(
                f"{name} has {value!r}, but must have integers from {least} to {most}. Pass "
                "lengths in tokens and ids of blocks that exist."
            )
