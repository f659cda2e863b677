"""Log-probabilities of a prompt's own tokens, from the hidden states of the steps that compute it.

Each position's logits say how probable the next token was. A chunk gives what it can; a sequence
that computes its prompt again after preemption gives it again, and the first answer counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nv_core import StepPlan
from nv_kernels import TokenLogprobs, token_logprobs
from nv_models import CausalLM
from nv_runtime.logprobs import to_host
from nv_runtime.sampling_needs import num_top_bucket
from nv_runtime.transfer import to_device

_MAX_ROWS = 256
"""Rows whose logits are made at once: a long chunk's logits together would fill gigabytes."""


@dataclass(frozen=True)
class PromptRows:
    """Rows of a step that say how probable some tokens of a prompt were.

    Attributes:
        seq_id: Whose prompt.
        first_row: Row of the step's tokens that the first of them is judged by.
        first_position: Position of the first of them in the prompt.
        token_ids: The tokens, one for each row from the first on.
        num_top: As `SamplingParams.prompt_logprobs`.
    """

    seq_id: int
    first_row: int
    first_position: int
    token_ids: list[int]
    num_top: int


@dataclass(frozen=True)
class PromptLogprobs:
    """What one step has found out about some tokens of a prompt.

    Attributes:
        seq_id: Whose prompt.
        first_position: Position of the first of them in the prompt.
        values: One row for each, on the host.
    """

    seq_id: int
    first_position: int
    values: TokenLogprobs


def prompt_rows_of(plan: StepPlan) -> list[PromptRows]:
    """Finds the rows of a step that somebody wants log-probabilities from."""
    found = []
    first_row = 0
    batch = plan.sequences
    for seq, first, count in zip(
        batch.sequences, batch.num_computed_tokens, batch.num_scheduled_tokens, strict=True
    ):
        num_top = seq.sampling_params.prompt_logprobs
        if num_top is not None and first + 1 < seq.num_prompt_tokens:
            stop = min(first + 1 + count, seq.num_prompt_tokens)
            token_ids = seq.token_ids[first + 1 : stop]
            found.append(PromptRows(seq.seq_id, first_row, first + 1, token_ids, num_top))
        first_row += count
    return found


def compute_prompt_logprobs(
    model: CausalLM, hidden: Tensor, wanted: list[PromptRows]
) -> list[PromptLogprobs]:
    """Computes what is wanted of a step, piece by piece.

    Args:
        model: The model.
        hidden: Hidden states of all tokens of the step, [num_tokens, hidden_size].
        wanted: What `prompt_rows_of` has found.

    Returns:
        Pieces whose values are on their way to the host.
    """
    return [piece for rows in wanted for piece in _pieces(model, hidden, rows)]


def _pieces(model: CausalLM, hidden: Tensor, rows: PromptRows) -> Iterator[PromptLogprobs]:
    for start in range(0, len(rows.token_ids), _MAX_ROWS):
        token_ids = rows.token_ids[start : start + _MAX_ROWS]
        first_row = rows.first_row + start
        logits = model.compute_logits(hidden[first_row : first_row + len(token_ids)])
        values = token_logprobs(
            logits,
            to_device(token_ids, torch.int64, logits.device),
            num_top=num_top_bucket(rows.num_top, logits.shape[1]),
        )
        yield PromptLogprobs(
            rows.seq_id, rows.first_position + start, to_host(values, len(token_ids))
        )
