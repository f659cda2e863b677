"""From a StepPlan to the tensors of one forward pass.

It knows positions, slots and layouts; it knows neither models nor sampling. A step's numbers travel
to the device in one piece: the host packs them into one list of int32, and what the model reads are
views of its copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, compress, repeat
from operator import add

import torch
from torch import Tensor

from nv_core import StepPlan
from nv_kernels import AttentionMetadata


@dataclass(frozen=True)
class ModelInput:
    """One forward pass over a ragged batch.

    Attributes:
        token_ids: Tokens of all sequences, one after the other, [num_tokens] int64.
        positions: Position of each token in its sequence, [num_tokens] int64.
        metadata: How attention sees the batch.
        sample_rows: Rows of the tokens whose logits are sampled, [num_samples] int64.
    """

    token_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    sample_rows: Tensor


@dataclass(frozen=True)
class StepLayout:
    """Where a step's numbers lie in their packed form; sizes may be larger than the step.

    Attributes:
        num_tokens: Tokens, padding included.
        num_seqs: Sequences, padding included.
        num_blocks: Length of a block table's row.
    """

    num_tokens: int
    num_seqs: int
    num_blocks: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Room for each part: token ids, positions, slots, starts, lengths, rows, tables.

        Each begins at a multiple of 16 bytes, as does what is allocated by itself. Triton compiles
        a kernel anew for every combination of arguments that do and arguments that do not.
        """
        tokens, seqs = self.num_tokens, self.num_seqs
        lengths = (tokens, tokens, tokens, seqs + 1, seqs, seqs, seqs * self.num_blocks)
        return tuple(-(-length // 4) * 4 for length in lengths)

    def unpack(
        self, packed: Tensor, *, num_samples: int, max_query_len: int, max_context_len: int
    ) -> ModelInput:
        """Reads a packed step.

        Args:
            packed: The step's numbers, [sum(sizes)] int32.
            num_samples: How many of the rows to sample count.
            max_query_len: At least the longest query, in tokens.
            max_context_len: At least the longest context, in tokens.

        Returns:
            Views of `packed`, except for what must be int64.
        """
        token_ids, positions, slots, starts, lengths, rows, tables = torch.split(
            packed, list(self.sizes)
        )
        return ModelInput(
            token_ids=token_ids[: self.num_tokens].long(),
            positions=positions[: self.num_tokens].long(),
            metadata=AttentionMetadata(
                cu_seqlens_q=starts[: self.num_seqs + 1],
                context_lens=lengths[: self.num_seqs],
                block_table=tables[: self.num_seqs * self.num_blocks].view(
                    self.num_seqs, self.num_blocks
                ),
                slot_mapping=slots[: self.num_tokens],
                max_query_len=max_query_len,
                max_context_len=max_context_len,
                is_settled=True,  # a model starts with other kernels: embedding, norm, projection
            ),
            sample_rows=rows[:num_samples].long(),
        )


@dataclass(frozen=True)
class PackedStep:
    """A step's numbers on the host.

    Attributes:
        values: Packed as a `StepLayout` says, [sum(sizes)] int32.
        num_samples: Sequences that get a token.
        max_query_len: Longest query, in tokens.
        max_context_len: Longest context, in tokens.
        unknown_tokens: Place in `values` of each token that only the device knows, by `seq_id`; 0
            stands there.
    """

    values: Tensor
    num_samples: int
    max_query_len: int
    max_context_len: int
    unknown_tokens: dict[int, int]


def layout_of(plan: StepPlan) -> StepLayout:
    """The layout that fits a plan exactly."""
    return StepLayout(
        num_tokens=plan.num_scheduled_tokens,
        num_seqs=len(plan.sequences),
        num_blocks=max(plan.sequences.num_blocks),
    )


def pack_step(plan: StepPlan, layout: StepLayout, *, block_size: int) -> PackedStep:
    """Computes a step's numbers.

    Args:
        plan: The step.
        layout: At least as large as the plan in every size. Padding tokens have no slot and belong
            to no sequence; padding sequences have no tokens.
        block_size: Tokens per KV block.

    Returns:
        The step; tokens of entry i stand in rows `starts[i]` to `starts[i + 1]`.
    """
    batch = plan.sequences
    counts = batch.num_scheduled_tokens
    lengths = list(map(add, batch.num_computed_tokens, counts))
    starts = [0, *accumulate(counts)]
    rows = [end - 1 for end in compress(starts[1:], batch.samples)]
    # Arrays of the standard library: their `extend` takes whole ranges, where tensors would need
    # an operation for each sequence.
    token_ids, positions, slots, tables = array("i"), array("i"), array("i"), array("i")
    for seq, table, first, length, num_pending in zip(
        batch.sequences,
        batch.growing_tables,
        batch.num_computed_tokens,
        lengths,
        batch.num_pending_tokens,
        strict=True,
    ):
        if length == first + 1:
            # If it runs ahead, only the device knows the token.
            token_ids.append(0 if num_pending else seq.token_ids[first])
            positions.append(first)
            slots.append(table[first // block_size] * block_size + first % block_size)
        else:
            token_ids.extend(seq.token_ids[first:length])
            positions.extend(range(first, length))
            for run in _slots(table, first, length, block_size):
                slots.extend(run)
    for table, num_blocks in zip(batch.growing_tables, batch.num_blocks, strict=True):
        tables.extend(table[:num_blocks])
        tables.extend(repeat(-1, layout.num_blocks - num_blocks))

    values = array("i")
    for part, padding, size in zip(
        (token_ids, positions, slots, starts, lengths, rows, tables),
        (0, 0, -1, starts[-1], 0, 0, -1),
        layout.sizes,
        strict=True,
    ):
        values.extend(part)
        values.extend(repeat(padding, size - len(part)))
    return PackedStep(
        values=torch.frombuffer(values, dtype=torch.int32),
        num_samples=len(rows),
        max_query_len=max(counts),
        max_context_len=max(lengths),
        unknown_tokens={
            seq_id: end - 1
            for seq_id, end, num_pending in zip(
                batch.seq_ids, starts[1:], batch.num_pending_tokens, strict=True
            )
            if num_pending
        },
    )


def _slots(table: list[int], first: int, length: int, block_size: int) -> Iterator[range]:
    """Slots of the positions from `first` to before `length`, block by block."""
    for index in range(first // block_size, -(-length // block_size)):
        block_start = index * block_size
        shift = (table[index] - index) * block_size
        yield range(shift + max(first, block_start), shift + min(length, block_start + block_size))
