"""From a StepPlan to the tensors of one forward pass.

It knows positions, slots and layouts; it knows neither models nor sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from nv_core import ScheduledSequence, StepPlan
from nv_kernels import AttentionMetadata
from nv_runtime.transfer import to_device


@dataclass(frozen=True)
class ModelInput:
    """One forward pass over a ragged batch.

    Attributes:
        token_ids: Tokens of all sequences, one after the other, [num_tokens] int64.
        positions: Position of each token in its sequence, [num_tokens] int64.
        metadata: How attention sees the batch.
        sample_rows: Rows of the tokens whose logits are sampled, [num_samples] int64.
        last_rows: Row of each sequence's last token, on the host.
    """

    token_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    sample_rows: Tensor
    last_rows: list[int]


def build_model_input(plan: StepPlan, *, block_size: int, device: torch.device) -> ModelInput:
    """Builds the tensors of one step.

    Args:
        plan: The step. Where the last token of a sequence is not known to the host yet, 0 stands
            in for it.
        block_size: Tokens per KV block.
        device: Where the tensors go.

    Returns:
        The input; tokens of entry i stand in rows `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]`.
    """
    entries = plan.sequences
    starts = torch.tensor([entry.num_computed_tokens for entry in entries])
    counts = torch.tensor([entry.num_scheduled_tokens for entry in entries])
    token_ids = torch.tensor(list(chain.from_iterable(map(_token_ids, entries))))
    tables = [entry.block_table for entry in entries]
    width = max(map(len, tables))
    block_table = torch.tensor([[*table, *([-1] * (width - len(table)))] for table in tables])

    ends = counts.cumsum(0)
    row_of_token = torch.repeat_interleave(torch.arange(len(entries)), counts)
    first_row = ends - counts
    positions = torch.arange(len(token_ids)) - first_row[row_of_token] + starts[row_of_token]
    block_ids = block_table[row_of_token, positions // block_size]
    slots = block_ids * block_size + positions % block_size
    samples = torch.tensor([entry.samples for entry in entries])
    context_lens = starts + counts

    return ModelInput(
        token_ids=to_device(token_ids, torch.int64, device),
        positions=to_device(positions, torch.int64, device),
        metadata=AttentionMetadata(
            cu_seqlens_q=to_device(torch.cat((first_row[:1], ends)), torch.int32, device),
            context_lens=to_device(context_lens, torch.int32, device),
            block_table=to_device(block_table, torch.int32, device),
            slot_mapping=to_device(slots, torch.int32, device),
            max_query_len=int(counts.max()),
            max_context_len=int(context_lens.max()),
        ),
        sample_rows=to_device((ends - 1)[samples], torch.int64, device),
        last_rows=(ends - 1).tolist(),
    )


def _token_ids(entry: ScheduledSequence) -> list[int]:
    known = list(entry.token_ids)
    return known + [0] * (entry.num_scheduled_tokens - len(known))
