"""From a StepPlan to the tensors of one forward pass.

It knows positions, slots and layouts; it knows neither models nor sampling. A step's numbers travel
to the device in one piece: the host packs them into one list of int32, and what the model reads are
views of its copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, repeat

import torch
from torch import Tensor

from nv_core import ScheduledSequence, StepPlan
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
        num_blocks=max(entry.num_blocks for entry in plan.sequences),
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
    entries = plan.sequences
    counts = [entry.num_scheduled_tokens for entry in entries]
    lengths = [entry.num_computed_tokens + entry.num_scheduled_tokens for entry in entries]
    starts = [0, *accumulate(counts)]
    rows = [end - 1 for end, entry in zip(starts[1:], entries, strict=True) if entry.samples]

    # An array of the standard library: its `extend` takes whole ranges, where tensors would need
    # an operation for each sequence.
    values = array("i")
    sizes = iter(accumulate(layout.sizes))

    def pad(value: int) -> None:
        """Ends a part."""
        values.extend(repeat(value, next(sizes) - len(values)))

    for entry, stop in zip(entries, starts[1:], strict=True):
        values.extend(entry.token_ids)
        # A token that only the device knows is missing at the end.
        values.extend(repeat(0, stop - len(values)))
    pad(0)
    for entry, end in zip(entries, lengths, strict=True):
        values.extend(range(entry.num_computed_tokens, end))
    pad(0)
    for entry, end in zip(entries, lengths, strict=True):
        for slots in _slots(entry, end, block_size):
            values.extend(slots)
    pad(-1)
    values.extend(starts)
    pad(starts[-1])
    values.extend(lengths)
    pad(0)
    values.extend(rows)
    pad(0)
    for entry in entries:
        values.extend(entry.block_ids_from(0))
        values.extend(repeat(-1, layout.num_blocks - entry.num_blocks))
    pad(-1)
    return PackedStep(
        values=torch.frombuffer(values, dtype=torch.int32),
        num_samples=len(rows),
        max_query_len=max(counts),
        max_context_len=max(lengths),
        unknown_tokens={
            entry.seq_id: end - 1
            for entry, end, length in zip(entries, starts[1:], lengths, strict=True)
            if length > entry.num_known_tokens
        },
    )


def _slots(entry: ScheduledSequence, end: int, block_size: int) -> Iterator[range]:
    """Slots of the tokens that the entry computes, up to position `end`, block by block."""
    start = entry.num_computed_tokens
    first_block = start // block_size
    for index, block_id in enumerate(entry.block_ids_from(first_block), start=first_block):
        block_start = index * block_size
        shift = (block_id - index) * block_size
        yield range(shift + max(start, block_start), shift + min(end, block_start + block_size))
